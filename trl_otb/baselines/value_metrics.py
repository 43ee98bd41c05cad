"""What is measured of `value` in a batch, and whether it knows rewards that it may not know."""

import math
from typing import Any, NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor

from .bound import ROUNDING


# Of `slope_at_start`: below it, what is subtracted knows the reward. Without a leak it is 1 or more, but where the
# completions of a prompt begin differently, as after an environment's `reset`. For N = 1 prompts may decide rewards
KNOWING_SLOPE = 0.5
KNOWING = (
    "What 'value' subtracts tells a completion's reward before its first token: there the advantage grows by "
    "{slope:.2f} per unit of the return (`slope_at_start`), and 1 is expected, so that less is learned, and wrongly. "
    "Look for a progress function that reads what knows the end of a completion, such as a store that a "
    "`rollout_func`, a tool or an environment fills. If an environment begins differently for each completion of a "
    "prompt, its beginning may decide the reward: then all is well."
)


class BatchSums(NamedTuple):
    """Sums over the tokens of a batch."""

    power: Any  # Σ w (G − B0)²
    left: Any  # Σ w (G − B)², by the B that earlier batches taught
    left_by_state: Any  # the same without later luck
    squares: Any  # Σ w (G² + B0²), of which a rounding error is a part
    excluded: Any  # tokens whose numbers are not finite
    tokens: Any  # the others
    energy: Any  # Σ w
    # Of the last tokens of completions: their number, Σ G, Σ G² and Σ (G − V)²
    ends: Any
    returns_at_end: Any
    squares_at_end: Any
    left_at_end: Any

    @property
    def varies(self) -> bool:
        """Whether returns differ by more than rounding."""
        return self.power > ROUNDING * self.squares

    def metrics(self) -> dict[str, float]:
        """The shares of power that predictions removed; NaN if no return varies."""
        left = {"explained": self.left, "explained_by_state": self.left_by_state}
        return {name: 1 - of / self.power if self.varies else math.nan for name, of in left.items()}

    def r2_at_end(self) -> float:
        """1 − Σ (G − V)² / Σ (G − mean of G)² at the last tokens."""
        return r_squared(self.ends, self.returns_at_end, self.squares_at_end, self.left_at_end)


def r_squared(number: float, total: float, squares: float, left: float) -> float:
    """1 − `left` / Σ (G − mean of G)², from the number of G, Σ G and Σ G²; NaN if no G varies."""
    variation = squares - total**2 / max(number, 1.0)
    # Less is what rounding leaves of equal float32 numbers
    return 1 - left / variation if variation > 1e-6 * squares else math.nan


def by_prompt(at_start: Float[Tensor, "B 3"], prompt: Int[Tensor, " B"], size: int) -> Float[Tensor, "P 5"]:
    """By prompt, of first tokens that are known: their number, Σ G, Σ A, Σ G², Σ G A."""
    known, g, a = at_start.cpu().double().unbind(dim=1)
    columns = torch.stack([known, known * g, known * a, known * g * g, known * g * a], dim=1)
    sums = columns.new_zeros(size, 5).index_add(0, prompt, columns)
    return sums.to(at_start.device, torch.float32 if at_start.device.type == "mps" else torch.float64)


def slope_within(sums: Float[Tensor, "P 5"]) -> float:
    """The slope of A on G within prompts, from what [`by_prompt`] returns; NaN if no G varies."""
    number, g, a, squares, both = sums.unbind(dim=1)
    variation = (squares - g * g / number.clamp(min=1)).sum()
    common = (both - g * a / number.clamp(min=1)).sum()
    # Less is what rounding leaves of equal float32 numbers
    return (common / variation).item() if variation > 1e-6 * squares.sum() else math.nan
