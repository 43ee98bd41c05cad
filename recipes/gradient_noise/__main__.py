"""
Which baseline for my run? The noise of the gradient under each, measured on your own model, data and reward.

    python -m recipes.gradient_noise                                                      # the toy policy of math.py
    python -m recipes.gradient_noise --config recipes/tool_math_cpu.yaml --tools calculator
    python -m recipes.gradient_noise --config recipes/math_smollm2.yaml --num_prompts 12
    python -m recipes.gradient_noise --model_name_or_path FOLDER --dataset_name problems.jsonl
    python -m recipes.gradient_noise --plot_only --output_dir FOLDER

It samples a pool of completions for each prompt, as the trainer does, deals it into groups, and takes the exact
gradient of every group under every baseline. It ends in a table, a picture and a verdict. A run that was stopped goes
on where it was.
"""

from recipes.common.launching import tidy_output


tidy_output()

import json
import re
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import ClassVar

from tqdm import tqdm
from transformers import set_seed
from trl import get_quantization_config

from recipes.common.arguments import parse
from recipes.common.errors import InputError, Stopped, constructing, launch
from recipes.common.imports import load_object
from recipes.common.launching import processes, say
from recipes.common.models import check_prompts, load_tokenizer, model_path, with_adapter, with_prompts
from recipes.common.problems import Problems
from recipes.common.run_folder import configuration
from recipes.math import accuracy_reward, load_data
from recipes.tool_math import ToolMathArguments, calculator_tool
from trl_otb import OTBGRPOTrainer
from trl_otb.baselines import find_baseline
from trl_otb.rollout import Rollout

from .pools import KeepPools, Projection, WeightedScores, estimators, prompt_moments, returns_of
from .report import report
from .storage import Storage


CONFIG = "math_cpu.yaml"


@dataclass
class NoiseArguments(ToolMathArguments):
    ABOUT: ClassVar[str] = (
        "Which baseline for my run? Samples a pool of completions per prompt, takes the exact gradient of its groups "
        "under every baseline, and ends in a table, a picture and a verdict. Nothing is trained. A run that was "
        "stopped goes on where it was when the same command is given again."
    )
    FOLDER: ClassVar[str] = "runs/gradient_noise/seedSEED"
    WITHOUT_EFFECT: ClassVar[tuple[str, ...]] = tuple(
        "baseline leave_one_out eval_only allow_changes scale_rewards learning_rate max_steps num_generations beta "
        "per_device_train_batch_size gradient_accumulation_steps eval_strategy eval_steps num_generations_eval "
        "per_device_eval_batch_size save_steps logging_steps report_to resume_from_checkpoint loss_type".split()
    )

    num_prompts: int = field(default=16, metadata={"help": "Prompts that are studied, from the training data."})
    completions_per_prompt: int = field(
        default=128, metadata={"help": "Completions in a prompt's pool; more make every figure surer."}
    )
    baselines: list[str] = field(
        default_factory=lambda: ["ogb", "otb", "otb_shrunk", "ogb_pooled", "ogb_pooled_damped"],
        metadata={
            "help": "Baselines beside `none` and `group_mean`; those that read energies also with one left out."
        },
    )
    group_sizes: list[int] = field(default_factory=lambda: [4, 8], metadata={"help": "Completions per group, N."})
    prompts_per_batch: int = field(
        default=16,
        metadata={
            "help": "Prompts per step, for which efficiencies are; baselines that pool prompts see them together."
        },
    )
    parameters: str = field(
        default=".*", metadata={"help": "Only trainable parameters whose name holds this regular expression."}
    )
    projection: int = field(
        default=16_384,
        metadata={"help": "Numbers kept per gradient; inner products are off by √(2 / this), relative to the norms."},
    )
    tools: list[str] | None = field(
        default=None, metadata={"help": "`calculator`, or tools of your own as module:function."}
    )
    environment_factory: str | None = field(
        default=None,
        metadata={"help": "An environment's class as module:class; its reward is added to the recipe's grading."},
    )
    plot_only: bool = field(default=False, metadata={"help": "Table, picture and verdict from what is saved."})


def check(settings: NoiseArguments, args) -> None:
    smallest, largest = min(settings.group_sizes, default=0), max(settings.group_sizes, default=0)
    if smallest < 2:
        raise InputError(f"`group_sizes` is {settings.group_sizes}: give sizes of 2 or more, such as 4 8.")
    if settings.completions_per_prompt < max(4 * largest, 16):
        raise InputError(
            f"`completions_per_prompt` is {settings.completions_per_prompt} and the largest group has {largest}: a "
            f"pool needs four groups, and four of 4 for the group mean's law, so {max(4 * largest, 16)} or more."
        )
    if settings.num_prompts < 3:
        raise InputError(f"`num_prompts` is {settings.num_prompts}: intervals need 3 prompts or more, better 16.")
    for flag, value, remedy in (
        ("baseline", args.baseline != "otb", "`--baselines` names those that are compared"),
        ("leave_one_out", args.leave_one_out, "every baseline that reads energies is measured with and without"),
        ("eval_only", settings.eval_only, "nothing is trained here anyway"),
    ):
        if value:
            raise InputError(f"`{flag}` is set and has no effect here: {remedy}. Leave it out.")
    if settings.projection < 64:
        raise InputError(f"`projection` is {settings.projection}: 64 or more, thousands for a useful error.")
    for name in settings.baselines:
        try:
            entry = find_baseline(name)
        except ValueError as error:
            raise InputError(str(error)) from error
        if entry.across_prompts and entry.per_token:
            raise InputError(
                f"`baselines` names {name!r}, which compares prompts token by token. Of those that compare prompts, "
                "only ones with a number per completion (`per_token=False`) can be measured: leave it out."
            )


def main(argv: list[str]) -> None:
    settings, args, model_args = parse("gradient_noise", NoiseArguments, CONFIG, argv)
    if processes() > 1:
        raise InputError("gradient_noise runs in one process: start it with python -m recipes.gradient_noise.")
    if settings.prompts_per_batch < 3:
        raise InputError(f"`prompts_per_batch` is {settings.prompts_per_batch}: give 3 or more.")
    if settings.plot_only:
        check_plot_only(argv)
        return report(Storage(Path(args.output_dir), {}, read_only=True), settings.prompts_per_batch)
    check(settings, args)
    # The group mean at further sizes, for the law of its noise
    law = {n: estimators([]) for n in (2, 4, 8, 16) if 4 * n <= settings.completions_per_prompt}
    every = estimators(settings.baselines, args.alignment, args.zero_tail)
    studied = law | dict.fromkeys(settings.group_sizes, every)
    described = {
        "model": model_args.model_name_or_path,
        "dataset_name": settings.dataset_name,
        "completions_per_prompt": settings.completions_per_prompt,
        "group_sizes": settings.group_sizes,
        "zero_tail": args.zero_tail,
        "scores_have_mean_zero": _scores_have_mean_zero(args),
        "options": {estimator.name: estimator.options for estimator in every},
        "across_prompts": [estimator.name for estimator in every if estimator.across_prompts],
        "configuration": configuration(settings, args, model_args),
    }
    storage = Storage(Path(args.output_dir), described, overwrite=settings.overwrite)
    collect(settings, args, model_args, storage, partial(prompt_moments, studied=studied, seed=args.seed))
    report(storage, settings.prompts_per_batch)


def check_plot_only(argv: list[str]) -> None:
    said = [word.split("=")[0] for word in argv if word.startswith("--")]
    allowed = ("--plot_only", "--output_dir", "--seed", "--prompts_per_batch", "--traceback")
    other = [flag for flag in said if flag not in allowed]
    if other:
        raise InputError(
            f"`plot_only` draws what is saved, and {', '.join(other)} would change nothing: leave it out, or measure "
            "again without --plot_only."
        )


def collect(
    settings: NoiseArguments,
    args,
    model_args,
    storage: Storage,
    measure: Callable[[Rollout, WeightedScores], dict],
) -> None:
    """Fill `storage` with what `measure` finds in a pool of completions of every prompt that it lacks."""
    if len(storage) >= settings.num_prompts:
        return say(f"{storage.folder}: all {len(storage)} prompts are there.")
    problems, left = _problems_left(settings, args.seed, storage)
    bar = tqdm(total=settings.num_prompts, initial=len(storage), desc="prompts", disable=args.disable_tqdm)

    def keep(asked: str, rollout: Rollout) -> None:
        rewards, lengths = returns_of(rollout), rollout.mask.sum(dim=1).float()
        seen = {"asked": asked, "reward": rewards.mean().item(), "length": lengths.mean().item()}
        storage.add(seen | {"varies": bool((rewards != rewards[0]).any())} | measure(rollout, scores))
        bar.update()

    trainer = _sampler(settings, args, model_args, problems, left, keep)
    # Other samples than those of the prompts that are there, and the same adapter
    set_seed(args.seed + len(storage))
    named = [(n, p) for n, p in trainer.model.named_parameters() if p.requires_grad]
    studied_parameters = [p for n, p in named if re.search(settings.parameters, n)]
    if not studied_parameters:
        raise InputError(
            f"`parameters` is {settings.parameters!r}, which none of {len(named)} trainable parameters holds."
        )
    projection = Projection([p.numel() for p in studied_parameters], settings.projection, seed=args.seed)
    scores = WeightedScores(trainer.model, args.temperature, studied_parameters, projection)
    say(
        f"{sum(p.numel() for p in studied_parameters):,} parameters in {len(studied_parameters)} tensors; "
        + (
            "gradients are kept whole."
            if projection.exact
            else f"gradients are projected to {projection.dimension:,}."
        )
    )
    try:
        trainer.evaluate()
    except KeyboardInterrupt:
        same = "the same command without --overwrite" if settings.overwrite else "the same command"
        raise Stopped(
            f"{len(storage)} of {settings.num_prompts} prompts are kept in {storage.folder}; {same} goes on."
        ) from None
    finally:
        bar.close()


def _problems_left(settings, seed: int, storage: Storage) -> tuple[Problems, list[int]]:
    """The problems, and where the first different ones stand that are not measured yet."""
    problems = load_data(settings, seed)
    different = {}
    for i, row in enumerate(problems.train):
        different.setdefault(_asked(**row), i)
        if len(different) == settings.num_prompts:
            break
    if len(different) < settings.num_prompts:
        raise InputError(
            f"`num_prompts` is {settings.num_prompts} and the data has {len(different)} different problems to train "
            f"on, beside {len(problems.held_out)} that are held out. Ask for fewer, or see --num_held_out_problems."
        )
    measured = {prompt["asked"] for prompt in storage.prompts()}
    return problems, [i for asked, i in different.items() if asked not in measured]


def _sampler(
    settings, args, model_args, problems: Problems, left: list[int], keep: Callable[[str, Rollout], None]
) -> OTBGRPOTrainer:
    """Its evaluation hands every problem in `left`, as [`_asked`] tells it, to `keep` with a pool of completions."""
    model = model_path(model_args.model_name_or_path)
    tokenizer = load_tokenizer(model, args, model_args)
    tools = [
        calculator_tool(settings.max_operations) if name == "calculator" else load_object(name, "tools")
        for name in settings.tools or []
    ]
    environment = settings.environment_factory and load_object(settings.environment_factory, "environment_factory")
    prompts = with_prompts(problems.train.select(left), tokenizer, settings.instruction)
    check_prompts(prompts, tokenizer, model, args, tools)
    own_rewards = [load_object(name, "reward_funcs") for name in settings.reward_funcs or []]
    args.num_generations_eval = args.per_device_eval_batch_size = settings.completions_per_prompt
    args.eval_strategy, args.report_to, args.scale_rewards = "no", [], "none"
    args.disable_tqdm = True  # the trainer's own
    graded, asked = accuracy_reward(problems), []
    counts = args.reward_weights is None or args.reward_weights[0] != 0

    def accuracy(completions, **columns) -> list[float]:
        asked[:] = [_asked(columns["question"][0], columns.get("before", [None])[0])]
        # Grading what does not count can take longer than all else
        return graded(completions, **columns) if counts else [0.0] * len(completions)

    pools = KeepPools(lambda rollout: keep(asked[0], rollout))
    with constructing(model_args.model_name_or_path):
        model, peft_config = with_adapter(model, args, model_args)
        trainer = OTBGRPOTrainer(
            model=model,
            reward_funcs=[accuracy, *own_rewards],
            args=args,
            train_dataset=prompts,
            eval_dataset=prompts,
            processing_class=tokenizer,
            peft_config=peft_config,
            quantization_config=get_quantization_config(model_args),
            callbacks=[pools],
            tools=tools or None,
            environment_factory=environment,
        )
    pools.trainer = trainer
    return trainer


def _scores_have_mean_zero(args) -> bool:
    """Whether completions come from the policy whose log-probs are differentiated, each with all of its tokens."""
    cut = args.top_p < 1 or (args.top_k or 0) > 0 or (args.min_p or 0) > 0 or args.repetition_penalty != 1
    return not (cut or args.mask_truncated_completions or args.generation_kwargs)


def _asked(question: str, before: list | None = None, **_) -> str:
    """What tells a problem from others: the trainer takes them in an order of its own."""
    return json.dumps([question, before])


if __name__ == "__main__":
    launch("gradient_noise", main, sys.argv[1:])
