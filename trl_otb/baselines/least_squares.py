"""Weighted least squares from sums of products of columns that have names, which are kept by fold of prompts."""

from collections.abc import Collection
from dataclasses import dataclass, replace

import torch
from jaxtyping import Float, Int
from torch import Tensor

from .completions import NOT_ZERO


ONE, B0, TARGET = "1", "B0", "target"  # columns: the first is 1, and the last G − B0


@dataclass(frozen=True)
class Sums:
    """Σ ω x xᵀ of columns x with these names. The first dimension may be that of folds."""

    names: tuple[str, ...]
    values: Float[Tensor, "*folds K K"]

    def of(self, names: tuple[str, ...]) -> "Sums":
        """Those of other names, in their order; 0 for what it lacks."""
        if names == self.names:
            return self
        kept = [name for name in names if name in self.names]
        to, place = (torch.tensor([*map(of.index, kept)]) for of in (names, self.names))
        result = self.values.new_zeros(*self.values.shape[:-2], len(names), len(names))
        result[..., to.unsqueeze(1), to] = self.values[..., place, :][..., place]
        return Sums(names, result)

    def without(self, names: Collection[str]) -> "Sums":
        """The same with 0 for some names."""
        return self.of((*[name for name in self.names if name not in names],)).of(self.names)

    def after(self, earlier: "Sums | None", decay: float) -> "Sums":
        """With the sums that an earlier one has of the same names, times `decay`."""
        return self if earlier is None else replace(self, values=self.values + decay * earlier.of(self.names).values)

    def total(self) -> "Sums":
        """The sum of the folds."""
        return replace(self, values=self.values.sum(dim=0))

    def of_other_folds(self) -> "Sums":
        """For each fold the sum of the others."""
        return replace(self, values=self.values.sum(dim=0) - self.values)


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


def solution(of: Sums, ridge: float | Float[Tensor, " K"]) -> Float[Tensor, "*folds K"]:
    """
    The coefficients that least squares finds for all columns but the target. `ridge`, one for all or one for each, is a
    part of a column's variation: shifting or scaling columns does not change the predictions.

    The coefficient of B0 in B, 1 more than the one found here, is kept between 0 and 1. In a few batches the fit would
    leave that range: the returns of the others predict a completion's own there, since all of them have the same sum.
    """
    squares, of_target, b0 = of.values[..., :-1, :-1], of.values[..., :-1, -1], of.names.index(B0)
    diagonal, constant = squares.diagonal(dim1=-2, dim2=-1), squares[..., 0]
    varies = (diagonal - constant.square() / constant[..., :1].clamp(min=NOT_ZERO)).clamp(min=0)
    # The small part, far below any ridge, keeps features apart that are the same; 1 is for one that is always 0
    penalty = (ridge * varies + 1e-9 * diagonal).where(diagonal > 0, 1.0)
    squares = squares + torch.diag_embed(penalty)
    of_b0 = torch.linalg.solve_ex(squares, of_target)[0][..., b0].clamp(-1, 0).unsqueeze(-1)
    rest = [i for i in range(of_target.size(-1)) if i != b0]
    left = of_target[..., rest] - squares[..., rest, b0] * of_b0
    found = torch.linalg.solve_ex(squares[..., rest, :][..., rest], left)[0]
    return torch.cat([found[..., :b0], of_b0, found[..., b0:]], dim=-1)


def confidences(of: Sums, ridge: float, sizes: list[int]) -> Float[Tensor, " parts"]:
    """
    c₁, c₂, …, one for each part of a prediction: the shares of the parts, between 0 and 1, with which the least is left
    in folds of prompts that the parts were not fitted to. More than 1 would undo the ridge. `sizes` are the numbers of
    columns of the parts, in order.
    """
    sums = of.values
    of_part = torch.block_diag(*(sums.new_ones(1, size) for size in sizes))
    parts = of_part * solution(of.of_other_folds(), ridge).unsqueeze(1)
    agreement = torch.einsum("fpk,fk->p", parts, sums[:, :-1, -1])
    squares = torch.einsum("fpk,fkl,fql->pq", parts, sums[:, :-1, :-1], parts)
    c = torch.ones_like(agreement)
    # Each, given the others, in rounds: with one, the last part would pay for what the first left
    for part in [*range(len(sizes))] * 3:
        others = [i for i in range(len(sizes)) if i != part]
        left = agreement[part] - sum(c[i] * squares[min(i, part), max(i, part)] for i in others)
        c[part] = (left / squares[part, part].clamp(min=NOT_ZERO)).clamp(0, 1)
    return c.nan_to_num()
