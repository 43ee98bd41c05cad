"""
Programs with a copy of TRL in the place of the installed one, forked from a process that has imported the libraries
below TRL, which spares each run their import.
"""

import multiprocessing
import os
import runpy
import sys
from pathlib import Path


FORKS = multiprocessing.get_context("forkserver")
FORKS.set_forkserver_preload(["torch", "transformers.trainer", "accelerate", "datasets", "peft"])


def _run(folder: str, out: str, environment: dict[str, str], program: str, arguments: tuple[str, ...]) -> None:
    log = os.open(out, os.O_CREAT | os.O_WRONLY)
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.environ |= environment
    sys.path.insert(0, folder)
    sys.argv = [program, *arguments]
    runpy.run_module(program, run_name="__main__")
    sys.stdout.flush()


def ran(folder: Path, out: Path, program: str, *arguments: str, **environment: str) -> tuple[int | None, str]:
    """The exit code of a module that is run as a program, and what it printed."""
    process = FORKS.Process(target=_run, args=(str(folder), str(out), environment, program, arguments))
    process.start()
    process.join(timeout=600)
    process.kill()  # if it hangs
    return process.exitcode, out.read_text()
