"""A trainer's progress functions: given to it, and called on what it sampled."""

import math
from typing import Any

from accelerate.logging import get_logger
from torch import Tensor
from trl import GRPOConfig, GRPOTrainer

from ..progress import PROGRESS_PLACES, Progress, functions_by_name
from ..rollout import Rollout


logger = get_logger(__name__)


def given_functions(functions: Any, args: GRPOConfig) -> Any:
    """`progress_funcs` of the trainer or, without them, of its config."""
    named = getattr(args, "progress_funcs", None)
    if functions is not None and named is not None:
        raise ValueError(
            f"`progress_funcs` is set in {type(args).__name__} ({named!r}) and given to the trainer, too: choose one "
            "of them."
        )
    return named if functions is None else functions


def set_up_progress(trainer: GRPOTrainer, functions: Any) -> None:
    """Give the trainer its [`~trl_otb.progress.Progress`], if there are functions, and what checkpoints keep of it."""
    args, of = trainer.args, trainer._trl_otb
    by_name = functions_by_name(functions, trainer.reward_funcs, trainer.reward_func_names)
    if not by_name:
        return
    if "progress" not in of.needs:
        logger.warning_once(
            f"`progress_funcs` has no effect: `baseline={trainer.baseline.entry.name!r}` does not read progress. "
            "'value' does."
        )
    places = getattr(args, "progress_places", PROGRESS_PLACES)
    likeliest = getattr(args, "progress_draws", 0)
    of.progress = Progress(by_name, places, trainer.max_completion_length, likeliest)
    of.extra_state |= {"progress": of.progress.names, "progress_usual": of.progress.usual}


def measured_progress(
    trainer: GRPOTrainer, given: Any, rollout: Rollout, likely: Tensor | None
) -> tuple[Tensor | None, Tensor | None]:
    """`(B, T, F)` what the run's progress functions say of the text before each token, and their draws."""
    of, mode = trainer._trl_otb, "train" if trainer.model.training else "eval"
    if of.progress is None or "progress" not in of.needs or given is None:
        return None, None
    if of.progress.likeliest and likely is None:
        logger.warning_once(
            f"`progress_draws` has no effect: energies come from {of.energy_source}, which does not tell what other "
            "tokens were likely. Only forwards of `generate` do."
        )
    of.progress.usual = of.extra_state["progress_usual"]
    loop = getattr(trainer, "async_loop", None)
    numbers, draws = of.progress.measure(
        given, rollout.mask, trainer.processing_class, trainer.state, loop, mode == "train", likely
    )
    of.extra_state["progress_usual"] = of.progress.usual
    flags = of.progress.flags().unsqueeze(0).to(numbers.device)
    kept = of.progress.forget_left_out(trainer.accelerator.gather(flags))
    if mode == "train" and not math.isnan(of.progress.time_share):
        trainer._metrics[mode]["otb/progress/time_share"].append(of.progress.time_share)
    return numbers * kept.to(numbers), None if draws is None else draws * kept.to(draws)
