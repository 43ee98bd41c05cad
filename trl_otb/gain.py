"""What a run's baseline did, as one line for the end of a training and for the model card."""

import math
from collections import deque
from statistics import fmean

from torch import Tensor

from .metrics import STATISTICS


BATCHES = 20  # the latest generation batches, which the line is about
LITTLE = 0.05  # the share of power below which a baseline did next to nothing


class Gain:
    """The latest generation batches of a training, and what the baseline removed of the gradient's power in them."""

    def __init__(self) -> None:
        self.batches: deque[dict[str, float]] = deque(maxlen=BATCHES)

    def add(self, sums: dict[str, float], learned: dict[str, float]) -> None:
        """A batch, by the sums of its `STATISTICS` over all processes, and the metrics of a baseline that learned."""
        self.batches.append(learned | {name: sums[name] for name in ("power", "power_reference")})

    def add_statistics(self, statistics: Tensor, learned: dict[str, float]) -> None:
        """The same, by the statistics of each completion, `(B, S)`."""
        self.add(dict(zip(STATISTICS, statistics.double().sum(dim=0).tolist(), strict=True)), learned)

    def line(self, name: str, b0: str | None, reference: str | None) -> str:
        """
        What the baseline `name` did, and what to do if it was next to nothing; empty if there is nothing to say.

        Args:
            name: The run's baseline.
            b0: The baseline that `value` starts from; `None` if it is the mean of earlier steps.
            reference: What the power of other baselines was compared with; `None` if that is the baseline itself.
        """
        if not self.batches:
            return ""
        of = "the last batch" if len(self.batches) == 1 else f"the last {len(self.batches)} batches"
        if name == "value":
            return self._of_value(b0, of)
        power, by_reference = (
            sum(batch[of_batch] for batch in self.batches) for of_batch in ("power", "power_reference")
        )
        # A ratio of rounding errors, where no return varies
        if reference is None or not (math.isfinite(power) and by_reference > 1e-6 * power):
            return ""
        share = 1 - power / by_reference
        return f"{name} {_removed(share)} of the gradient's power under {reference} ({of})."

    def _of_value(self, b0: str | None, of: str) -> str:
        explained, by_state, left_out = (
            [batch[key] for batch in self.batches if math.isfinite(batch.get(key, math.nan))]
            for key in ("value/explained", "value/explained_by_state", "value/luck_left_out")
        )
        if not explained:
            return f"value had nothing to do: in {of} no prompt's returns varied. Look at the rewards."
        share, luck = fmean(explained), fmean(explained) - fmean(by_state)
        line = (
            f"value {_removed(share)} of the gradient's power beyond {b0 or 'the mean of earlier steps'} (mean of {of})"
        )
        line += "; later luck was left out." if left_out and left_out[-1] else f"; later luck {round(100 * luck)} %."
        if share >= LITTLE:
            return line
        return (
            f"{line} That is next to nothing: what is written so far does not tell the reward here, or `value` has "
            f"seen too few batches.{f' {b0!r} would do as well.' if b0 else ''} `trl_otb.compare_baselines(trainer)` "
            "says which baseline gains, if any does."
        )


def _removed(share: float) -> str:
    per_cent = round(100 * share)
    return f"removed {per_cent} %" if per_cent >= 0 else f"added {-per_cent} %"
