"""Which baseline for my run? Measures the gradient noise under each baseline, on an existing trainer."""

import hashlib
import json
import operator
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack, nullcontext
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from accelerate.logging import get_logger
from accelerate.utils import gather_object
from datasets.fingerprint import Hasher
from tqdm import tqdm

from ..baselines import BASELINES, find_baseline
from ..baselines.groups import completion_returns
from ..seam.sampling import left_as_it_was, recording_states, rows_at_once, sample_pool, single_rows, training_examples
from ..trainer import OTBGRPOTrainer
from .efficiency import Comparison, Estimate
from .estimators import CONTROL, Estimator, estimators
from .gradients import CompletionGradients, Projection, studied_parameters
from .history import (
    BATCHES,
    History,
    advantages_among,
    beside_of,
    history_of,
    pool_of,
    prediction,
    rewards_of_tokens,
    with_history,
)
from .moments import prompt_moments
from .report import BaselineReport
from .storage import Storage, only_writer


logger = get_logger(__name__)
__all__ = ["BaselineReport", "Comparison", "Estimate", "compare_baselines"]

LAW_SIZES = (2, 4, 8, 16)  # group sizes at which the group mean is measured, to fit how its noise depends on N
# Options that affect sampling and rewards, in addition to model and data
_SAMPLING = (
    "temperature top_p top_k min_p repetition_penalty max_completion_length generation_kwargs chat_template_kwargs "
    "mask_truncated_completions max_tool_calling_iterations reward_weights multi_objective_aggregation use_vllm "
    "cast_lm_head_to_fp32 bf16 fp16"
).split()


def compare_baselines(
    trainer: OTBGRPOTrainer,
    baselines: Sequence[str] | str | None = None,
    num_prompts: int = 16,
    completions_per_prompt: int = 64,
    group_sizes: Sequence[int] | int | None = None,
    parameters: str | None = None,
    *,
    prompts_per_batch: int | None = None,
    output_dir: str | Path | None = None,
    overwrite: bool = False,
    projection: int = 16_384,
    seed: int | None = None,
) -> BaselineReport:
    """
    Measure the gradient noise of `trainer`'s run under each baseline.

    For some prompts of the training data, it samples and rewards a pool of completions as the trainer would, splits it
    into groups, and computes the gradient of every group under every baseline, with the current policy. Nothing is
    trained, and the trainer's state is restored: training afterwards gives the same weights, to the bit, unless vLLM
    samples, which has its own random state.

    With several processes, each measures its own prompts, and the results equal those of one process. A progress bar
    counts completions. Returns are not scaled (`scale_rewards` is ignored), and the loss is the plain sum over tokens.
    On a GPU, a language model takes as long as sampling the completions and about three training steps on them.
    Baselines on top of another, such as `value`, first see 8 batches of other prompts, sampled before the bar moves;
    with rewards per turn or token, with as many completions per prompt as the largest group.

    Example:

    ```python
    report = trl_otb.compare_baselines(trainer)
    report  # what to set, and what it is worth
    report.plot("noise.png")
    ```

    Args:
        trainer ([`OTBGRPOTrainer`]):
            With any data, reward functions, tools, environment, adapter or processor.
        baselines (`Sequence[str]` or `str`, *optional*):
            Names, or `"module:function"`; by default all registered ones. `none` and `group_mean` are always measured,
            and baselines that read energies are also measured with one left out.
        num_prompts (`int`, *optional*, defaults to 16):
            Number of different prompts, drawn from the training data; at least 3.
        completions_per_prompt (`int`, *optional*, defaults to 64):
            At least 16, and at least four groups of the largest size.
        group_sizes (`Sequence[int]` or `int`, *optional*):
            Values of N; by default the trainer's own, half and double of it, if four groups fit into a pool.
        parameters (`str`, *optional*):
            A regular expression: only trainable parameters whose name matches it are studied. Backward stops at the
            first of them, which saves most of the time.
        prompts_per_batch (`int`, *optional*):
            The number of prompts per step that the figures are for, at least 3; by default the trainer's.
        output_dir (`str` or `Path`, *optional*):
            A folder that stores every measured prompt. The same call resumes there; a larger `num_prompts` adds to it;
            another model, dataset or option is rejected.
        overwrite (`bool`, *optional*, defaults to `False`):
            Whether to replace the contents of `output_dir`, once the first prompt is measured.
        projection (`int`, *optional*, defaults to 16,384):
            Numbers kept per gradient; inner products are off by √(2 / `projection`), relative to the norms.
        seed (`int`, *optional*):
            The seed of prompts and completions; by default the trainer's.

    Returns:
        [`BaselineReport`]

    Raises:
        ValueError: An argument is invalid, the model is sharded over processes, no reward varies, or `output_dir`
            holds another measurement or is in use.
    """
    _check_trainer(trainer)
    args = trainer.args
    num_prompts = _whole("num_prompts", num_prompts)
    completions_per_prompt = _whole("completions_per_prompt", completions_per_prompt)
    projection = _whole("projection", projection)
    seed = _whole("seed", args.seed if seed is None else seed)
    if prompts_per_batch is not None:
        prompts_per_batch = _whole("prompts_per_batch", prompts_per_batch)
    if group_sizes is not None:
        group_sizes = [_whole("group_sizes", size) for size in _several(group_sizes)]
    if baselines is not None:
        baselines = _several(baselines)
        if wrong := [name for name in baselines if not isinstance(name, str)]:
            raise ValueError(
                f"`baselines` holds {wrong[0]!r}: give names, of `trl_otb.register_baseline`, or 'module:function'."
            )
    if not isinstance(overwrite, bool):
        raise ValueError(f"`overwrite` is {overwrite!r}: it must be True or False.")
    if not (parameters is None or isinstance(parameters, str)):
        raise ValueError(f"`parameters` is {parameters!r}: give a regular expression, as text.")
    if baselines is None:
        names = [name for name in BASELINES if not (_needs_all_tokens(name) or _only_remembers(name))]
    else:
        names = list(dict.fromkeys(baselines))
    sizes = _check_sizes(trainer.num_generations, group_sizes, completions_per_prompt, num_prompts)
    batch = trainer.prompts_per_batch if prompts_per_batch is None else prompts_per_batch
    if prompts_per_batch is not None and batch < 3:
        raise ValueError(f"`prompts_per_batch` is {batch}: give 3 or more.")
    if projection < 64:
        raise ValueError(f"`projection` is {projection}: give 64 or more, thousands for a useful error.")
    every = estimators(names, args.alignment, args.zero_tail)
    for estimator in every:
        if _only_remembers(estimator.baseline):
            raise ValueError(
                f"`baselines` names {estimator.baseline!r}, which remembers earlier batches. Of those, only ones on "
                "top of another baseline (`on_top_of`) can be measured: drop it."
            )
        if _needs_all_tokens(estimator.baseline):
            raise ValueError(
                f"`baselines` names {estimator.baseline!r}, which compares prompts token by token. Of those that "
                "compare prompts, only ones with a number per completion (`per_token=False`) can be measured: drop it."
            )
    on_top = [estimator.name for estimator in every if estimator.on_top_of is not None]
    studied_here = studied_parameters(trainer, parameters)
    batch = max(batch, 3)
    drawn = _different_examples(trainer, num_prompts + (BATCHES * batch if on_top else 0), seed)
    if len(drawn) < num_prompts:
        raise ValueError(
            f"`num_prompts` is {num_prompts} and the training data has {len(drawn)} different examples: ask for fewer."
        )
    examples, others = drawn[:num_prompts], drawn[num_prompts:]
    settings = {
        "subject": _model_name(trainer),
        "estimators": [vars(estimator) for estimator in every],
        "across_prompts": [estimator.name for estimator in every if estimator.across_prompts],
        "group_size": trainer.num_generations if trainer.num_generations in sizes else sizes[0],
        "group_sizes": sizes,
        "completions_per_prompt": completions_per_prompt,
        "prompts_per_batch": batch,
        "scores_have_mean_zero": _scores_have_mean_zero(args),
        "measured": {
            "weights": _fingerprint(trainer.model),
            "completions_per_prompt": completions_per_prompt,
            "group_sizes": sizes,
            "baselines": [vars(estimator) for estimator in every],
            "parameters": parameters,
            "projection": projection,
            "seed": seed,
            **({"history": history_of(trainer, on_top), "prompts_per_batch": batch} if on_top else {}),
            "rewards": trainer.reward_func_names,
            "tools": [getattr(tool, "__name__", str(tool)) for tool in trainer.tools or []],
            **{name: getattr(args, name, None) for name in _SAMPLING},
        },
    }
    law = {n: [Estimator(CONTROL, CONTROL)] for n in LAW_SIZES if 4 * n <= completions_per_prompt}
    studied = law | dict.fromkeys(sizes, every)
    reducer = Projection([p.numel() for p in studied_here], projection, seed=seed)
    gradients = CompletionGradients(trainer, studied_here, reducer)
    folder = None if output_dir is None else Path(output_dir)
    main = trainer.accelerator.is_main_process
    with ExitStack() as stack:

        def open_storage() -> Storage:
            stack.enter_context(only_writer(folder))
            return Storage(folder, settings, overwrite=overwrite)

        storage = _by_main_process(trainer, open_storage, lambda prompts: Storage(None, settings, prompts=prompts))
        kept, asked = {prompt["example"] for prompt in storage.prompts()}, {name for name, _ in examples}
        if not (kept <= asked or asked <= kept):
            raise ValueError(f"{folder} was measured on different data. Choose another folder, or remove this one.")
        bar = tqdm(
            total=num_prompts * completions_per_prompt,
            initial=len(kept & asked) * completions_per_prompt,
            desc="completions measured",
            disable=args.disable_tqdm or not main,
        )
        with bar, left_as_it_was(trainer), recording_states(trainer) if on_top else nullcontext():
            remembering: History = {}, []
            if on_top and not asked <= kept:
                history = others if len(others) >= batch else others + examples
                remembering = with_history(trainer, on_top, history, batch, max(sizes), seed)
            try:
                _measure(
                    trainer, storage, examples, gradients, studied, remembering, completions_per_prompt, seed, bar
                )
            except (Exception, KeyboardInterrupt) as error:
                if folder is None or not main:
                    raise
                same = "the same command without overwriting" if overwrite else "the same command"
                said = f"{len(storage.prompts())} of {num_prompts} prompts are kept in {folder}; {same} continues."
                if isinstance(error, KeyboardInterrupt):
                    raise KeyboardInterrupt(said) from error
                logger.warning(said)
                raise
        measured = {prompt["example"]: prompt for prompt in storage.prompts()}
        return BaselineReport.of(storage.settings, [measured[name] for name, _ in examples])


def _by_main_process(
    trainer: OTBGRPOTrainer, open_storage: Callable[[], Storage], copy_of: Callable[[list[dict[Any, Any]]], Storage]
) -> Storage:
    """The main process's storage, and copies of it in the others; an error is raised in all."""
    storage, error = None, None
    if trainer.accelerator.is_main_process:
        try:
            storage = open_storage()
        except ValueError as problem:
            error = problem
    prompts, error = gather_object([(storage.prompts() if storage is not None else [], error)])[0]
    if error is not None:
        raise error
    return copy_of(prompts) if storage is None else storage


def _measure(
    trainer: OTBGRPOTrainer,
    storage: Storage,
    examples: list[tuple[str, dict[str, Any]]],
    gradients: CompletionGradients,
    studied: dict[int, list[Estimator]],
    remembering: History,
    completions: int,
    seed: int,
    bar: Any,
) -> None:
    """Measure the examples missing in `storage`, one at a time on each process."""
    processes, rank = trainer.accelerator.num_processes, trainer.accelerator.process_index
    kept = {prompt["example"] for prompt in storage.prompts()}
    left = [index for index, (name, _) in enumerate(examples) if name not in kept]
    for first in range(0, len(left), processes):
        round_of = left[first : first + processes]
        index = round_of[min(rank, len(round_of) - 1)]  # spare processes repeat the last one
        name, example = examples[index]
        of_prompt = seed + 1_000_003 * (index + 1)
        found = _measure_prompt(trainer, name, example, gradients, studied, remembering, completions, of_prompt, bar)
        every = gather_object([{"example": name, **found}])
        if trainer.accelerator.is_main_process:
            bar.update(completions * (len(round_of) - 1))
        for at, of_process in zip(round_of, every, strict=False):
            storage.add(at, of_process)


def _measure_prompt(
    trainer: OTBGRPOTrainer,
    hashed: str,
    example: dict[str, Any],
    gradients: CompletionGradients,
    studied: dict[int, list[Estimator]],
    remembering: History,
    completions: int,
    seed: int,
    bar: Any,
) -> dict[Any, Any]:
    parts = sample_pool(trainer, example, completions, min(completions, rows_at_once(trainer)), seed % 2**32)
    rows = [row for _, batch in parts for row in single_rows(batch)]
    rollouts = [rollout for rollout, _ in parts]
    pool, (rules, batches) = pool_of(rollouts), remembering
    beside = beside_of(rollouts, [example] * completions) if rules else {}
    predicted, among = {}, {}
    if batches:
        pool.rewards = rewards_of_tokens(pool.rewards, pool.mask)
        of_run = trainer.args.alignment
        among = {name: advantages_among(rule, pool, beside, hashed, batches, of_run) for name, rule in rules.items()}
    elif pool.rewards.dim() == 2 and rules:
        raise ValueError(
            f"This prompt has rewards per turn or token, and those sampled before, from which {next(iter(rules))!r} "
            "has learned, have none: it cannot be measured on such data. Name other `baselines`."
        )
    else:
        predicted = {name: prediction(rule, pool, beside) for name, rule in rules.items()}

    def gradient_of(row: int, weights: torch.Tensor) -> torch.Tensor:
        found = gradients(rows[row], weights.to(trainer.accelerator.device))
        bar.update()
        return found

    returns = completion_returns(pool.rewards)
    return {
        "reward": returns.nanmean().item(),
        "length": pool.mask.sum(dim=1).float().mean().item(),
        "varies": bool((returns[~returns.isnan()].diff() != 0).any()),
        **prompt_moments(pool, gradient_of, studied, seed, predicted=predicted, among=among),
    }


def _several(values: Any) -> list[Any]:
    """A list of `values`, which may be a single one."""
    return list(values) if isinstance(values, Iterable) and not isinstance(values, str | bytes) else [values]


def _whole(name: str, number: Any) -> int:
    try:
        if not isinstance(number, bool):
            return operator.index(number)  # of NumPy's, too
    except TypeError:
        pass
    raise ValueError(f"`{name}` is {number!r}: give a whole number.")


def _check_trainer(trainer: Any) -> None:
    if not isinstance(trainer, OTBGRPOTrainer):
        raise TypeError(
            f"`trainer` is a {type(trainer).__name__}: compare_baselines takes an OTBGRPOTrainer, with the arguments "
            "of your GRPOTrainer."
        )
    deepspeed = trainer.accelerator.state.deepspeed_plugin
    if trainer.is_fsdp_enabled or (deepspeed is not None and deepspeed.zero_stage == 3):
        raise ValueError(
            "The model is sharded over processes (ZeRO-3 or FSDP), so no process has whole gradients. Measure in one "
            "process, with DDP, or with ZeRO-1 or 2; `parameters` limits the gradients to some parameters."
        )


def _check_sizes(own: int, group_sizes: Sequence[int] | None, completions: int, num_prompts: int) -> list[int]:
    if num_prompts < 3:
        raise ValueError(f"`num_prompts` is {num_prompts}: intervals need 3 prompts or more, better 16.")
    if group_sizes is None:
        sizes = [n for n in (own // 2, own, 2 * own) if n >= 2 and (4 * n <= completions or n == own)]
    else:
        sizes = sorted(set(group_sizes))
    if not sizes or min(sizes) < 2:
        raise ValueError(f"`group_sizes` is {list(group_sizes or [])}: give sizes of 2 or more, such as [4, 8].")
    if completions < max(4 * max(sizes), 16):
        raise ValueError(
            f"`completions_per_prompt` is {completions} and the largest group has {max(sizes)}: a pool needs four "
            f"groups, and four of 4 for the group mean's law, so {max(4 * max(sizes), 16)} or more."
        )
    return sizes


def _needs_all_tokens(name: str) -> bool:
    entry = find_baseline(name)
    return entry.across_prompts and entry.per_token


def _only_remembers(name: str) -> bool:
    entry = find_baseline(name)
    return entry.remembers and entry.on_top_of is None


def _different_examples(trainer: OTBGRPOTrainer, most: int, seed: int) -> list[tuple[str, dict[str, Any]]]:
    """At most `most` different training examples with their hashes, drawn at random if the dataset has a length."""
    data = training_examples(trainer)
    if hasattr(data, "__len__"):
        order = torch.randperm(len(data), generator=torch.Generator().manual_seed(seed)).tolist()
        rows: Iterable[dict[str, Any]] = (data[i] for i in order)
    else:
        rows = islice(iter(data), 100 * most)
    found: dict[str, dict[str, Any]] = {}
    for row in rows:
        found.setdefault(Hasher.hash(row), row)
        if len(found) == most:
            break
    return list(found.items())


def _scores_have_mean_zero(args: Any) -> bool:
    """Whether completions come from the policy whose log-probs are differentiated, each with all of its tokens."""
    cut = args.top_p < 1 or (args.top_k or 0) > 0 or (args.min_p or 0) > 0 or args.repetition_penalty != 1
    return not (cut or args.mask_truncated_completions or args.generation_kwargs)


def _fingerprint(model: torch.nn.Module) -> str:
    """A hash of names, shapes and weights that needs no copy of them: exact sums of their bits, plain and by place."""
    found = hashlib.sha256()
    for name, parameter in model.named_parameters():
        bits = parameter.detach().contiguous().view(-1).view(torch.uint8)
        sums = []
        for part in bits.split(2**24):
            values = part.long()
            place = torch.arange(len(part), device=part.device) % 65_521 + 1
            sums.append((values.sum() + 2**20 * (values * place).sum()).item())
        found.update(json.dumps([name, list(parameter.shape), str(parameter.dtype), sums]).encode())
    return found.hexdigest()[:16]


def _model_name(trainer: OTBGRPOTrainer) -> str:
    return Path(getattr(trainer.policy.config, "_name_or_path", "") or type(trainer.policy).__name__).name
