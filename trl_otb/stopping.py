"""Stopping a run without a loss, and the checkpoint to go on from: for the command line and the recipes."""

import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

from accelerate import PartialState
from accelerate.utils import gather_object
from transformers import TrainerCallback


class StopAfterStep(TrainerCallback):
    r"""
    Ctrl-C and SIGTERM finish the step, save a checkpoint and end the run; Ctrl-\ ends it at once.

    It stands in the place of transformers' `enable_jit_checkpoint`, which ignores Ctrl-C, saves before an optimizer
    step, where the samples of the step are lost, and lets every process stop at a step of its own.
    """

    def __init__(self) -> None:
        self.asked = False
        self.usual: dict[int, Any] = {}

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        for signum in {signal.SIGINT, signal.SIGTERM} - self.usual.keys():
            if signal.getsignal(signum) is not signal.SIG_IGN:  # as under nohup
                self.usual[signum] = signal.signal(signum, self.stop)

    def stop(self, signum: int, frame: Any) -> None:
        if not self.asked and os.environ.get("RANK", "0") == "0":
            os.write(2, b"\nFinishing this step and saving a checkpoint. Ctrl-\\ stops at once.\n")  # amid any print
        self.asked = True

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.asked = any(gather_object([self.asked]))  # all processes stop after the same step
        if self.asked:
            control.should_save = control.should_training_stop = True

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        for signum, handler in self.usual.items():
            signal.signal(signum, handler)
        self.usual = {}
        if self.asked and state.global_step < state.max_steps:
            PartialState().wait_for_everyone()  # a launcher ends all processes with the first
            if state.is_world_process_zero:
                print(f"Stopped after step {state.global_step}; its checkpoint is in {args.output_dir}.")
                print("To go on, repeat the command with --resume_from_checkpoint latest.", flush=True)
            sys.exit(130)  # as a program that Ctrl-C ends


def end_quietly_on_interrupt() -> None:
    """Let Ctrl-C before the first step, or after the last, end the program without a traceback."""
    usual = sys.excepthook

    def hook(kind: type[BaseException], error: BaseException, trace: Any) -> None:
        if not issubclass(kind, KeyboardInterrupt):
            return usual(kind, error, trace)
        print("\nInterrupted: nothing more was saved.", file=sys.stderr)

    sys.excepthook = hook


def latest_checkpoint(folder: str | Path) -> str | None:
    """The last checkpoint in `folder` that was saved to its end; one that was not is named."""
    found = [path for path in Path(folder).glob("checkpoint-*") if path.name.rpartition("-")[2].isdigit()]
    for path in sorted(found, key=lambda path: -int(path.name.rpartition("-")[2])):
        try:
            json.loads((path / "trainer_state.json").read_text())  # which is saved last
            return str(path)
        except (OSError, ValueError):
            print(f"{path} was not saved to its end, and is passed over.", file=sys.stderr)
    return None
