"""Estimators of the gradient: a baseline with its options."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn.utils.rnn import pad_sequence

from ..baselines import Baseline, assign_credit, find_baseline


CONTROL = "group_mean"  # what every baseline is compared with


@dataclass
class Pool:
    """
    M completions of one prompt.

    Args:
        rewards (`torch.Tensor` of shape `(M,)` or `(M, T)`):
            One return per completion, or one reward per token; NaN for completions without a reward.
        energy, mask (`torch.Tensor` of shape `(M, T)`):
            ρ_t² w_t, and 1 on generated tokens.
    """

    rewards: torch.Tensor
    energy: torch.Tensor
    mask: torch.Tensor

    def __len__(self) -> int:
        return len(self.mask)

    def rows(self, rows: torch.Tensor) -> "Pool":
        """Some of the completions."""
        return Pool(self.rewards[rows], self.energy[rows], self.mask[rows])


def stacked(parts: list[Any]) -> torch.Tensor:
    """Several `(b, T, …)` or `(b,)` -> `(M, T, …)` or `(M,)` on the CPU, padded with 0 to the longest."""
    if any(part.dim() > 1 for part in parts):
        rows = [row for part in parts for row in part.cpu()]
        return pad_sequence(rows, batch_first=True)
    return torch.cat(parts).cpu()


def joined(pools: list[Pool]) -> Pool:
    """The completions of several pools."""
    return Pool(*(stacked([getattr(pool, name) for pool in pools]) for name in ("rewards", "energy", "mask")))


@dataclass(frozen=True)
class Estimator:
    """A baseline with its options."""

    name: str
    baseline: str
    leave_one_out: bool = False
    alignment: str = "generated"
    zero_tail: bool = True

    @property
    def per_token(self) -> bool:
        return find_baseline(self.baseline).per_token

    @property
    def across_prompts(self) -> bool:
        """Whether it combines measurements of several prompts, as all baselines on top of another do."""
        return find_baseline(self.baseline).across_prompts or self.on_top_of is not None

    @property
    def on_top_of(self) -> str | Baseline | None:
        return find_baseline(self.baseline).on_top_of

    @property
    def settings(self) -> str:
        """The options of a config."""
        return f"baseline={self.baseline!r}" + (", leave_one_out=True" if self.leave_one_out else "")

    def scale(self, n: int) -> float | None:
        """c if Eĝ = c g is known, else `None`, given that the scores of completions have mean 0."""
        if self.baseline == CONTROL and not self.leave_one_out:
            return (n - 1) / n
        return 1.0 if find_baseline(self.baseline).is_unbiased(self.leave_one_out, self.zero_tail) else None

    def advantages(self, pool: Pool, rows: torch.Tensor, n: int) -> torch.Tensor:
        """`(b, T)` advantages of whole groups of `n`, or `(b, 1)` for one number per completion."""
        return assign_credit(
            pool.rewards[rows],
            pool.energy[rows],
            pool.mask[rows],
            n,
            baseline=self.baseline,
            alignment=self.alignment,
            zero_tail=self.zero_tail,
            leave_one_out=self.leave_one_out,
        ).advantages


def estimators(baselines: Sequence[str], alignment: str = "generated", zero_tail: bool = True) -> list[Estimator]:
    """
    `none`, the group mean, and all `baselines`; those that read energies also with one left out.

    `alignment` and `zero_tail` are passed to the baselines that use them.
    """
    found = [Estimator("none", "none"), Estimator(CONTROL, CONTROL)]
    for name in baselines:
        entry = find_baseline(name)
        alignment_of = alignment if entry.per_token else "generated"
        zero_tail_of = zero_tail or not entry.zero_tail
        if name not in ("none", CONTROL):
            found.append(Estimator(name, name, False, alignment_of, zero_tail_of))
        if entry.uses_energy and not entry.leaves_one_out:
            found.append(Estimator(f"{name}, one left out", name, True, alignment_of, zero_tail_of))
    return found
