"""
A short run with a copy of TRL in the place of the installed one, forked from a process that has imported the libraries
below TRL, which spares each run their import.
"""

import multiprocessing
import os
import sys
from pathlib import Path


FORKS = multiprocessing.get_context("forkserver")
FORKS.set_forkserver_preload(["torch", "transformers.trainer", "accelerate", "datasets", "peft"])


def _run(folder: str, out: str, environment: dict[str, str], arguments: tuple[str, ...]) -> None:
    log = os.open(out, os.O_CREAT | os.O_WRONLY)
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.environ |= environment
    sys.path.insert(0, folder)
    from tests.helpers import short_run

    short_run.main(*arguments)
    sys.stdout.flush()


def said(folder: Path, out: Path, *arguments: str, **environment: str) -> str:
    """What `short_run` of these arguments printed."""
    process = FORKS.Process(target=_run, args=(str(folder), str(out), environment, arguments))
    process.start()
    process.join(timeout=600)
    process.kill()  # if it hangs
    return out.read_text()
