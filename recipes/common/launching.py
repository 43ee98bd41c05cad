"""Processes and commands: how this process was launched, which rank prints, and the command that resumes a run."""

import logging
import os
import shlex
import shutil
import sys
import warnings
from pathlib import Path

import psutil

from .errors import InputError, rank


def processes() -> int:
    """The number of processes launched together."""
    return int(os.environ.get("WORLD_SIZE", "1"))


def print_once(text: str) -> None:
    """Print in rank 0 only."""
    if rank() == 0:
        print(text, flush=True)


def tidy_output() -> None:
    """
    Show the trainer's log messages, and silence those of other packages that no user can act on: TRL using an old
    option name, bitsandbytes without a CPU kernel, DeepSpeed without a GPU. Call it before importing these packages.
    """
    logging.basicConfig(format="%(message)s")
    logging.getLogger("trl_otb").setLevel(logging.INFO)
    logging.getLogger("bitsandbytes").setLevel(logging.ERROR)
    warnings.filterwarnings("ignore", category=FutureWarning, module=r"(transformers|trl|accelerate|torch|peft)\b")
    os.environ.setdefault("TRL_EXPERIMENTAL_SILENCE", "1")
    import torch

    if not torch.accelerator.is_available():
        os.environ.setdefault("DS_ACCELERATOR", "cpu")


def command(argv: list[str]) -> str:
    """The command that started this run, with `argv` as the recipe's arguments, ready to paste into a shell."""
    if "TRL_OTB_MAKE_RUN" in os.environ:
        return f"make run ARGS={shlex.quote(shlex.join(argv))}" if argv else "make run"
    words = sys.orig_argv
    program = ["-m", words[words.index("-m") + 1]] if "-m" in words[:-1] else [sys.argv[0]]
    return shlex.join([*(_launcher() or [_as_found(sys.executable), *program]), *argv])


def _launcher() -> list[str] | None:
    """`accelerate launch … script.py` or `torchrun … script.py`, read from the parent process."""
    try:
        words = psutil.Process(os.getppid()).cmdline()
    except psutil.Error:
        return None
    script = next((i for i, word in enumerate(words) if i > 1 and Path(word).name == Path(sys.argv[0]).name), None)
    start = next((i for i, word in enumerate(words[:3]) if Path(word).name in ("accelerate", "torchrun")), None)
    if script is None or start is None:
        return None
    return [_as_found(words[start]), *words[start + 1 : script + 1]]


def _as_found(program: str) -> str:
    """A program's name if the shell finds it by name, else (no active environment) its full path."""
    name = Path(program).name
    return name if program in (name, shutil.which(name)) else program


def check_launcher() -> None:
    """Raise an `InputError` if the launcher asks for a GPU and there is none: it would fail later, or be ignored."""
    import torch

    if torch.accelerator.is_available():
        return
    if os.environ.get("ACCELERATE_USE_FSDP") == "true":
        use = "Use --config_file recipes/accelerate/multi_cpu.yaml"
        raise InputError(f"accelerate asks for FSDP, and there is no GPU: on a CPU it would silently run DDP. {use}.")
    precision = os.environ.get("ACCELERATE_MIXED_PRECISION", "no")
    if os.environ.get("ACCELERATE_USE_DEEPSPEED") == "true" and precision != "no":
        add = "Add --mixed_precision no after `accelerate launch`"
        raise InputError(f"DeepSpeed was asked for {precision}, but without a GPU the recipe uses float32. {add}.")


def flag_names(argv: list[str]) -> list[str]:
    """The names of the flags in `argv`, with `_` for `-`."""
    return [word.split("=")[0][2:].replace("-", "_") for word in argv if word.startswith("--")]


def without_flags(argv: list[str], *names: str) -> list[str]:
    """`argv` without these flags and their values."""
    kept, skipping = [], False
    for word in argv:
        if word.startswith("--"):
            skipping = flag_names([word])[0] in names
        if not skipping:
            kept.append(word)
    return kept


def warn_of_missing_processes() -> None:
    """Print a note if accelerate started fewer processes than asked for, as with `--cpu --num_processes 2`."""
    words = _launcher() or []
    if "--num_processes" not in words[:-1]:
        return
    asked_for = words[words.index("--num_processes") + 1]
    if asked_for.isdecimal() and int(asked_for) != processes():
        program = shlex.join([words[-1], *sys.argv[1:]])
        several = f"accelerate launch --multi_gpu --num_processes {asked_for} --num_machines 1 --mixed_precision no"
        print_once(f"Note: --num_processes {asked_for} was asked for, and accelerate started {processes()}. On CPUs:")
        print_once(f"  {several} --dynamo_backend no {program}")
