"""Whether the luck that `value` subtracts has mean 0, as it must: measured over the batches so far."""

import logging
import math

import torch
from jaxtyping import Float
from torch import Tensor

from .completions import NOT_ZERO, Completions
from .prefix import Prefix


logger = logging.getLogger(__name__)

# What other values of constants do is a table of recipes/studies/ablations.md, by their names.
# Standard errors: beyond the first luck is left out, until it is within the second. By Freedman's inequality 5 are
# passed by chance at most once in 130,000 looks; with two equal numbers the decision would go back and forth
TOO_FAR, NEAR = 5.0, 2.5
LARGEST_RATIO = 1e6  # that is counted, so that squares stay finite
# Of log ρ per root of the energy: up to it, ratios that vary are no evidence. Without a limit wrong log-probs would
# explain themselves; with 0 honest ratios would be suspected
LARGEST_SPREAD = 1.0
# Of a batch's weight, per batch: as of all that is learned; and slower, which finds what is small but stays, and
# forgets it later once its cause has gone
DECAYS = (0.9, 0.99)
# For each batch: sums, and those that make a variance, which the square of the batch's weight multiplies
SUMS = ("tokens", "luck", "excess", "log_squares", "energy")
VARIANCES = ("luck_squares", "luck_bound", "excess_squares", "unsure")
COLUMNS = SUMS + VARIANCES


def measured(of: Prefix, x: Completions) -> tuple[Float[Tensor, " 9"], Float[Tensor, ""]]:
    """Sums over the tokens whose luck is subtracted, one for each of `COLUMNS`; and the largest ratio."""
    energy = x.need("energy")
    ratio = torch.ones_like(x.mask) if x.draw_ratio is None else x.draw_ratio
    present = (x.mask * of.known > 0) & ratio.isfinite() & (ratio > 0) & energy.isfinite()
    limited = ratio.clamp(max=LARGEST_RATIO)
    luck, ratio = (of.luck * (limited / ratio)).where(present, 0.0), limited.where(present, 1.0)
    of_completion = x.mask.new_ones(len(x), 1)
    if x.draw_ratio is None:  # the loss may weight each completion by a ratio of its own
        squares = x.need("loss_energy").sum(dim=1) / energy.sum(dim=1).clamp(min=NOT_ZERO)
        of_completion = squares.where(energy.sum(dim=1) > 0, 1.0).sqrt().clamp(max=LARGEST_RATIO).unsqueeze(1)
    luck = (luck * of_completion).where(of_completion.isfinite(), 0.0)
    # Σ π³ ≤ (Σ π²)^1.5, so that this is at least the variance of π(y)
    bound = (of.sure.pow(1.5) - of.sure.square()).clamp(min=0) * of_completion.nan_to_num().square()
    # Luck has mean 0 given the tokens before, so that tokens of a completion are uncorrelated; with a ratio that
    # depends on all of them only completions are
    terms = luck.sum(dim=1) if bool((of_completion != 1).any()) else luck
    of_tokens = {
        "tokens": torch.ones_like(ratio),
        "luck": luck,
        "excess": ratio - 1,
        "log_squares": ratio.log().square(),
        "energy": energy,
        "luck_bound": bound,
        "excess_squares": (ratio - 1).square(),
        "unsure": 1 - of.sure,
    }
    sums = torch.stack([*of_tokens.values()]).where(present, 0.0).sum(dim=(1, 2))
    named = dict(zip(of_tokens, sums, strict=True)) | {"luck_squares": terms.square().sum()}
    largest = torch.maximum(ratio.amax(), of_completion.nan_to_num().amax())
    return torch.stack([named[name] for name in COLUMNS]), largest


def decayed(sums: Float[Tensor, "2 9"], new: Float[Tensor, " 9"]) -> Float[Tensor, "2 9"]:
    """The sums of earlier batches, each weighing one of `DECAYS` of the next, with those of a new one."""
    powers = torch.tensor([1 if name in SUMS else 2 for name in COLUMNS], dtype=sums.dtype)
    return torch.tensor(DECAYS, dtype=sums.dtype).unsqueeze(1) ** powers * sums + new


def deviations(sums: Float[Tensor, " 9"], largest: float) -> dict[str, tuple[float, float, float]]:
    """
    Of `"luck"`, d ρ, and `"ratio"`, ρ: the mean per token, its standard error, and how many of them it is from what it
    must be, 0 and 1.

    By Freedman's inequality a sum S of terms below b with mean 0 and variances that sum up to V has
    S² / (V + b |S| / 3) above z² with a probability of at most 2 exp(−z²/2), also where most of V is in a few
    improbable draws that did not happen. V is the sum of squares, or, where that is more, what the policy says: at most
    Σ (σ^1.5 − σ²) for d, and for ρ with noise of variance s² in each logit Σ (e^s² − 1) (1 − σ). s² is estimated by
    Σ log² ρ / Σ w.
    """
    of = dict(zip(COLUMNS, sums.tolist(), strict=True))
    spread = math.exp(min(of["log_squares"] / max(of["energy"], NOT_ZERO), LARGEST_SPREAD**2))
    variances = {
        "luck": (of["luck"], max(of["luck_squares"], spread * of["luck_bound"])),
        "ratio": (of["excess"], max(of["excess_squares"], (spread - 1) * of["unsure"])),
    }
    result, tokens = {}, max(of["tokens"], NOT_ZERO)
    for name, (total, variance) in variances.items():
        far = abs(total) / math.sqrt(variance + max(largest, 1.0) * abs(total) / 3 + NOT_ZERO)
        result[name] = ((name == "ratio") + total / tokens, math.sqrt(variance) / tokens, far)
    return result


class LuckCheck:
    """Whether later luck is subtracted, by the draws of all batches so far."""

    def __init__(self) -> None:
        self.draws = torch.zeros(len(DECAYS), len(COLUMNS), dtype=torch.float64)
        self.largest_ratios = torch.ones(len(DECAYS), dtype=torch.float64)  # each decays as its sums do
        self.luck_left_out = False  # since its mean is not 0

    def add(self, new: Float[Tensor, " 9"], largest_ratio: float) -> dict[str, float]:
        """
        Decide from this batch and earlier ones whether later luck is subtracted from the next on. Returns `luck_mean`,
        the mean of d_t, NaN where none was used, and `luck_left_out`: the decision, and 1 where this batch has none.
        """
        self.draws = decayed(self.draws, new)
        decay = torch.tensor(DECAYS, dtype=torch.float64)
        self.largest_ratios = (decay * self.largest_ratios).clamp(min=largest_ratio)
        found = [deviations(*of) for of in zip(self.draws, self.largest_ratios.tolist(), strict=True)]
        each = [(far, name, mean, error) for of in found for name, (mean, error, far) in of.items()]
        far, name, mean, error = max(each)
        if self.luck_left_out != (far > (NEAR if self.luck_left_out else TOO_FAR)):
            self.luck_left_out = not self.luck_left_out
            what = {"luck": "luck per token", "ratio": "the ratio of policy to sampler"}[name]
            told = f"{what} has a mean of {mean:.3g} ± {error:.1g}, and {int(name == 'ratio')} is expected"
            logger.warning(
                f"Later luck is not subtracted from now on: {told}. So tokens were not drawn from the distribution "
                "to which their log-probs belong. Look for noise or dropout in the policy's forward, for a sampler or "
                "`rollout_func` that gives other log-probs, and for completions that are excluded because of their "
                "content. `baseline='value'` goes on with its prediction alone."
                if self.luck_left_out
                else f"Later luck is subtracted again: {told}."
            )
        tokens = COLUMNS.index("tokens")
        mean = found[0]["luck"][0] if self.draws[0, tokens] > 0 else math.nan
        return {"luck_mean": mean, "luck_left_out": float(self.luck_left_out or not new[tokens] > 0)}
