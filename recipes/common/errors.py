"""One boundary between a recipe and its user: an error is one line, and the traceback is one flag away."""

import errno
import os
import re
import signal
import sys
import tempfile
import textwrap
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager


# What C libraries say where Python has no error number
DISK_FULL = re.compile(r"(?s)No space left on device|os error 28|inline_container.*(unexpected pos|write failed)")


class InputError(ValueError):
    """The user gave a value that cannot be used; the message names the value, the reason and the remedy."""


class Stopped(KeyboardInterrupt):
    """A run ended by Ctrl-C or another of [`stopping_signals`]; the message says what is lost and what is kept."""


class HelpShown(SystemExit):
    """`--help` was asked for and printed; every other `SystemExit` comes from code that has no right to end a run."""


def rank() -> int:
    """This process's number among those that were launched together."""
    return int(os.environ.get("RANK", "0"))


def stopping_signals() -> list[int]:
    """Those that end a run in good order. What somebody else had ignored, as `nohup` does, stays ignored."""
    signals = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    return [signum for signum in signals if signal.getsignal(signum) is not signal.SIG_IGN]


def launch(file: str, main: Callable[[list[str]], None], argv: list[str]) -> None:
    """
    Run `main(argv)` as a script does; `file` is its `__file__` or name.

    Exit codes: 0 after a good run, 2 for an `InputError`, 130 after Ctrl-C, SIGTERM or SIGHUP, 1 for every other
    error, whose traceback goes into a file that the error line names. With `--traceback` in `argv` it is printed
    instead.
    """
    name = os.path.basename(file)
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(errors="replace")  # a terminal that knows no ± is no reason to end
    for signum in stopping_signals():
        signal.signal(signum, signal.default_int_handler)
    try:
        main(argv)
    except HelpShown:
        return
    except (Exception, SystemExit) as error:
        if "--traceback" in argv:
            traceback.print_exc()
        if rank() > 0:  # the same error mostly happens in every process: once the first says it, the others are ended
            time.sleep(5)
        print(f"{name}: error: {line_of(error)}", file=sys.stderr, flush=True)
        _exit(2 if isinstance(error, InputError) else 1)
    except KeyboardInterrupt as stop:
        if rank() == 0:
            print(f"\n{name}: stopped. {str(stop) or 'Nothing was trained.'}", file=sys.stderr, flush=True)
        _exit(130)
    _leave_together()


def line_of(error: BaseException) -> str:
    """The error in one line. The traceback of an error that nobody foresaw is kept, and the line says where."""
    text = textwrap.shorten(str(error), 600, placeholder=" …")
    if isinstance(error, InputError):
        return text
    if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EACCES, errno.EROFS):
        where = f" ({error.filename})" if error.filename else ""
        return f"{error.strerror}{where}: free some space or choose another --output_dir."
    if DISK_FULL.search(str(error)):
        return "No space left on device: free some, then resume with --resume_from_checkpoint latest."
    with tempfile.NamedTemporaryFile("w", prefix="trl_otb-", suffix=".txt", delete=False) as file:
        traceback.print_exception(error, file=file)
    return f"{type(error).__name__}: {text} (traceback: {file.name}, or print it with --traceback)"


@contextmanager
def explained(prefix: str, within: tuple[str, ...] | None = None) -> Iterator[None]:
    """
    Turn an error of another package into an `InputError` that starts with `prefix`, the value and the remedy. With
    `within`, names of functions, only errors that were raised below one of them are turned.
    """
    try:
        yield
    except InputError:
        raise
    except Exception as error:
        names = {frame.name for frame in traceback.extract_tb(error.__traceback__)}
        if within is not None and not names & set(within):
            raise
        raise InputError(f"{prefix} {type(error).__name__}: {error}") from error


@contextmanager
def input_errors(*kinds: type[Exception]) -> Iterator[None]:
    """Turn errors of these kinds into `InputError`s: what they say names the value and the reason."""
    try:
        yield
    except kinds as error:
        raise error if isinstance(error, InputError) else InputError(str(error)) from error


@contextmanager
def constructing(model: str) -> Iterator[None]:
    """Around a trainer's construction: the model cannot be loaded, or the trainer rejects an option."""
    unloadable = f"`model_name_or_path` is {model!r}: the model cannot be loaded:"
    with input_errors(ValueError, ImportError), explained(unloadable, within=("from_pretrained",)):
        yield


def resuming(checkpoint: str | os.PathLike | None):
    """Around training: a checkpoint that turns out not to be readable."""
    loaders = ("_load_from_checkpoint", "_load_optimizer_and_scheduler", "_load_rng_state", "load_from_json")
    return explained(f"{checkpoint} is damaged; resume from an earlier checkpoint:", within=loaders)


def _leave_together() -> None:
    """A process that is gone early takes the others with it."""
    import torch

    if not (torch.distributed.is_available() and torch.distributed.is_initialized()):
        return
    torch.distributed.barrier()
    if torch.distributed.get_backend() == "gloo":  # its threads can abort the interpreter's teardown after a good run
        _exit(0)
    torch.distributed.destroy_process_group()


def _exit(code: int) -> None:
    """Without teardown where there are other processes: it could wait for them, or abort."""
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    sys.exit(code)
