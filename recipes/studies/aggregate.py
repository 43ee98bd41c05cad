"""
What runs over seeds and tasks show together, by the statistics of rliable (Agarwal et al., arXiv 2108.13264).

Scores are lists over seeds, one per task. Intervals are 95 %, by bootstrap over the seeds of each task by itself
(stratified), so that they speak of other seeds and not of other tasks.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy
from scipy import stats


DRAWS = 2000


class Interval(NamedTuple):
    value: float
    low: float
    high: float

    def text(self, digits: int = 3) -> str:
        return f"{self.value:.{digits}f} ({self.low:.{digits}f}–{self.high:.{digits}f})"


def interquartile_mean(scores: list[list[float]]) -> Interval:
    """The mean of the middle half of all scores, which outliers of a few seeds do not decide."""
    return _interval(scores, lambda *drawn: _middle(drawn))


def difference(ours: list[list[float]], theirs: list[list[float]]) -> Interval:
    """Of the interquartile means."""
    return _interval([*ours, *theirs], lambda *drawn: _middle(drawn[: len(ours)]) - _middle(drawn[len(ours) :]))


def probability_of_improvement(ours: list[list[float]], theirs: list[list[float]]) -> Interval:
    """How often a run of ours beats one of theirs on the same task, ties counting half; the mean over tasks."""

    def of(*drawn):
        pairs = zip(drawn[: len(ours)], drawn[len(ours) :], strict=True)
        return numpy.mean([numpy.mean((a[:, None] > b) + (a[:, None] == b) / 2) for a, b in pairs])

    return _interval([*ours, *theirs], of)


def _middle(scores: Sequence[numpy.ndarray]) -> float:
    return stats.trim_mean(numpy.concatenate(scores), 0.25)


def _interval(samples: list[list[float]], statistic: Callable[..., float]) -> Interval:
    samples = [numpy.asarray(sample, dtype=float) for sample in samples]
    drawn = stats.bootstrap(
        samples, statistic, n_resamples=DRAWS, vectorized=False, method="percentile", rng=numpy.random.default_rng(0)
    )
    return Interval(float(statistic(*samples)), *map(float, drawn.confidence_interval))
