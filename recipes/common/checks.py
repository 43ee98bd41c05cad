"""Instant checks of option values, before anything is loaded."""

import math
import re
from argparse import Namespace

from .errors import InputError


# By error message: the condition for a valid value, and the options it applies to
RULES = {
    "must be at least 1": (
        lambda v: v >= 1,
        "num_train_problems num_held_out_problems max_operations num_generations_eval per_device_train_batch_size "
        "per_device_eval_batch_size gradient_accumulation_steps steps_per_generation generation_batch_size "
        "num_iterations max_completion_length max_tool_calling_iterations lora_r",
    ),
    "must be at least 2: a baseline compares the completions of a problem": (lambda v: v >= 2, "num_generations"),
    "must be at least -1": (lambda v: v >= -1, "max_steps"),
    "must be a finite number, 0 or more": (
        lambda v: math.isfinite(v) and v >= 0,
        "num_train_epochs learning_rate max_grad_norm beta",
    ),
    "must be a finite number above 0": (
        lambda v: math.isfinite(v) and v > 0,
        "temperature logging_steps save_steps eval_steps",
    ),
    "must be a finite number": (math.isfinite, "weight_decay reward_weights"),
    "must lie above 0 and be at most 1": (lambda v: 0 < v <= 1, "top_p"),
    "must lie between 0 and 4294967295": (lambda v: 0 <= v < 2**32, "seed"),
}
REASONING_GYM = "reasoning_gym:"
KINDS = "(jsonl|json|parquet|csv)"
FILE_FORMATS = {".jsonl": "json", ".json": "json", ".parquet": "parquet", ".csv": "csv"}
# Options (a regular expression), what they are for, the option they depend on, and the values of it (another one)
DEPENDENT = (
    ("dataset_config|dataset_split", "hub datasets", "dataset_name", rf"(?!{REASONING_GYM}|.*\.{KINDS}$).*"),
    ("(prompt|answer)_column", "files and hub datasets", "dataset_name", rf"(?!{REASONING_GYM}).*"),
    ("num_train_epochs", "runs without `max_steps`", "max_steps", "-.*"),
    ("eval_steps", "the strategy `steps`", "eval_strategy", "steps"),
    ("save_steps", "the strategy `steps`", "save_strategy", "steps|best"),
    ("logging_steps", "the strategy `steps`", "logging_strategy", "steps"),
    ("lora_.*|use_rslora|use_dora", "LoRA", "use_peft", "True"),
    ("bnb_.*|use_bnb_.*", "4-bit weights", "load_in_4bit", "True"),
    ("vllm_.*", "vLLM", "use_vllm", "True"),
    ("hub_.*", "uploads", "push_to_hub", "True"),
    ("ref_model_.*", "a synchronized reference model", "sync_ref_model", "True"),
    ("resume_from_checkpoint|overwrite|allow_changes", "training", "eval_only", "False"),
    ("overwrite", "a new run", "resume_from_checkpoint", "(?!latest$).*"),
    ("allow_changes", "a resumed run", "resume_from_checkpoint", "(?!None$).*"),
)
MOST_COMPLETIONS = 1_000_000  # per process and generation batch: more would run out of memory before the first step


def check_effects(values: Namespace, flags: set[str], in_file: set[str], unread: tuple[str, ...]) -> None:
    """
    Raise an `InputError` for an option that would change nothing: a flag that the recipe does not read, or an option
    that needs another one. If the other one is a flag, it may turn off options of the YAML file.
    """
    for name in sorted(flags.intersection(unread)):
        raise InputError(f"`{name}` is set and has no effect here: this recipe does not read it. Drop it.")
    for names, what, decider, values_of_it in DEPENDENT:
        value = getattr(values, decider)
        value = getattr(value, "value", value)  # of an enumeration
        for name in sorted(flags if decider in flags else flags | in_file):
            if re.fullmatch(names, name) and not re.fullmatch(values_of_it, str(value)):
                problem = f"it is for {what}, and `{decider}` is {value!r}"
                raise InputError(f"`{name}` is set and has no effect here: {problem}. Drop it, or change `{decider}`.")


def check_values(values: Namespace, processes: int) -> None:
    """Raise an `InputError` for an invalid value, or batch sizes that do not fit the group size."""
    for name, value in vars(values).items():
        if value != value:  # true of NaN only
            raise InputError(f"`{name}` is {value}, which is not a number.")
    for rule, (is_good, names) in RULES.items():
        for name in names.split():
            value = getattr(values, name, None)
            for single in value if isinstance(value, list) else [value]:
                if single is not None and not is_good(single):
                    raise InputError(f"`{name}` is {single}: it {rule}.")
    _check_groups(values, processes)
    count, weights = 1 + len(values.reward_funcs or []), values.reward_weights
    if weights is not None and len(weights) != count:
        each = "one for the recipe's grading, then one for each of `reward_funcs`"
        raise InputError(f"`reward_weights` has {len(weights)} numbers for {count} rewards: give {each}.")
    _check_trackers(values.report_to)


def _check_groups(values: Namespace, processes: int) -> None:
    """Check that generation batches and evaluation batches hold whole groups."""
    N, rows = values.num_generations, values.per_device_train_batch_size
    many = f"{processes} process{'es' * (processes > 1)}"
    name = "steps_per_generation" if values.steps_per_generation else "gradient_accumulation_steps"
    batch, made_of = values.generation_batch_size, f"--generation_batch_size {values.generation_batch_size}"
    remedy = f"a multiple of {N}"
    if not batch:
        steps = getattr(values, name)
        batch, made_of = rows * processes * steps, f"--per_device_train_batch_size {rows} × {many} × --{name} {steps}"
        remedy = f"--per_device_train_batch_size {math.ceil(rows / N) * N}"
    if batch > MOST_COMPLETIONS * processes:
        raise InputError(f"a generation batch would hold {batch:,} completions ({made_of}): lower one of these.")
    if batch % N:
        divisor = max(d for d in range(1, min(N, batch) + 1) if batch % d == 0)
        other = f"--num_generations {divisor}, or " if divisor > 1 else ""
        problem = f"a generation batch of {batch} completions ({made_of}) does not hold whole groups of {N}"
        raise InputError(f"`num_generations` is {N}, and {problem}: use {other}{remedy}.")
    k, rows = values.num_generations_eval or N, values.per_device_eval_batch_size
    if rows * processes % k:
        problem = f"with {many} it does not hold whole groups of --num_generations_eval {k}"
        remedy = f"Use --per_device_eval_batch_size {math.ceil(rows / k) * k}"
        raise InputError(f"`per_device_eval_batch_size` is {rows}: {problem}. {remedy}.")


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
    """Raise an `InputError` if the problems do not fill one generation batch, so that nothing would be trained."""
    needed = generation_batch_size // num_generations
    if available < needed:
        batch = f"a generation batch of {generation_batch_size} in groups of {num_generations} needs {needed}"
        fits = f"--per_device_train_batch_size until the batch has at most {available * num_generations} completions"
        raise InputError(f"there are {available} problems to train on, and {batch}: add problems, or lower {fits}.")
