"""A warning that a resumed run will differ from an uninterrupted one."""

from typing import Any

from accelerate.logging import get_logger
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments


logger = get_logger(__name__)


class InexactResumeNotice(TrainerCallback):
    """
    Warns if a checkpoint lies inside a generation buffer or past the first epoch.

    [`~trl.GRPOTrainer`] trains on a buffer of completions for `steps_per_generation × num_iterations` micro-batches
    and does not save it. A run resumed inside a buffer generates new completions, so it differs from an uninterrupted
    one; nothing is lost. The generator that shuffles prompts restarts when a run is resumed, so prompts come in the
    first epoch's order again.
    """

    def __init__(self) -> None:
        self._warned = False

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        if _inside_buffer(args, state.global_step):
            logger.warning(
                f"Resuming at step {state.global_step}, inside a generation buffer: new completions replace those "
                "left in it, so this run will differ from one that was not interrupted."
            )
        elif state.epoch is not None and state.epoch >= 1 and getattr(args, "shuffle_dataset", True):
            logger.warning(
                f"Resuming at step {state.global_step}, in epoch {int(state.epoch) + 1}: TRL repeats the first "
                "epoch's order of prompts, so this run will differ from one that was not interrupted."
            )
        elif args.save_strategy == "steps" and _inside_buffer(args, state.save_steps):
            self._warn_once(args, f"`save_steps` is {state.save_steps}: some checkpoints will lie")

    def on_save(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        if _inside_buffer(args, state.global_step) and state.global_step < state.max_steps:
            self._warn_once(args, f"The checkpoint of step {state.global_step} lies")

    def _warn_once(self, args: Any, what: str) -> None:
        if self._warned:
            return
        self._warned = True
        steps = args.steps_per_generation * args.num_iterations / args.gradient_accumulation_steps
        logger.warning(
            f"{what} inside a generation buffer, which TRL does not save: a run resumed from there will differ "
            f"from one that was not interrupted. Checkpoints at multiples of {steps:g} steps resume exactly."
        )


def _inside_buffer(args: Any, step: int) -> bool:
    return step * args.gradient_accumulation_steps % (args.steps_per_generation * args.num_iterations) != 0
