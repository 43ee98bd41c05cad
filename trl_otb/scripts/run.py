"""
What scripts need around a trainer: arguments, held-out accuracy, stopping and resuming, and a short report.

Nothing else of this package imports it.
"""

import functools
import logging
import os
import signal
import sys
import time
import warnings
from collections import defaultdict
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

import torch
from accelerate.utils import gather_object
from datasets import Dataset
from tqdm import tqdm
from transformers import PrinterCallback, ProgressCallback, Trainer, TrainerCallback, TrainerState, TrainingArguments
from transformers.trainer_utils import get_last_checkpoint
from trl import ModelConfig, TrlParser

from ..config import OTBGRPOConfig
from ..trainer import OTBGRPOTrainer


class HeldOut(TrainerCallback):
    """
    The accuracy on held-out problems with its standard error, from the trainer's own evaluations.

    Results are printed and added to the trainer's log, the last one after the last step.

    Attributes:
        reward: The given one, for the trainer; it also collects the scores of held-out problems.
        problems: The given ones, numbered in the column `held_out`, for the trainer's `eval_dataset`.
    """

    def __init__(self, reward: Callable[..., list[Any]], problems: Dataset) -> None:
        self.problems = problems.add_column("held_out", [*range(len(problems))])
        self.scores: list[tuple[int, float]] = []

        @functools.wraps(reward)
        def collecting(held_out: list[int] | None = None, **kwargs: Any) -> list[Any]:
            scores = reward(**kwargs)
            if held_out is not None:
                self.scores += zip(held_out, (sum(s) if isinstance(s, list) else s for s in scores), strict=True)
            return scores

        self.reward = collecting

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == state.max_steps:  # before the last checkpoint is saved
            control.should_evaluate = True

    def on_evaluate(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        scores = defaultdict(list)
        for problem, score in gather_object(self.scores):
            scores[problem].append(score)
        self.scores = []
        k = args.num_generations_eval or args.num_generations
        means = [fmean(of[:k]) for of in scores.values()]  # several processes fill the last batch with repetitions
        error = stdev(means) / len(means) ** 0.5 if len(means) > 1 else float("nan")
        entry = {"step": state.global_step, "held_out/accuracy": fmean(means), "held_out/standard_error": error}
        state.log_history.append(entry)
        if state.is_world_process_zero:
            tqdm.write(f"Held-out accuracy at step {state.global_step}: {self.text(entry)}")

    @staticmethod
    def found(state: TrainerState) -> list[dict[str, float]]:
        """The entries of the log, also of the part before a run was resumed."""
        return [entry for entry in state.log_history if "held_out/accuracy" in entry]

    @staticmethod
    def text(entry: dict[str, float]) -> str:
        return f"{100 * entry['held_out/accuracy']:.1f} % ± {100 * entry['held_out/standard_error']:.1f}"


class StopAfterStep(TrainerCallback):
    """Ctrl-C and SIGTERM finish the step, save a checkpoint and stop. A second Ctrl-C stops at once."""

    stopped_at: float | None = None

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        for signum in (signal.SIGINT, signal.SIGTERM):
            if signal.getsignal(signum) is not signal.SIG_IGN:  # as under nohup
                signal.signal(signum, self.stop)

    def stop(self, signum: int, frame: Any) -> None:
        if self.stopped_at is None:
            self.stopped_at = time.monotonic()
            if os.environ.get("RANK", "0") == "0":
                tqdm.write("Finishing this step and saving a checkpoint. Ctrl-C again stops at once.")
        elif time.monotonic() > self.stopped_at + 1:  # launchers pass on what the terminal has sent already
            raise KeyboardInterrupt

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        stopped = any(gather_object([self.stopped_at is not None]))  # all processes stop after the same step
        if stopped and state.global_step < state.max_steps:
            self.stopped_at = self.stopped_at or time.monotonic()
            control.should_save = control.should_training_stop = True
            control.should_evaluate = False

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        usual: dict[int, Any] = {signal.SIGINT: signal.default_int_handler, signal.SIGTERM: signal.SIG_DFL}
        for signum, handler in usual.items():
            if signal.getsignal(signum) == self.stop:
                signal.signal(signum, handler)

    def leave_if_stopped(self, trainer: Trainer) -> None:
        """End a run that was stopped before its last step, with the exit code of Ctrl-C, and say how to go on."""
        if not self.stopped_at or trainer.state.global_step >= trainer.state.max_steps:
            return
        trainer.accelerator.wait_for_everyone()
        if trainer.is_world_process_zero():
            print(f"Stopped after step {trainer.state.global_step}; its checkpoint is in {trainer.args.output_dir}.")
            print("To go on, repeat the command with --resume_from_checkpoint latest.", flush=True)
        sys.exit(130)


class ShortProgress(ProgressCallback):
    """The progress bar with two numbers beside it; the log in trainer_state.json has all."""

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
        shown = {name: f"{float(logs[name]):.3g}" for name in ("reward", "grad_norm") if name in (logs or {})}
        if self.training_bar is not None and shown:
            self.training_bar.set_postfix(shown)


def shorten_progress(trainer: Trainer) -> None:
    """The bar of [`ShortProgress`], where a bar is shown, in place of a line per log."""
    trainer.remove_callback(PrinterCallback)
    if trainer.pop_callback(ProgressCallback):
        trainer.add_callback(ShortProgress())


def find_checkpoint(args: TrainingArguments) -> str | None:
    """The checkpoint to resume from. A folder with a run is an error unless the run is to be resumed."""
    folder, asked = Path(args.output_dir), args.resume_from_checkpoint
    last = get_last_checkpoint(folder) if folder.is_dir() else None
    if asked is None:
        if last or (folder / "trainer_state.json").is_file():
            raise ValueError(
                f"{folder} holds a run already: continue it with --resume_from_checkpoint latest, or choose another "
                "--output_dir."
            )
        return None
    checkpoint = last if asked.lower() in ("latest", "true") else asked
    if checkpoint is None or not Path(checkpoint).is_dir():
        raise ValueError(f"--resume_from_checkpoint is {asked}: there is no checkpoint in {checkpoint or folder}.")
    if 0 < args.max_steps <= int(checkpoint.rpartition("-")[2]):
        raise ValueError(f"{checkpoint} is the end of a run of {args.max_steps} steps: raise --max_steps to go on.")
    return checkpoint


def parse(argv: list[str], kind: type, file: str, config: str | None = None) -> tuple:
    """
    The script's options, of the dataclass `kind`; the trainer's, the model's, and the checkpoint to resume from.

    Defaults are those of the YAML file `config` beside the script `file`, by default `<script>_cpu.yaml`, if it is
    there; `--config` names another. Wrong options end the run.
    """
    script, usage = Path(file), "%(prog)s [--config FILE.yaml] [--option value ...]"
    parser = TrlParser((kind, OTBGRPOConfig, ModelConfig), prog=script.name, usage=usage, allow_abbrev=False)
    parser.set_defaults(baseline="value")  # as the README advises
    if not torch.accelerator.is_available():
        parser.set_defaults(use_cpu=True, bf16=False)
    defaults = script.with_name(config or f"{script.stem}_cpu.yaml")
    if "--config" not in argv and defaults.is_file():
        argv = ["--config", str(defaults), *argv]
    try:
        options, args, model_args = parser.parse_args_and_config(argv)
        name = f"{args.baseline.replace(':', '.')}-seed{args.seed}"
        args.run_name = args.run_name or name
        if args.output_dir == "trainer_output":  # not given
            args.output_dir = f"runs/{script.stem}/{name}"
        if model_args.model_name_or_path is None:
            raise ValueError("--model_name_or_path is missing: give a hub id or a folder.")
        checkpoint = find_checkpoint(args)
    except (ValueError, OSError) as error:
        parser.error(str(error))
    loading = {"revision": model_args.model_revision, "attn_implementation": model_args.attn_implementation}
    args.model_init_kwargs = {**loading, "dtype": model_args.dtype, **(args.model_init_kwargs or {})}
    return options, args, model_args, checkpoint


def load_object(name: str) -> Any:
    """What `module:attribute` names."""
    module, _, attribute = name.partition(":")
    return getattr(import_module(module), attribute)


def model_of(name: str) -> str:
    """The hub id or folder, also of `module:function`, whose function returns it."""
    return str(load_object(name)()) if ":" in name else name


def run(trainer: OTBGRPOTrainer, measure: HeldOut, checkpoint: str | None) -> None:
    """Train, from a checkpoint if there is one, and save the model. Prints the held-out accuracy before and after."""
    args, stop, problems = trainer.args, StopAfterStep(), len(trainer.eval_dataset)
    args.eval_on_start = checkpoint is None
    shorten_progress(trainer)
    trainer.add_callback(measure)
    trainer.add_callback(stop)

    def print_once(text: str) -> None:
        if trainer.is_world_process_zero():
            print(text, flush=True)

    print_once(f"{len(trainer.train_dataset):,} problems to train on, {problems} held out. Baseline {args.baseline}.")
    trainer.train(resume_from_checkpoint=checkpoint)
    stop.leave_if_stopped(trainer)
    trainer.save_model()
    trainer.save_state()
    before, *_, after = map(measure.text, measure.found(trainer.state))
    samples = f"avg@{args.num_generations_eval or args.num_generations}, {problems} problems"
    print_once(f"Held-out accuracy before: {before} ({samples})\nHeld-out accuracy after:  {after}")
    print_once(f"{args.output_dir}: the model, checkpoints, and the log, trainer_state.json.")
    trainer.accelerator.end_training()


def quieten() -> None:
    """Libraries' warnings to each other are not shown; this package's notes are."""
    warnings.filterwarnings("ignore", category=FutureWarning)
    logging.basicConfig(format="%(message)s")
    logging.getLogger("trl_otb").setLevel(logging.INFO)
