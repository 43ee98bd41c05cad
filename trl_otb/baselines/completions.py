"""Scored completions: the one argument of every baseline. Pure torch, with the notation of `trl_otb.energy`."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields, replace
from typing import Any

import torch
from jaxtyping import Float, Shaped
from torch import Tensor

from ..energy import prefix_sums


MIN_WEIGHT = 1e-30  # added to all weights: lost in rounding unless all of them are 0
NOT_ZERO = 1e-30  # the least divisor: where nothing is divided by nothing the result is 0
# What a baseline may need in addition to returns, mask and lengths
NEEDS = ("energy", "logps", "states", "progress", "prompt_key")
UNSENT = ("logps", "states", "progress", "draw_ratio")  # to other processes
ALIGNMENTS = ("generated", "position")


@dataclass(frozen=True)
class Completions:
    """
    Scored completions of whole groups: N adjacent rows per prompt, T generated tokens.

    Tool output and padding are squeezed out: column t is the t-th generated token. A completion that has ended keeps
    the reward-to-go of its last token.

    Args:
        returns (`(B, T)` or `(B, 1)`): G_t, the reward-to-go, or one return per completion; 0 without a reward.
        whole_returns (`(B, 1)`): R, which includes rewards before the first generated token.
        mask (`(B, T)`): 1.0 where a completion with a reward has a t-th generated token, else 0.0.
        scored (`(B, 1)`): 1.0, or 0.0 if no reward function scored the completion.
        lengths (`(B, 1)`): Number of generated tokens; 0 without a reward.
        num_generations (`int`): N.
        prompt (`(B,)`): The index of each row's prompt among the prompts of all processes; in asynchronous training
            the number of its group.
        energy (`(B, T)`, *optional*): w_t, 0 where `mask` is 0.
        loss_energy (`(B, T)`, *optional*): ρ_t² w_t, the squared score of a token in the loss: `energy`, unless there
            are importance ratios ρ. A ratio may depend on later tokens: compare completions with `loss_energy`, predict
            from `energy`.
        logps (`(B, T)`, *optional*): log π(y_t), 0 where `mask` is 0.
        states (`(B, T, k)`, *optional*): The policy's hidden state at the position that predicts the token, from a
            layer at two thirds of the depth, randomly projected to k numbers.
        progress (`(B, T, F)`, *optional*): What the run's progress functions return for the text before the token, or
            for an earlier part of it; `None` without such functions.
        progress_names (`tuple[str]`, *optional*): The names of the F functions.
        draw_ratio (`(B, T)`, *optional*): What Σ_v π(v)² − π(y_t) is multiplied by for its mean to be 0 given what
            precedes y_t: π(y_t) / μ(y_t) where μ drew it and the loss weights each token by itself, 0 where the
            sampler is not known; 1 if `None`, for tokens drawn from π, or weighted by completion.
        prompt_key (`(B, 1)`, *optional*): int64, the same for the same prompt in every step and run.
    """

    returns: Tensor
    whole_returns: Tensor
    mask: Tensor
    scored: Tensor
    lengths: Tensor
    num_generations: int
    prompt: Tensor
    energy: Tensor | None = None
    loss_energy: Tensor | None = None
    logps: Tensor | None = None
    states: Tensor | None = None
    progress: Tensor | None = None
    progress_names: tuple[str, ...] = ()
    draw_ratio: Tensor | None = None
    prompt_key: Tensor | None = None

    def __len__(self) -> int:
        return len(self.mask)

    @property
    def members(self) -> Float[Tensor, "B 1"]:
        """1.0 for completions with a reward and a token that is trained on: truncated ones may have none."""
        return self.scored * (self.lengths > 0)

    @property
    def total_energy(self) -> Float[Tensor, "B 1"]:
        """W_T = Σ_t ρ_t² w_t."""
        return prefix_sums(self.need("loss_energy"))[:, -1:]  # in order, so that padding does not change rounding

    def need(self, name: str) -> Tensor:
        """A field that may be missing; a `ValueError` if it is, because the baseline did not ask for it."""
        value = getattr(self, name)
        if value is None:
            raise ValueError(
                f"The baseline reads `{name}`, which is not there. Register it with `needs={{{name!r}}}` and use it in "
                f"an OTBGRPOTrainer, or pass `{name}` to `compute_advantages`."
            )
        return value

    def grouped(self, x: Float[Tensor, "B T"]) -> Float[Tensor, "G N T"]:
        """The rows by group."""
        return x.reshape(-1, self.num_generations, x.size(1))

    def mean(self, weights: Float[Tensor, "B T"], leave_one_out: bool = False) -> Float[Tensor, "B T"]:
        """
        Per token: Σ_i ω_i G_i / Σ_i ω_i over the group, or over the others. `weights`, ω, are not negative;
        if all are 0, the plain mean of the completions that have a t-th token, or 0.
        """
        return self.weighted_mean(weights, self.returns, self.mask, leave_one_out)

    def completion_mean(self, weights: Float[Tensor, "B 1"], leave_one_out: bool = False) -> Float[Tensor, "B 1"]:
        """The same per completion, of whole returns; if all weights are 0, the plain mean of all returns."""
        return self.weighted_mean(weights, self.whole_returns, self.scored, leave_one_out)

    def weighted_mean(
        self,
        weights: Float[Tensor, "B T"],
        returns: Float[Tensor, "B #T"],
        members: Float[Tensor, "B #T"],
        leave_one_out: bool,
    ) -> Float[Tensor, "B T"]:
        """The mean of `returns`; that of `members`, unweighted, if all weights are 0."""
        weights = torch.add(weights.float(), members, alpha=MIN_WEIGHT).mul_(self.scored)
        of_groups = self.grouped(weights)
        mass = _sum_of_group(of_groups, leave_one_out)
        total = _sum_of_group(of_groups * self.grouped(returns.expand(weights.shape)), leave_one_out)
        mean = total / mass.clamp_(min=MIN_WEIGHT)
        return mean.expand(of_groups.shape).reshape(weights.shape)

    def totals(self) -> "Completions":
        """The same completions as one number each, T = 1: whole returns, sums of energies."""
        none: dict[str, Any] = dict.fromkeys(UNSENT)
        in_loss = None if self.loss_energy is None else self.total_energy
        energy = in_loss if self.energy is self.loss_energy else prefix_sums(self.need("energy"))[:, -1:]
        return replace(self, **none, energy=energy, loss_energy=in_loss, returns=self.whole_returns, mask=self.members)

    def rows(self, rows: slice | Tensor, num_generations: int | None = None) -> "Completions":
        """Some rows, by default in groups of the same size."""
        return self._each(lambda values: values[rows], num_generations)

    def to(self, device: str | torch.device) -> "Completions":
        """The same completions on another device."""
        return self._each(lambda values: values.to(device))

    def blocks(self, tokens: int) -> Iterator["Completions"]:
        """All rows, in blocks of whole groups with at most so many tokens, if a group has fewer."""
        rows = max(tokens // max(self.mask.size(1), 1) // self.num_generations, 1) * self.num_generations
        for first in range(0, max(len(self), 1), rows):
            yield self.rows(slice(first, first + rows))

    def once(self, function: Callable[["Completions"], Any]) -> Any:
        """`function` of these completions, computed on first use and kept as long as they are."""
        computed = vars(self).setdefault("_computed", {})
        if function not in computed:
            computed[function] = function(self)
        return computed[function]

    def tensors(self) -> dict[str, Tensor]:
        """The tensors that are there, by name."""
        return {f.name: x for f in fields(self) if isinstance(x := getattr(self, f.name), Tensor)}

    def _each(self, function: Callable[[Tensor], Tensor], num_generations: int | None = None) -> "Completions":
        tensors: dict[str, Any] = {name: function(values) for name, values in self.tensors().items()}
        return replace(self, **tensors, num_generations=num_generations or self.num_generations)


def _sum_of_group(x: Float[Tensor, "G N T"], leave_one_out: bool) -> Float[Tensor, "G #N T"]:
    """The sum of each group, or over the others."""
    if not leave_one_out:
        return x.sum(dim=1, keepdim=True)
    # Sums before and after: the total minus the own term would cancel where the own term dominates
    before, after = prefix_sums(x).roll(1, 1), prefix_sums(x.flip(1)).flip(1).roll(-1, 1)
    before[:, 0], after[:, -1] = 0, 0
    return before.add_(after)


def reward_to_go(token_rewards: Shaped[Tensor, "B T"]) -> Float[Tensor, "B T"]:
    """r_t -> G_t = Σ_{k≥t} r_k, undiscounted, float32. Rewards count at every position; padding holds 0."""
    return prefix_sums(token_rewards.float().flip(1)).flip(1)


def completion_returns(rewards: Shaped[Tensor, "B ..."]) -> Float[Tensor, " B"]:
    """The float32 return of every completion: its reward, or the sum over its tokens; NaN without a reward."""
    return rewards.float() if rewards.dim() == 1 else rewards.float().sum(dim=1)


def squeeze(
    rewards: Tensor,
    mask: Tensor,
    num_generations: int,
    *,
    alignment: str = "generated",
    first_row: int = 0,
    prompt_key: Tensor | None = None,
    progress_names: tuple[str, ...] = (),
    **of_tokens: Tensor | None,
) -> Completions:
    """
    Rows with padding and tool output -> [`Completions`].

    Args:
        rewards (`(B,)` or `(B, T)`): One return per completion, or one reward per token; NaN: no reward.
        mask (`(B, T)`): 1 on generated tokens.
        alignment (`str`, *optional*): `"position"` leaves tool output in its place, with mask 0, as the reference's
            single-turn form does.
        first_row (`int`, *optional*): The index of the first row among those of all processes.
        prompt_key, progress_names, and in `of_tokens` energy, loss_energy, logps, states, progress, draw_ratio: As in
            [`Completions`], before squeezing. Values where `mask` is 0 are ignored and may be NaN. Without
            `loss_energy`, it is `energy`.
    """
    missing = rewards.isnan() if rewards.dim() == 1 else rewards.isnan().any(1)
    scored = (~missing).float().unsqueeze(1)
    columns = torch.arange(mask.size(1), device=mask.device)
    included = mask.bool() & ~missing.unsqueeze(1)
    lengths = included.sum(1, keepdim=True)
    ends = (included * (columns + 1)).amax(1, keepdim=True)
    slots = None  # where each token goes, counted from 1; a column 0 for others is dropped
    if alignment == "generated" and bool((ends != lengths).any()):
        slots, ends = included.cumsum(1) * included, lengths

    def place(values: Tensor) -> Tensor:
        one_each = values.dim() == 2
        values = values.masked_fill(~(included if one_each else included.unsqueeze(-1)), 0)
        if slots is None:
            return values
        at = slots if one_each else slots.unsqueeze(-1).expand_as(values)
        empty = values.new_zeros(values.size(0), values.size(1) + 1, *values.shape[2:])
        return empty.scatter_(1, at, values)[:, 1:]

    returns = rewards.float().unsqueeze(1) if rewards.dim() == 1 else reward_to_go(rewards)
    whole = returns[:, :1].masked_fill(scored == 0, 0.0)
    if rewards.dim() == 2:
        at_tokens = returns if slots is None else place(returns)
        last = torch.where(lengths > 0, at_tokens.gather(1, (ends - 1).clamp(min=0)), whole)
        returns = torch.where(columns < ends, at_tokens, last)
    placed = {name: place(values) for name, values in of_tokens.items() if values is not None}
    placed |= {name: placed[name].float() for name in ("energy", "loss_energy") if name in placed}
    return Completions(
        returns=returns.masked_fill(scored == 0, 0.0),
        whole_returns=whole,
        mask=included.float() if slots is None else (columns < lengths).float(),
        scored=scored,
        lengths=lengths.float(),
        num_generations=num_generations,
        prompt=torch.arange(first_row, first_row + len(mask), device=mask.device) // num_generations,
        prompt_key=prompt_key,
        progress_names=progress_names,
        **{"loss_energy": placed.get("energy"), **placed},
    )


def put_back(values: Tensor, mask: Tensor) -> Tensor:
    """`(B, T)` by generated token -> `(B, T)` at the tokens' places, 0 elsewhere; `(B, 1)` is spread over them."""
    place = (mask.long().cumsum(1) - 1).clamp(min=0)
    return values.expand(mask.shape).gather(1, place) * mask
