"""A run of a recipe: everything except its data, reward and trainer, which users change."""

import signal
from collections.abc import Callable
from typing import Any

from accelerate.utils import gather_object
from transformers import PrinterCallback, ProgressCallback, TrainerCallback, TrainerState
from trl import GRPOTrainer

from .arguments import parse
from .checks import check_enough_problems
from .errors import Stopped, resuming, stopping_signals
from .held_out import HeldOut
from .launching import check_launcher, print_once, warn_of_missing_processes
from .models import own_rewards, trainer_arguments
from .problems import Problems
from .report import report, report_evaluation
from .run_folder import STATE, open_run


class Experiment:
    """The options of a run, from [`parse`], and its folder. Raises an `InputError` if either is unusable."""

    def __init__(self, file: str, arguments: type, config: str, argv: list[str]):
        check_launcher()
        warn_of_missing_processes()
        self.settings, self.args, self.model_args = parse(file, arguments, config, argv)
        self.model_name = self.model_args.model_name_or_path
        self.run = open_run(self.settings, self.args, self.model_args, argv)
        if self.run.trained is not None:
            self.model_args.model_name_or_path = str(self.run.trained)
        self.args.eval_on_start = self.run.checkpoint is None  # a resumed run already has the first evaluation
        self.held_out, self.interrupt = HeldOut(), CheckpointOnInterrupt()
        self.callbacks = [self.held_out, self.interrupt]
        self.finished = self.run.finished is not None  # nothing is left to do
        if self.finished:
            print_once(self.run.finished)

    def model_and_prompts(self, problems: Problems, tools: list[Callable] | None = None) -> dict[str, Any]:
        """The trainer's model, tokenizer and adapter (see [`trainer_arguments`]) and its two datasets."""
        check_enough_problems(len(problems.train), self.args.generation_batch_size, self.args.num_generations)
        arguments, (train, held_out) = trainer_arguments(
            self.settings, self.args, self.model_args, [problems.train, problems.held_out], tools
        )
        return {**arguments, "train_dataset": train, "eval_dataset": self.held_out.numbered(held_out)}

    def rewards(self, accuracy: Callable[..., list[float]]) -> list[Callable[..., list[float]]]:
        """`accuracy`, whose evaluation scores become the held-out accuracy, then the rewards in `--reward_funcs`."""
        return [self.held_out.counted(accuracy), *own_rewards(self.settings)]

    def train(self, trainer: GRPOTrainer, problems: Problems) -> None:
        """Evaluate, train, evaluate and report. Ctrl-C saves a checkpoint."""
        args, run, held_out = self.args, self.run, self.held_out
        is_main_process = trainer.accelerator.is_main_process
        trainer.remove_callback(PrinterCallback)
        if not args.disable_tqdm:
            trainer.remove_callback(ProgressCallback)
            trainer.add_callback(CompactProgress())
        print_once(f"{problems.name}: {problems}.")
        sizes = f"{args.num_generations} completions per problem, {args.generation_batch_size} per batch"
        parameters = sum(p.numel() for p in trainer.model.parameters())
        print_once(f"{self.model_name}: {parameters:,} parameters. Baseline {args.baseline}, {sizes}.")
        with self.interrupt:
            if self.settings.eval_only:
                trainer.evaluate()
                return report_evaluation(run, held_out)
            run.start(is_main_process)
            if run.checkpoint is not None:
                held_out.resume(run.checkpoint, is_main_process)
            again = f"To resume:\n  {run.resume_command()}"
            if run.trained is not None:
                trainer.state = TrainerState.load_from_json(str(run.checkpoint / STATE))
                trainer.state.is_world_process_zero = is_main_process
                trainer._load_rng_state(str(run.checkpoint))  # to repeat the missed evaluation exactly
                self.interrupt.on_train_end(args, trainer.state, trainer.control)
            else:
                with resuming(run.checkpoint):
                    trainer.train(resume_from_checkpoint=args.resume_from_checkpoint)
            step = trainer.state.global_step
            if self.interrupt.interrupted and step < trainer.state.max_steps:
                trainer.accelerator.wait_for_everyone()  # every process saves its part
                raise Stopped(f"Stopped after step {step}; the checkpoint is in {run.path}. {again}")
            trainer.save_model()
            trainer.save_state()
            held_out.save(run.path, is_main_process)
            try:
                if held_out.evaluations[-1].step < step or args.load_best_model_at_end:  # evaluate the best weights
                    trainer.evaluate()
                    trainer.save_state()
                report(run, trainer, held_out, f"{self.model_name} on {problems.name}")
            except Stopped as stop:
                raise Stopped(f"{stop} The model is in {run.path}. {again}") from None


class CompactProgress(ProgressCallback):
    """A progress bar with the most important numbers; the log has all of them."""

    SHOWN = {"reward": "reward", "grad_norm": "grad norm", "otb/energy/token_mean": "energy"}  # noqa: RUF012

    def on_log(self, args, state, control, logs=None, **kwargs):
        shown = {label: f"{float(logs[key]):.3g}" for key, label in self.SHOWN.items() if logs.get(key) is not None}
        if shown and self.training_bar is not None:  # in the main process
            self.training_bar.set_postfix(shown)


class CheckpointOnInterrupt(TrainerCallback):
    """
    Within its context, Ctrl-C, SIGTERM or SIGHUP during training finishes the step, saves a checkpoint and stops; a
    second signal stops at once. In the first and last evaluation there is no step to finish, so it raises [`Stopped`].

    All processes stop at the same step, even if the signal reaches them in different ones.
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
            raise Stopped("The step was not finished; the last saved checkpoint is the newest.")
        self.interrupted = True
        print_once("\nInterrupted: finishing this step and saving a checkpoint. Interrupt again to stop at once.")

    def on_step_begin(self, args, state, control, **kwargs):
        self._training = True

    def on_step_end(self, args, state, control, **kwargs):
        if any(gather_object([self.interrupted])):
            self.interrupted = True
            args.save_only_model = False  # this checkpoint is for resuming
            control.should_save = control.should_training_stop = True
            control.should_evaluate = False

    def on_train_end(self, args, state, control, **kwargs):
        self._trained = not self.interrupted
