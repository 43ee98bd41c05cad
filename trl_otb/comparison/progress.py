"""`value` with the run's rewards as progress functions: one more row of a comparison, whose run has none."""

from dataclasses import replace
from typing import Any

from ..baselines import Baseline, Completions, find_baseline
from ..config import PROGRESS_PLACES
from ..progress import REWARDS, Progress, functions_by_name, is_async
from ..seam.progress import called_rewards, rewards_of
from ..trainer import OTBGRPOTrainer


WITH_PROGRESS = "value with progress"  # the row


def progress_of_rewards(trainer: OTBGRPOTrainer) -> Progress | None:
    """The rewards as progress functions; `None` if the run has some, or if no reward can, or should, be called so."""
    if trainer._trl_otb.progress is not None:
        return None
    called = called_rewards(trainer)
    if any(is_async(of) for of in called.values()):  # as of a judge, whose calls cost
        return None
    try:
        functions = functions_by_name(REWARDS, rewards_of(trainer))
    except ValueError:
        return None
    result = Progress(functions, called, PROGRESS_PLACES, trainer.max_completion_length, tolerant=True)
    result.sees_evaluations = True
    return result


class Unaware:
    """A baseline that learns, without progress in what it gets."""

    def __init__(self, estimator: Any) -> None:
        self.estimator = estimator

    def __call__(self, batch: Completions) -> Any:
        return self.estimator(batch)

    def adjust(self, local: Completions, b0: Any) -> Any:
        return self.estimator.adjust(_silent(local), b0)

    def update(self, local: Completions, *given: Any) -> Any:
        return self.estimator.update(_silent(local), *given)

    def keeps_b0(self, local: Completions, *given: Any) -> Any:
        return self.estimator.keeps_b0(_silent(local), *given)


def _silent(local: Completions) -> Completions:
    return replace(local, progress=None, progress_names=())


def aware_and_unaware(value: Baseline) -> tuple[Baseline, Baseline]:
    """A `value` that learns with progress, and the given one, without."""
    fresh = replace(find_baseline("value").instance(), name=WITH_PROGRESS)
    return fresh, replace(value, estimator=Unaware(value.estimator))
