"""A readable progress bar, and a Ctrl-C that loses nothing."""

import signal

import torch
from transformers import PrinterCallback, ProgressCallback, Trainer, TrainerCallback

from .errors import Stopped, stopping_signals
from .launching import print_once


class CompactProgress(ProgressCallback):
    """A progress bar with the few numbers that one watches; all of them are in the log."""

    SHOWN = {"reward": "reward", "grad_norm": "grad norm", "otb/energy/token_mean": "energy"}  # noqa: RUF012

    def on_log(self, args, state, control, logs=None, **kwargs):
        if state.is_world_process_zero and self.training_bar is not None:
            logged = {label: logs.get(key) for key, label in self.SHOWN.items()}
            shown = {label: f"{float(value):.3g}" for label, value in logged.items() if value is not None}
            if shown:
                self.training_bar.set_postfix(shown)


def show_compact_progress(trainer: Trainer) -> None:
    """Replace the trainer's printed log, and its progress bar if there is one."""
    trainer.remove_callback(PrinterCallback)
    if not trainer.args.disable_tqdm:
        trainer.remove_callback(ProgressCallback)
        trainer.add_callback(CompactProgress())


class CheckpointOnInterrupt(TrainerCallback):
    """
    Within its context, on Ctrl-C, SIGTERM or SIGHUP in a training step, finish the step, save a checkpoint and stop;
    on a second one, stop at once. In the first and the last evaluation there is no step to finish, so it raises
    [`Stopped`].

    All processes stop at the same step: a signal need not reach them in the same one.
    """

    def __init__(self):
        self.interrupted = self._training = self._trained = False

    def __enter__(self):
        self._previous = {s: signal.signal(s, self._on_signal) for s in stopping_signals()}
        return self

    def __exit__(self, *exception):
        for signum, handler in self._previous.items():
            signal.signal(signum, handler)

    def _on_signal(self, signum, frame):
        if self._trained:
            raise Stopped("Training was complete; its last evaluation was not.")
        if not self._training:
            raise Stopped("Nothing was trained yet, so there is nothing to resume.")
        if self.interrupted:
            raise Stopped("The step was not finished; the newest checkpoint is the last one that was saved.")
        self.interrupted = True
        print_once("\nInterrupted: finishing this step and saving a checkpoint. Once more to stop at once.")

    def on_step_begin(self, args, state, control, **kwargs):
        self._training = True

    def on_step_end(self, args, state, control, **kwargs):
        interrupted = torch.tensor(float(self.interrupted), device=args.device)
        if torch.distributed.is_initialized():
            torch.distributed.all_reduce(interrupted)
        if interrupted.item() > 0:
            self.interrupted = True
            args.save_only_model = False  # whatever was asked for: this checkpoint is there to resume from
            control.should_save = control.should_training_stop = True
            control.should_evaluate = False

    def on_train_end(self, args, state, control, **kwargs):
        self._trained = not self.interrupted
