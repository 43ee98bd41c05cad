"""Checks of option values that take no time, before anything is loaded."""

import math
from argparse import Namespace

from .errors import InputError


def _at_least(least: int):
    return (lambda v: v >= least), f"must be at least {least}"


_FINITE = (math.isfinite, "must be a finite number")
_POSITIVE = (lambda v: math.isfinite(v) and v > 0, "must be a finite number above 0")
_NOT_NEGATIVE = (lambda v: math.isfinite(v) and v >= 0, "must be a finite number, 0 or more")
_SHARE = (lambda v: 0 < v <= 1, "must lie above 0 and be at most 1")

RULES = {
    "num_train_problems": _at_least(1),
    "num_held_out_problems": _at_least(1),
    "max_operations": _at_least(1),
    "num_generations": (lambda v: v >= 2, "must be at least 2: a baseline compares the completions of a problem"),
    "num_generations_eval": _at_least(1),
    "per_device_train_batch_size": _at_least(1),
    "per_device_eval_batch_size": _at_least(1),
    "gradient_accumulation_steps": _at_least(1),
    "steps_per_generation": _at_least(1),
    "generation_batch_size": _at_least(1),
    "num_iterations": _at_least(1),
    "max_completion_length": _at_least(1),
    "max_tool_calling_iterations": _at_least(1),
    "max_steps": _at_least(-1),
    "num_train_epochs": _NOT_NEGATIVE,
    "learning_rate": _NOT_NEGATIVE,
    "weight_decay": _FINITE,
    "max_grad_norm": _NOT_NEGATIVE,
    "temperature": _POSITIVE,
    "top_p": _SHARE,
    "beta": _NOT_NEGATIVE,
    "seed": (lambda v: 0 <= v < 2**32, "must lie between 0 and 4294967295"),
    "logging_steps": _POSITIVE,
    "save_steps": _POSITIVE,
    "eval_steps": _POSITIVE,
    "lora_r": _at_least(1),
}
MOST_COMPLETIONS = 1_000_000  # per process and generation batch: beyond it memory ends before the first step


def check_values(values: Namespace, processes: int) -> None:
    """
    Raises:
        InputError: A value makes no sense, or batch sizes and group sizes do not fit.
    """
    for name, (is_good, rule) in RULES.items():
        value = getattr(values, name, None)
        if value is not None and not is_good(value):
            raise InputError(f"`{name}` is {value}: it {rule}.")
    _check_groups(values, processes)
    count, weights = 1 + len(values.reward_funcs or []), values.reward_weights
    if weights is not None and len(weights) != count:
        raise InputError(
            f"`reward_weights` has {len(weights)} numbers for {count} rewards: give one for the recipe's grading, "
            "which comes first, and one for each of `reward_funcs`."
        )
    _check_trackers(values.report_to)


def _check_groups(values: Namespace, processes: int) -> None:
    """A generation batch and an evaluation batch hold whole groups."""
    N, rows = values.num_generations, values.per_device_train_batch_size
    steps = values.steps_per_generation or values.gradient_accumulation_steps
    name = "steps_per_generation" if values.steps_per_generation else "gradient_accumulation_steps"
    batch = values.generation_batch_size or rows * processes * steps
    made_of = (
        f"--generation_batch_size {batch}"
        if values.generation_batch_size
        else f"--per_device_train_batch_size {rows} × {processes} process{'es' * (processes > 1)} × --{name} {steps}"
    )
    if batch > MOST_COMPLETIONS * processes:
        raise InputError(
            f"a generation batch would hold {batch:,} completions ({made_of}): lower one of these numbers."
        )
    if batch % N:
        divisor = max(d for d in range(1, min(N, batch) + 1) if batch % d == 0)
        whole = math.ceil(rows / N) * N
        other = f"--num_generations {divisor}, or " if divisor > 1 else ""
        remedy = f"a multiple of {N}" if values.generation_batch_size else f"--per_device_train_batch_size {whole}"
        raise InputError(
            f"`num_generations` is {N}, and a generation batch of {batch} completions ({made_of}) does not hold whole "
            f"groups of {N}: use {other}{remedy}."
        )
    k, rows = values.num_generations_eval or N, values.per_device_eval_batch_size
    if rows * processes % k:
        whole = math.ceil(rows / k) * k
        raise InputError(
            f"`per_device_eval_batch_size` is {rows}: with {processes} process{'es' * (processes > 1)} it does not "
            f"hold whole groups of --num_generations_eval {k}. Use --per_device_eval_batch_size {whole}."
        )


def _check_trackers(report_to: str | list[str] | None) -> None:
    names = [report_to] if isinstance(report_to, str) else report_to or []
    if names in (["none"], ["all"], []):
        return
    from transformers.integrations import get_available_reporting_integrations
    from transformers.integrations.integration_utils import INTEGRATION_TO_CALLBACK

    for name in names:
        if name not in INTEGRATION_TO_CALLBACK:
            raise InputError(f"`report_to` is {name!r}: choose from none, {', '.join(INTEGRATION_TO_CALLBACK)}.")
        if name not in get_available_reporting_integrations():
            raise InputError(f"`report_to` is {name!r}, which is not installed: pip install {name}, or use none.")


def check_enough_problems(available: int, generation_batch_size: int, num_generations: int) -> None:
    """
    Raises:
        InputError: The problems do not fill one generation batch: nothing would be trained.
    """
    needed = generation_batch_size // num_generations
    if available < needed:
        raise InputError(
            f"there are {available} problems to train on, and a generation batch of {generation_batch_size} "
            f"completions in groups of {num_generations} needs {needed}: bring more problems, or lower "
            f"--per_device_train_batch_size or --gradient_accumulation_steps until a batch holds at most "
            f"{available * num_generations} completions."
        )
