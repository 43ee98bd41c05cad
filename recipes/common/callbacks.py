"""A readable progress bar, and a Ctrl-C that loses nothing."""

import signal
import sys

import torch
from transformers import ProgressCallback, TrainerCallback


class CompactProgress(ProgressCallback):
    """A progress bar with the few numbers that one watches; all of them are in the log."""

    SHOWN = {"reward": "reward", "grad_norm": "grad norm", "otb/energy/token_mean": "energy"}  # noqa: RUF012

    def on_log(self, args, state, control, logs=None, **kwargs):
        if state.is_world_process_zero and self.training_bar is not None:
            shown = {
                label: f"{float(logs[key]):.3g}" for key, label in self.SHOWN.items() if logs.get(key) is not None
            }
            if shown:
                self.training_bar.set_postfix(shown)


class CheckpointOnInterrupt(TrainerCallback):
    """
    Within its context, on Ctrl-C or SIGTERM, finish the step, save a checkpoint and stop; on a second one, stop at once.

    All processes stop at the same step: a signal need not reach them in the same one.
    """

    def __init__(self):
        self.interrupted = False

    def __enter__(self):
        self._previous = {s: signal.signal(s, self._on_signal) for s in (signal.SIGINT, signal.SIGTERM)}

    def __exit__(self, *exception):
        for signum, handler in self._previous.items():
            signal.signal(signum, handler)

    def _on_signal(self, signum, frame):
        if self.interrupted:
            sys.exit(128 + signum)
        self.interrupted = True
        print("\nInterrupted: finishing this step and saving a checkpoint. Once more to stop at once.", flush=True)

    def on_step_end(self, args, state, control, **kwargs):
        interrupted = torch.tensor(float(self.interrupted), device=args.device)
        if torch.distributed.is_initialized():
            torch.distributed.all_reduce(interrupted)
        if interrupted.item() > 0:
            self.interrupted = True
            control.should_save = True
            control.should_training_stop = True
            control.should_evaluate = False
