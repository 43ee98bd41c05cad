"""What a comparison will do, said before it begins, and the time that is left, from what its parts have taken."""

import time
from collections.abc import Iterator
from contextlib import contextmanager

from tqdm import tqdm


def announcement(
    baselines: int, to_learn: int, to_measure: int, passes: int, per_step: int, progress: bool = False
) -> str:
    """What will be done: numbers of baselines, of completions, and of backward passes per measured completion."""
    learn = f"samples {to_learn:,} completions for baselines to learn from, and " if to_learn else "samples "
    steps = max(1, round((to_learn + to_measure) / per_step))
    return (
        f"Comparing {baselines} baselines: {learn}{to_measure:,} to measure, together as many as {steps} steps of this "
        f"run sample. Each completion to measure takes {passes} backward passes, {to_measure * passes:,} in all. "
        f"{'Rewards are called on some 64 unfinished texts of each, too. ' if progress else ''}Nothing is trained."
    )


class Bar:
    """
    A bar of a comparison, whose total is the time taken plus the time left. Sampling and measuring have paces of their
    own: a completion that is measured takes a backward pass for each baseline per token, and one more.

    Args:
        to_sample, to_measure: Numbers of completions, over all processes.
        silent: Whether to print nothing.
    """

    def __init__(self, to_sample: int, to_measure: int, silent: bool) -> None:
        self.to_do = {"sample": to_sample, "measure": to_measure}
        self.done = dict.fromkeys(self.to_do, 0)
        self.seconds = dict.fromkeys(self.to_do, 0.0)
        self._expected: dict[str, float] = {}  # seconds per completion, of a phase that has not begun
        self.bar = tqdm(total=1, disable=silent, bar_format="comparing baselines: {percentage:3.0f}%|{bar}| {desc}")
        self._show()

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """A time in which completions are sampled (`"sample"`), or measured (`"measure"`)."""
        self._name, self._since = name, time.perf_counter()
        try:
            yield
        finally:
            self._count(0)

    def advance(self, completions: int) -> None:
        """So many completions of the present phase are done."""
        self._count(completions)
        self._show()

    def expect(self, name: str, seconds: float) -> None:
        """So many seconds per completion are expected of a phase until one is done; they count for no phase."""
        self._expected[name] = seconds
        self._since = time.perf_counter()

    def _count(self, completions: int) -> None:
        now = time.perf_counter()
        self.seconds[self._name] += now - self._since
        self._since = now
        self.done[self._name] = min(self.done[self._name] + completions, self.to_do[self._name])

    @property
    def seconds_left(self) -> float | None:
        """At the paces so far; `None` before both are known."""
        left = 0.0
        for name, to_do in self.to_do.items():
            done = self.done[name]
            pace = self.seconds[name] / done if done else self._expected.get(name)
            if to_do > done and pace is None:
                return None
            left += (to_do - done) * (pace or 0.0)
        return left

    def _show(self) -> None:
        left, taken = self.seconds_left, sum(self.seconds.values())
        parts = zip(self.to_do.items(), ("sampled", "measured"), strict=True)
        text = ", ".join(f"{self.done[name]} of {n} {word}" for (name, n), word in parts)
        self.bar.total = 1.0 if left is None else max(taken + left, 1e-9)
        self.bar.set_description_str(text if left is None else f"{text}, {duration(left)} left", refresh=False)
        self.bar.update(0.0 if left is None else taken - self.bar.n)

    def close(self) -> None:
        self.bar.close()


def duration(seconds: float) -> str:
    """`"40 s"`, `"11 min"` or `"2.5 h"`."""
    if seconds < 100:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 6000 else f"{seconds / 3600:.1f} h"
