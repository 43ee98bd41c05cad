"""How a recipe ends: errors are one line, and `--traceback` prints the rest."""

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


# Messages of C libraries for a full disk, which reach Python without an error number
DISK_FULL = re.compile(r"(?s)No space left on device|os error 28|inline_container.*(unexpected pos|write failed)")


class InputError(ValueError):
    """An invalid value from the user; the message names the value, the reason and the remedy."""


class Stopped(KeyboardInterrupt):
    """Ctrl-C or another of [`stopping_signals`] ended the run; the message says what is lost and what is kept."""


class HelpShown(SystemExit):
    """`--help` was printed. Any other `SystemExit` is an error: no other code should end a run."""


def rank() -> int:
    """The rank of this process among those launched together."""
    return int(os.environ.get("RANK", "0"))


def stopping_signals() -> list[int]:
    """The signals that end a run cleanly. A signal that was already ignored, as under `nohup`, stays ignored."""
    signals = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    return [signum for signum in signals if signal.getsignal(signum) is not signal.SIG_IGN]


def launch(file: str, main: Callable[[list[str]], None], argv: list[str]) -> None:
    """
    Run `main(argv)` as a script; `file` is its `__file__` or name.

    Exit codes: 0 on success, 2 for an `InputError`, 130 after Ctrl-C, SIGTERM or SIGHUP, and 1 for any other error.
    The traceback of the latter goes into a file named in the error line; `--traceback` in `argv` prints it instead.
    """
    name = os.path.basename(file)
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(errors="replace")  # for terminals that cannot show ±
    for signum in stopping_signals():
        signal.signal(signum, signal.default_int_handler)
    try:
        main(argv)
    except HelpShown:
        return
    except (Exception, SystemExit) as error:
        if "--traceback" in argv:
            traceback.print_exc()
        if rank() > 0:  # usually all processes fail alike: rank 0 prints, and the launcher ends the others
            time.sleep(5)
        print(f"{name}: error: {line_of(error)}", file=sys.stderr, flush=True)
        _exit(2 if isinstance(error, InputError) else 1)
    except KeyboardInterrupt as stop:
        if rank() == 0:
            print(f"\n{name}: stopped. {str(stop) or 'Nothing was trained.'}", file=sys.stderr, flush=True)
        _exit(130)
    _leave_together()


def line_of(error: BaseException) -> str:
    """The error in one line. For an unexpected error, the line names the file that holds its traceback."""
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
    Turn an error of another package into an `InputError` that starts with `prefix`. With `within`, function names,
    only errors raised inside one of these functions are converted.
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
    """Turn errors of these kinds into `InputError`s; their messages already name the value and the reason."""
    try:
        yield
    except kinds as error:
        raise error if isinstance(error, InputError) else InputError(str(error)) from error


@contextmanager
def constructing(model: str) -> Iterator[None]:
    """Wraps a trainer's construction, which fails if the model cannot be loaded or an option is rejected."""
    unloadable = f"`model_name_or_path` is {model!r}: the model cannot be loaded:"
    with input_errors(ValueError, ImportError), explained(unloadable, within=("from_pretrained",)):
        yield


def resuming(checkpoint: str | os.PathLike | None):
    """Wraps training, which fails if the checkpoint cannot be read."""
    loaders = ("_load_from_checkpoint", "_load_optimizer_and_scheduler", "_load_rng_state", "load_from_json")
    return explained(f"{checkpoint} is damaged; resume from an earlier checkpoint:", within=loaders)


def _leave_together() -> None:
    """Wait for all processes, since one that exits early takes the others with it."""
    import torch

    if not (torch.distributed.is_available() and torch.distributed.is_initialized()):
        return
    torch.distributed.barrier()
    if torch.distributed.get_backend() == "gloo":  # its threads can abort the interpreter's teardown after a good run
        _exit(0)
    torch.distributed.destroy_process_group()


def _exit(code: int) -> None:
    """Exit; with several processes, without teardown, which could hang or abort."""
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    sys.exit(code)
