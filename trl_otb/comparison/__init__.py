"""Which baseline for my run? Measures the gradient noise under each baseline, on an existing trainer."""

import math
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import closing
from itertools import chain, cycle, islice
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
from accelerate.utils import gather_object
from datasets.fingerprint import Hasher

from ..baselines import BASELINES, Completions, batch_of_groups, find_baseline
from ..rollout import generated_mask
from ..run.baseline import RunBaseline
from ..run.sampler import changed_distribution
from ..seam.forwards import policy_of
from ..trainer import OTBGRPOTrainer, prompts_at_once
from .bar import Bar, announcement
from .efficiency import Comparison, Estimate, control
from .gradients import CompletionGradients, Projection, studied_parameters
from .moments import comparable, prompt_moments
from .pools import at_rest, sample, training_examples
from .progress import WITH_PROGRESS, aware_and_unaware, progress_of_rewards
from .report import BaselineReport, no_reward_varies


__all__ = ["BaselineReport", "Comparison", "Estimate", "compare_baselines"]

LEARN_BATCHES = 8  # generation batches that a baseline learns from before it is measured
COMPANION_BATCHES = 3  # how many batches the baselines that compare prompts see in turn
Example = tuple[str, dict[str, Any]]  # of the training data, with its hash


def compare_baselines(
    trainer: OTBGRPOTrainer,
    baselines: Sequence[str] | str | None = None,
    num_prompts: int = 16,
    completions_per_prompt: int = 64,
    group_sizes: Sequence[int] | int | None = None,
    parameters: str | None = None,
    *,
    prompts_per_batch: int | None = None,
    projection: int = 16_384,
    progress: bool = True,
    seed: int | None = None,
) -> BaselineReport:
    """
    Measure the variance of a step's gradient in `trainer`'s run under each baseline.

    For some prompts of the training data, it samples and rewards a pool of completions as the trainer would, splits it
    into groups, and computes the gradient of every group under every baseline, with the current policy. Nothing is
    trained, and the trainer's state is restored: training afterwards gives the same weights, to the bit, unless vLLM
    samples. Baselines that compare prompts or learn get batches of other prompts, which are sampled first: those
    that learn, 8 of them; the trainer's own baseline is measured as it is trained. Several processes share the prompts.
    Returns are not scaled, and the loss is the plain sum over tokens. How much will be sampled, and how many backward
    passes that takes, is printed before it begins; the bar says what is left.

    Args:
        trainer ([`OTBGRPOTrainer`]): With any data, reward functions, tools, environment, adapter or processor.
        baselines (`Sequence[str]` or `str`, *optional*): Names, or `"module:function"`; by default all registered
            ones. `none` and `group_mean` are always measured.
        num_prompts (`int`, *optional*, defaults to 16): Number of different prompts, at least 3; all, if the data has
            fewer. One or two are repeated, as where an environment makes the tasks.
        completions_per_prompt (`int`, *optional*, defaults to 64): At least four groups of the largest size.
        group_sizes (`Sequence[int]` or `int`, *optional*): Values of N; by default the trainer's own, half and double
            of it, if four groups fit into a pool, and 1, for baselines that compare prompts.
        parameters (`str`, *optional*): A regular expression: only trainable parameters whose name matches it are
            studied. Backward stops at the first of them, which saves most of the time.
        prompts_per_batch (`int`, *optional*): The number of prompts per step that the figures are for; by default the
            trainer's. A smaller N than the trainer's is in batches of more prompts, if so many were sampled.
        projection (`int`, *optional*, defaults to 16,384): Numbers kept per gradient; inner products are off by √(2 /
            `projection`), relative to the norms.
        progress (`bool`, *optional*, defaults to `True`): Whether, among all registered baselines, `value` is also
            measured with the run's reward functions as [progress functions][`~trl_otb.progress`], if it has none: they
            are called on the text so far, at some 64 places per completion. Not where one is a model or asynchronous.
        seed (`int`, *optional*): The seed of prompts and completions; by default the trainer's.

    Raises:
        ValueError: An argument is invalid, the model is sharded over processes, or no reward varies.
    """
    _check_trainer(trainer)
    args, n_of_run, completions = trainer.args, trainer.num_generations, completions_per_prompt
    seed, batch = args.seed if seed is None else seed, prompts_at_once(trainer)
    batch = batch if prompts_per_batch is None else prompts_per_batch
    sizes = _sizes(n_of_run, group_sizes, completions)
    for name, least in {"group_sizes": min(sizes), "prompts_per_batch": batch, "projection": projection}.items():
        if least < 1:
            raise ValueError(f"`{name}` is or holds {least}: give 1 or more.")
    names = [baselines] if isinstance(baselines, str) else BASELINES if baselines is None else baselines
    runs = {name: _instance(trainer, name) for name in ["none", *map(control, sizes), *names]}
    for name, run in runs.items():
        if not any(comparable(run.entry, n) for n in sizes):
            raise ValueError(
                f"`baselines` holds {name!r}, which compares the completions of a prompt, and `group_sizes` is {sizes}"
                ": add 2 or more."
            )
    added = progress_of_rewards(trainer) if progress and baselines is None else None
    if added is not None:
        aware, unaware = aware_and_unaware(runs["value"].entry)
        runs[WITH_PROGRESS] = RunBaseline(aware)
        runs["value"].entry = unaware
    if group_sizes is None and 1 not in sizes and any(run.entry.scope == "batch" for run in runs.values()):
        sizes, runs = [1, *sizes], {control(1): _instance(trainer, control(1))} | runs
    entries = {name: run.entry for name, run in runs.items()}
    parameters_studied = studied_parameters(trainer, parameters)
    alone = all(entry.scope == "group" and not entry.learns for entry in entries.values())
    if num_prompts < 3:
        raise ValueError(f"`num_prompts` is {num_prompts}: measure at least 3.")
    drawn = _different_examples(trainer, num_prompts + (0 if alone else LEARN_BATCHES * batch), seed)
    if not drawn:
        raise ValueError("The training data has no example: there is nothing to measure.")
    repeated = len(drawn) if len(drawn) < 3 else 0  # as where an environment owns the data
    num_prompts = num_prompts if repeated else min(num_prompts, len(drawn))
    examples = [(f"{name} {i // len(drawn)}", row) for i, (name, row) in enumerate(islice(cycle(drawn), num_prompts))]
    others = drawn[num_prompts:]
    needs = frozenset({"energy"}).union(*(entry.needs for entry in entries.values()))
    project = Projection([p.numel() for p in parameters_studied], projection, seed)
    gradients = CompletionGradients(trainer, parameters_studied, project)
    processes, rank = trainer.accelerator.num_processes, trainer.accelerator.process_index
    silent = args.disable_tqdm or not trainer.accelerator.is_main_process
    learn_from = min(batch, len(others or examples))  # prompts of a batch
    fresh = any(run.entry.learns and not run.has_learned for run in runs.values())
    to_learn = 0 if alone else sum(learn_from * size for size in _companion_sizes(fresh, n_of_run, sizes))
    at_once = 1 + sum(entry.per_token and comparable(entry, n) for n in sizes for entry in entries.values())
    if not silent:
        print(
            announcement(
                len(runs), to_learn, num_prompts * completions, 1 + at_once, batch * n_of_run, added is not None
            )
        )
    bar = Bar(to_learn + num_prompts * completions, num_prompts * completions, silent)
    measured: list[dict[Any, Any]] = []

    def try_gradient(row: dict[str, Any]) -> None:
        """Measures how long the gradients of a completion take: the second time, as the first is slower."""
        for _ in range(2):
            began = time.perf_counter()
            gradients(row, torch.ones(at_once, row["completion_ids"].size(1), device=trainer.accelerator.device))
            bar.expect("measure", (time.perf_counter() - began) / processes)

    with closing(bar), at_rest(trainer, needs, added):
        companions: list[dict[str, Completions]] = []
        learned: dict[str, float] = {}
        if not alone:
            with bar.phase("sample"):
                companions, learned = _learn(
                    trainer, [*runs.values()], others or examples, batch, sizes, seed, bar.advance, try_gradient
                )
            pools = [pool for of in companions for pool in of.values() if len(pool) > 1]
            # As many as are to be measured: these will not vary, either
            if sum(map(len, pools)) >= num_prompts * completions and not any(map(_varies, pools)):
                raise no_reward_varies(pools[0].whole_returns.mean().item())
        for first in range(0, num_prompts, processes):
            index = min(first + rank, num_prompts - 1)  # spare processes repeat the last one
            name, example = examples[index]
            with bar.phase("sample"):
                ((pool, rows),) = sample(trainer, [example], completions, seed + 1_000_003 * (index + 1))
                bar.advance(len(pool) * processes)

            def gradient_of(row: int, weights: torch.Tensor, rows: list[dict[str, Any]] = rows) -> torch.Tensor:
                found = gradients(rows[row], weights.to(trainer.accelerator.device))
                bar.advance(processes)
                return found

            other_prompts = {
                n: _other_prompts(companions, name, n, max(batch, batch * n_of_run // n) - 1) for n in sizes
            }
            masks = [generated_mask(row)[0].cpu() for row in rows]
            with bar.phase("measure"), torch.autocast("cpu", enabled=False):
                moments = prompt_moments(pool, masks, gradient_of, entries, sizes, other_prompts, seed + index)
            reward = pool.whole_returns[pool.scored > 0].mean().item()
            moments |= {"reward": reward, "length": pool.lengths.mean().item()}
            moments |= {"varies": _varies(pool), "along_the_way": pool.returns.size(1) > 1}
            measured += gather_object([moments])[: num_prompts - first]
    reasons = gather_object([added.unusable if added is not None else ""])
    if any(reasons):
        measured = [{key: of for key, of in moments.items() if key[0] != WITH_PROGRESS} for moments in measured]
        entries.pop(WITH_PROGRESS)
    # Rewards of turns or tokens that depend on later tokens bias rewards-to-go, so there the bias is measured
    along = any(prompt["along_the_way"] for prompt in measured)
    return BaselineReport.of(
        measured,
        unbiased={name: not (along and entry.per_token) for name, entry in entries.items() if entry.unbiased},
        scores_have_mean_zero=_scores_have_mean_zero(args),
        group_size=n_of_run if n_of_run in sizes else next((n for n in sizes if n > 1), 1),
        group_sizes=sizes,
        completions_per_prompt=completions,
        prompts_per_batch=batch,
        learned=learned,
        progress_error=next(filter(None, reasons), ""),
        baseline=trainer.baseline.entry.name,
        repeated=repeated,
        subject=Path(
            getattr(policy_of(trainer.model).config, "_name_or_path", "") or type(policy_of(trainer.model)).__name__
        ).name,
    )


def _varies(pool: Completions) -> bool:
    return bool((pool.whole_returns[pool.scored > 0].diff() != 0).any())


def _learn(
    trainer: OTBGRPOTrainer,
    runs: list[RunBaseline],
    examples: list[Example],
    prompts_per_batch: int,
    sizes: list[int],
    seed: int,
    advance: Callable[[int], Any],
    with_first: Callable[[dict[str, Any]], Any],
) -> tuple[list[dict[str, Completions]], dict[str, float]]:
    """
    Let baselines that have not learned yet learn from sampled batches; returns these, for others to be compared with,
    and the metrics' means over the last half of them. `with_first` is called with a row of the first one.
    """
    fresh = [run for run in runs if run.entry.learns and not run.has_learned]
    some, n, companions = cycle(examples), trainer.num_generations, []
    metrics: dict[str, list[float]] = {}
    of_batches = _companion_sizes(bool(fresh), n, sizes)
    many = len(of_batches)
    for batch, size in enumerate(of_batches):
        of_batch = list(islice(some, min(prompts_per_batch, len(examples))))
        sampled = sample(trainer, [row for _, row in of_batch], size, seed + 7919 * (batch + 1))
        pools = [pool for pool, _ in sampled]
        whole = batch_of_groups([pool.rows(slice(0, n), n) for pool in pools])
        advance(size * len(pools))
        if batch == 0:
            with_first(sampled[0][1][0])
        with torch.autocast("cpu", enabled=False):
            learned = [run.advantages_of(whole, learn=True).learned for run in fresh]
        for name, value in chain.from_iterable(of.items() for of in learned):
            metrics.setdefault(name, [])
            if 2 * batch >= many and math.isfinite(value):
                metrics[name].append(value)
        companions.append({name: pool for (name, _), pool in zip(of_batch, pools, strict=True)})
    return companions, {name: fmean(values) if values else math.nan for name, values in metrics.items()}


def _companion_sizes(fresh: bool, n: int, sizes: list[int]) -> list[int]:
    """How many completions of each prompt the batches have that baselines learn from, or are compared with."""
    # A smaller N is put in a batch with more prompts
    many = LEARN_BATCHES if fresh else min(max(COMPANION_BATCHES, n // min(sizes)), LEARN_BATCHES)
    return [max(n, *sizes) if batch < COMPANION_BATCHES else n for batch in range(many)]


def _other_prompts(companions: list[dict[str, Completions]], but: str, n: int, most: int) -> list[list[Completions]]:
    """A few batches of at most `most` prompts `but` one, of which each has `n` completions or more."""
    batches = []
    for first in range(min(COMPANION_BATCHES, len(companions))):
        others: dict[str, Completions] = {}
        for name, pool in chain.from_iterable(of.items() for of in companions[first:] + companions[:first]):
            if name != but and len(pool) >= n:
                others.setdefault(name, pool)
        batches.append([*others.values()][:most])
    return batches


def _instance(trainer: OTBGRPOTrainer, name: str) -> RunBaseline:
    """A baseline ready to be called: a copy of the trainer's own as it is trained, or a new one."""
    if not isinstance(name, str):
        raise ValueError(f"`baselines` holds {name!r}: give names, or 'module:function'.")
    entry, trained = find_baseline(name), trainer.baseline
    return trained.copied() if trained.has_learned and trained.entry.name == entry.name else RunBaseline(entry)


def _sizes(n_of_run: int, group_sizes: Sequence[int] | int | None, completions: int) -> list[int]:
    if group_sizes is None:
        group_sizes = [
            n for n in (n_of_run // 2, n_of_run, 2 * n_of_run) if n == n_of_run or (n >= 2 and 4 * n <= completions)
        ]
    sizes = [group_sizes] if isinstance(group_sizes, int) else sorted({*group_sizes})
    if completions < 4 * max(sizes):
        raise ValueError(
            f"`completions_per_prompt` is {completions} and the largest group has {max(sizes)}: a pool needs four "
            f"groups, so {4 * max(sizes)} or more."
        )
    return sizes


def _check_trainer(trainer: Any) -> None:
    if not isinstance(trainer, OTBGRPOTrainer):
        raise TypeError(
            f"`trainer` is a {type(trainer).__name__}: compare_baselines takes an OTBGRPOTrainer. Make one, with the "
            "same model, reward functions and data; it need not train."
        )
    deepspeed = trainer.accelerator.state.deepspeed_plugin
    if trainer.is_fsdp_enabled or (deepspeed is not None and deepspeed.zero_stage == 3):
        raise ValueError(
            "The model is sharded over processes (ZeRO-3 or FSDP), so no process has whole gradients. Measure in one "
            "process, with DDP, or with ZeRO-1 or 2; `parameters` limits the gradients to some parameters."
        )


def _different_examples(trainer: OTBGRPOTrainer, most: int, seed: int) -> list[Example]:
    """At most `most` different training examples with their hashes, drawn at random if the dataset has a length."""
    data = training_examples(trainer)
    if hasattr(data, "__len__"):
        order = torch.randperm(len(data), generator=torch.Generator().manual_seed(seed)).tolist()
        rows: Iterable[dict[str, Any]] = (data[i] for i in order)
    else:
        rows = islice(iter(data), 100 * most)
    examples: dict[str, dict[str, Any]] = {}
    for row in rows:
        examples.setdefault(Hasher.hash(row), row)
        if len(examples) == most:
            break
    return list(examples.items())


def _scores_have_mean_zero(args: Any) -> bool:
    """Whether completions come from the policy whose log-probs are differentiated, each with all of its tokens."""
    return changed_distribution(args) is None and not args.mask_truncated_completions
