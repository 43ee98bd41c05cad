"""What a run's baseline did, as one line for the end of a training and for the model card."""

import math
from collections import deque
from collections.abc import Collection
from statistics import fmean

from torch import Tensor

from ..baselines.value_metrics import KNOWING_SLOPE
from .metrics import LEAST_REFERENCE, STATISTICS


LATEST_BATCHES = 20  # the latest generation batches, which the line is about
FIRST = 10  # batches of a training, in which `value` may still know little
LITTLE = 0.05  # the share of power below which a baseline did next to nothing
NEARLY_ALL = 0.95  # the share that a baseline that does not know the reward seldom removes
MUCH = 2.0  # times the reference's power, from which on the line has the ratio, not per cent
SUBTRACT_NOTHING_IN_TAILS = ("otb", "otb_loo")  # B = 0 where no other completion of the group has such a token


class Gain:
    """The latest generation batches of a training, and what the baseline removed of the gradient's power in them."""

    def __init__(self) -> None:
        self.batches: deque[dict[str, float]] = deque(maxlen=LATEST_BATCHES)
        self.seen = 0

    def add(self, sums: dict[str, float], learned: dict[str, float]) -> None:
        """A batch, by the sums of its `STATISTICS` over all processes, and the metrics of a baseline that learned."""
        self.seen += 1
        self.batches.append(learned | {name: sums[name] for name in ("power", "power_reference")})

    def add_statistics(self, statistics: Tensor, learned: dict[str, float]) -> None:
        """The same, by the statistics of each completion, `(B, S)`."""
        self.add(dict(zip(STATISTICS, statistics.double().sum(dim=0).tolist(), strict=True)), learned)

    def line(
        self, name: str, b0: str | None, reference: str | None, may_ask: bool = False, may_leak: bool = False
    ) -> str:
        """
        What the baseline `name` did, and what to do if it was next to nothing; empty if there is nothing to say.

        Args:
            name: The run's baseline.
            b0: The baseline that `value` starts from; `None` if it is the mean of earlier steps.
            reference: What the power of other baselines was compared with; `None` if that is the baseline itself.
            may_ask: Whether the run could have progress functions, and has none.
            may_leak: Whether it has some, and several completions of each prompt.
        """
        if not self.batches:
            return ""
        if name == "value":
            return self._of_value(b0, may_ask, may_leak)
        power, by_reference = (
            sum(batch[of_batch] for batch in self.batches) for of_batch in ("power", "power_reference")
        )
        if reference is None or not (math.isfinite(power) and by_reference > LEAST_REFERENCE * power):
            return ""
        ratio = power / by_reference
        line = f"{name} {_change(ratio, 'under', reference)} ({_last(self.batches)})."
        if ratio < MUCH or name not in SUBTRACT_NOTHING_IN_TAILS:
            return line
        return (
            f"{line} The usual cause: where only a group's longest completion still generates, {name} subtracts "
            "nothing, even if all returns are equal. `otb/lone_tail_ratio` is the share of such tokens. "
            "`baseline='value'` subtracts a baseline from them, too."
        )

    def _of_value(self, b0: str | None, may_ask: bool, may_leak: bool) -> str:
        early = self.seen <= FIRST
        later = [*self.batches][0 if early else max(FIRST + len(self.batches) - self.seen, 0) :]
        of = _last(later)
        names = ("explained", "explained_by_state", "luck_left_out", "kept", "slope_at_start")
        explained, by_state, left_out, kept, slopes = (
            [batch[key] for batch in later if math.isfinite(batch.get(key, math.nan))]
            for key in (f"value/{name}" for name in names)
        )
        if not explained:
            return f"value had nothing to do: in {of} no prompt's returns varied. Look at the rewards."
        if may_leak and slopes and max(slopes[-2:]) < KNOWING_SLOPE:
            return (
                "value knows a completion's reward before its first token (`otb/value/slope_at_start` is "
                f"{slopes[-1]:.2f}, and 1 is expected), so that little is learned. Look at what progress functions "
                "read."
            )
        share, luck = fmean(explained), fmean(explained) - fmean(by_state)
        worse = share <= -LITTLE
        kept_b0 = round(100 * fmean(kept)) if kept and worse else 0  # per cent of completions, without the prediction
        name = "value's prediction" if kept_b0 else "value"
        line = f"{name} {_change(1 - share, 'beyond', b0 or 'the mean of earlier steps')} (mean of {of})"
        line += "; later luck was left out." if left_out and left_out[-1] else f"; later luck {round(100 * luck)} %."
        if share >= NEARLY_ALL:
            line += " That is nearly all: the first tokens decide the reward, or a progress function knows it."
        if share >= LITTLE:
            return line
        if not worse:
            line += " That is next to nothing: the text so far does not tell the reward here, or `value` has seen too "
            line += f"few batches.{f' {b0!r} would do as well.' if b0 else ''}"
            if may_ask:
                line += " If your reward can tell how half an answer is doing, try `progress_funcs='rewards'`."
        elif early:
            line += " In its first batches `value` knows too little to judge it."
        else:
            noisier = "made the gradient noisier"
            if kept_b0:
                noisier = f"would have {noisier} ({kept_b0} % of completions kept {b0})"
            line += f" So it {noisier}: it has seen too few prompts, or rewards changed suddenly."
            line += f" {b0!r} would have done better." if b0 and not kept_b0 else ""
        return f"{line} `trl_otb.compare_baselines(trainer)` measures whether another baseline gains."


def _last(batches: Collection[dict[str, float]]) -> str:
    return "the last batch" if len(batches) == 1 else f"the last {len(batches)} batches"


def _change(ratio: float, beyond: str, reference: str) -> str:
    """What a baseline did that leaves `ratio` times the reference's power."""
    if ratio >= MUCH:
        return f"has {ratio:,.{0 if ratio >= 10 else 1}f} times the gradient's power of {reference}"
    per_cent = round(100 * (1 - ratio))
    change = f"removed {per_cent} %" if per_cent >= 0 else f"added {-per_cent} %"
    return f"{change} of the gradient's power {beyond} {reference}"
