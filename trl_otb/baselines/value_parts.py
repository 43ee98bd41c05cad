"""The parts of `value`: what it reads of each token, and least squares whose sums are kept by fold of prompts."""

from collections.abc import Iterator
from typing import NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from ..energy import prefix_sums
from .completions import Completions


FEATURE_BLOCK = 2**13  # tokens whose features, some hundred numbers each, are in memory at once, in small batches
BEYOND = 0.1  # of the width of the returns seen: how far out of them one draw's luck may take V
B0_COLUMN, OF_LUCK = 1, 14  # among the features that of B0; how many are of later luck


class Reading(NamedTuple):
    """
    Of each token; all but `luck` is known before it is drawn. Zeros where `known` is False: numbers before the token
    are not finite there.

    Args:
        numbers: What V is linear in: 1, B0, the rewards earned, sums over the tokens before (energy, surprisal, their
            number) and their square roots, `worst`, `sure`, the hidden states, here and their mean so far, and the
            numbers of progress functions, as they are and times √n, n the number of tokens before.
        sure: σ_t = Σ_v π(v)², how sure the policy is of the token to come.
        luck: d_t = ρ (σ_t − π(y_t)), which has mean 0 given what precedes; see `Completions.draw_ratio` for ρ.
        draws: What `Completions.progress_draws` holds, ρ times: its mean is 0, too. `(B, T, 0)` without it.
        worst: The largest σ − π(y) of the tokens before: an improbable token is often a mistake.
    """

    known: Bool[Tensor, "B T"]
    numbers: Float[Tensor, "B T K"]
    sure: Float[Tensor, "B T"]
    luck: Float[Tensor, "B T"]
    worst: Float[Tensor, "B T"]
    draws: Float[Tensor, "B T F"]


def read(x: Completions, b0: Float[Tensor, "B #T"]) -> Reading:
    """What `value` reads of completions with their B0."""
    mask, energy, logps, states = x.mask, x.need("energy"), x.need("logps").float(), x.need("states")
    count, earned = _before(mask), x.returns[:, :1] - x.returns
    totals = [_before(energy), _before(-logps).clamp(min=0), count]
    sums = [torch.ones_like(mask), b0, earned, *totals, *(values.sqrt() for values in totals)]
    prob = logps.exp() * mask
    sure = ((energy - 1 + 2 * prob) * mask).clamp(0, 1)
    luck = (sure - prob) * mask
    worst = _shifted(luck.nan_to_num().clamp(min=0).cummax(dim=1).values)
    mean_state = prefix_sums(states) / (count + 1).unsqueeze(-1)
    each = (*(values.expand_as(mask) for values in sums), worst, sure)
    progress = () if x.progress is None else (x.progress, x.progress * count.sqrt().unsqueeze(-1))
    numbers = torch.cat([torch.stack(each, dim=-1), states, mean_state, *progress], dim=-1)
    known = numbers.sum(dim=-1).isfinite()
    ratio = torch.ones_like(mask) if x.draw_ratio is None else x.draw_ratio
    sure, luck, worst = (values.where(known & values.isfinite(), 0.0) for values in (sure, luck * ratio, worst))
    draws = states[..., :0] if x.progress_draws is None else x.progress_draws * (ratio * mask).unsqueeze(-1)
    draws = draws.where(known.unsqueeze(-1) & draws.isfinite(), 0.0)
    return Reading(known, numbers.masked_fill_(~known.unsqueeze(-1), 0.0), sure, luck, worst, draws)


def features(of: Reading, v: Float[Tensor, "B T"]) -> tuple[Float[Tensor, "B T k"], Float[Tensor, "B T l"]]:
    """
    φ of the state and ψ of the luck to come, from V: sums over the tokens before, and products of q = (1, √n, V, V², m,
    V m, V √n) with powers of σ, where n is the number of tokens before and m is `worst`.
    """
    powers = torch.stack([torch.ones_like(v), of.sure, of.sure.square()], dim=-1)
    root, m = of.numbers[..., 8], of.worst
    q = torch.stack([torch.ones_like(v), root, v, v.square(), m, v * m, v * root], dim=-1) * of.known.unsqueeze(-1)
    products = (powers.unsqueeze(-1) * q.unsqueeze(-2)).flatten(-2)  # with 1 first, then with σ, then with σ²
    return torch.cat([of.numbers[..., :9], products[..., 2:]], dim=-1), products[..., :OF_LUCK]


def draw_columns(of: Reading, v: Float[Tensor, "B T"]) -> Float[Tensor, "B T 2F"]:
    """Draws of progress functions, and their products with V."""
    return torch.cat([of.draws, of.draws * v.unsqueeze(-1)], dim=-1)


def bounded_luck(
    per_luck: Float[Tensor, "B T"], sure: Float[Tensor, "B T"], centred_v: Float[Tensor, "B T"], width: float
) -> Float[Tensor, "B T"]:
    """
    `per_luck`, Γ·ψ, such that no draw, whose d is between σ − √σ and σ, takes V further out of the returns seen than a
    tenth of their `width`; `centred_v` is V less their middle. It is known before the draw. The tenth is for V's error.
    """
    reach = (0.5 + BEYOND) * width
    above, below = (reach - centred_v).clamp(min=0), (reach + centred_v).clamp(min=0)
    largest, smallest = sure.clamp(min=1e-9), (sure.sqrt() - sure).clamp(min=1e-9)
    highest = torch.minimum(above / largest, below / smallest).clamp(max=width)
    lowest = torch.minimum(below / largest, above / smallest).clamp(max=width)
    return torch.minimum(torch.maximum(per_luck, -lowest), highest)


def later(values: Float[Tensor, "B T *more"]) -> Float[Tensor, "B T *more"]:
    """Sums over the tokens after each."""
    return _shifted(prefix_sums(values.flip(1))).flip(1)


def blocks(local: Completions, b0: Tensor) -> Iterator[tuple[Completions, Tensor, slice]]:
    """Blocks of rows with their B0 and place, so that few features are in memory at once."""
    tokens = max(FEATURE_BLOCK, local.mask.numel() // 256)
    rows = max(tokens // max(local.mask.size(1), 1), 1)
    for first in range(0, max(len(local), 1), rows):
        at = slice(first, first + rows)
        yield local.rows(at, 1), b0[at], at


def products(
    columns: Float[Tensor, "B T K"], weights: Float[Tensor, "B T"], fold: Int[Tensor, " B"], folds: int
) -> Float[Tensor, "folds K K"]:
    """Σ ω x xᵀ over the tokens of each fold, in float64 if the device supports it."""
    precise = torch.float32 if columns.device.type == "mps" else torch.float64
    result = columns.new_zeros(folds, columns.size(-1), columns.size(-1), dtype=precise)
    for number in set(fold.tolist()):
        table, weight = (values[fold == number].flatten(0, 1).to(precise) for values in (columns, weights))
        result[number] = (table * weight.unsqueeze(1)).T @ table
    return result


def solution(sums: Float[Tensor, "*folds K1 K1"], ridge: float) -> Float[Tensor, "*folds K"]:
    """
    The coefficients that least squares finds, from sums of products of features and, last, the target. `ridge` is a
    part of each feature's variation: shifting or scaling features does not change the predictions.
    """
    squares, of_target = sums[..., :-1, :-1], sums[..., :-1, -1]
    diagonal, constant = squares.diagonal(dim1=-2, dim2=-1), squares[..., 0]
    varies = (diagonal - constant.square() / constant[..., :1].clamp(min=1e-30)).clamp(min=0)
    penalty = (ridge * varies + 1e-9 * diagonal).where(diagonal > 0, 1.0)  # for a feature that is always 0
    squares = squares + torch.diag_embed(penalty)
    # The coefficient of B0 in B lies between 0 and 1. In a few batches the fit would leave that range: the others'
    # returns predict a completion's own there, since all of them have the same sum
    of_b0 = torch.linalg.solve_ex(squares, of_target)[0][..., B0_COLUMN].clamp(-1, 0).unsqueeze(-1)
    rest = [i for i in range(of_target.size(-1)) if i != B0_COLUMN]
    left = of_target[..., rest] - squares[..., rest, B0_COLUMN] * of_b0
    found = torch.linalg.solve_ex(squares[..., rest, :][..., rest], left)[0]
    return torch.cat([found[..., :B0_COLUMN], of_b0, found[..., B0_COLUMN:]], dim=-1)


def _before(values: Float[Tensor, "B T"]) -> Float[Tensor, "B T"]:
    return _shifted(prefix_sums(values))


def _shifted(values: Float[Tensor, "B T *more"]) -> Float[Tensor, "B T *more"]:
    """By one token: 0 for the first."""
    return torch.cat([torch.zeros_like(values[:, :1]), values[:, :-1]], dim=1)
