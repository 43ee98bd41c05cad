"""The running scale of advantages, `scale_rewards="running"`."""

from jaxtyping import Float
from torch import Tensor


DECAY = 0.9  # of a batch's weight, per batch: as of what `value` learns
# Of the batch's own deviation: the scale is between a tenth and ten times of it, so that advantages are neither beyond
# some tens nor all but 0 where rewards suddenly change
MOST_OF_OWN = 10
# Batches in a row whose own deviation is less than half of the scale, after which only they count. Fewer happen by
# chance: with rare successes beside a small dense reward, half of the batches have none
SHRUNK_BATCHES = 20


class RunningScale:
    """
    The standard deviation of returns within groups, over earlier batches, whose weight decays.

    In a batch whose own deviation is ten times larger or smaller, the scale depends on the batch's own returns, which
    biases a little. Rounding is no variance.
    """

    def __init__(self) -> None:
        self.sums = (0.0, 0.0)  # of the variances of groups, and of their number; groups of equal returns left out
        self.shrunk = (0.0, 0.0, 0)  # the same of the last batches in a row with less than half of it; their number

    def of(self, returns: Float[Tensor, " B_all"], num_generations: int, learn: bool) -> float:
        """By earlier batches, or by these returns if there are none; 1 if nothing varied. For N = 1 one group."""
        groups = returns.cpu().double().view(-1, num_generations if num_generations > 1 else len(returns))
        number = (~groups.isnan()).sum(dim=1)
        squares = (groups - groups.nanmean(dim=1, keepdim=True)).square().nanmean(dim=1)
        variances = (squares * (number / (number - 1))).sqrt().square()
        variances = variances[variances > 1e-12 * groups.square().nanmean(dim=1)]  # of float32 returns; NaN is not
        if len(variances) == 0:
            usual = _mean(self.sums) ** 0.5 if self.sums[1] > 0 else 1.0
            self.sums = (DECAY * self.sums[0], DECAY * self.sums[1]) if learn else self.sums
            return usual
        batch = variances.sum().item(), float(len(variances))
        own = _mean(batch) ** 0.5
        usual = _mean(self.sums) ** 0.5 if self.sums[1] > 0 else own
        if learn:
            self.sums = DECAY * self.sums[0] + batch[0], DECAY * self.sums[1] + batch[1]
            total, count, batches = self.shrunk
            longer = (DECAY * total + batch[0], DECAY * count + batch[1], batches + 1)
            self.shrunk = longer if usual > 2 * own else (0.0, 0.0, 0)
            if self.shrunk[2] == SHRUNK_BATCHES:
                self.sums, self.shrunk = self.shrunk[:2], (0.0, 0.0, 0)
        return min(max(usual, own / MOST_OF_OWN), MOST_OF_OWN * own)


def _mean(sums: tuple[float, float]) -> float:
    return sums[0] / sums[1]
