"""Scored completions: the one argument of every baseline. Pure torch, with the notation of `trl_otb.energy`."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields, replace

import torch
from torch import Tensor


LEAST_WEIGHT = 1e-30  # added to all weights: lost in rounding unless all of them are 0
# What a baseline may need in addition to returns, mask and lengths
NEEDS = ("energy", "logps", "states", "completion_ids", "turn", "prompt_key")
ALIGNMENTS = ("generated", "position")


@dataclass(frozen=True)
class Completions:
    """
    Scored completions of whole groups: N adjacent rows per prompt, T generated tokens.

    Tool output and padding are squeezed out: column t is the t-th generated token. A completion that has ended keeps
    the reward-to-go of its last token.

    Args:
        returns (`torch.Tensor` of shape `(B, T)` or `(B, 1)`):
            G_t, the reward-to-go, or one return per completion; 0 without a reward.
        mask (`torch.Tensor` of shape `(B, T)`):
            1.0 where a completion with a reward has a t-th generated token, else 0.0.
        scored (`torch.Tensor` of shape `(B, 1)`):
            1.0, or 0.0 if no reward function scored the completion.
        lengths (`torch.Tensor` of shape `(B, 1)`):
            Number of generated tokens; 0 without a reward.
        num_generations (`int`):
            N.
        prompt (`torch.Tensor` of shape `(B,)`):
            The index of each row's prompt among the prompts of all processes.
        energy (`torch.Tensor` of shape `(B, T)`, *optional*):
            w_t, 0 where `mask` is 0.
        weights (`torch.Tensor` of shape `(B, T)`, *optional*):
            ρ_t² w_t, the squared score of a token in the loss: `energy`, unless there are importance ratios ρ. A ratio
            may depend on later tokens: compare completions with `weights`, predict from `energy`.
        logps, completion_ids, turn (`torch.Tensor` of shape `(B, T)`, *optional*):
            log π(y_t), the token, and the policy's turn that it is part of, from 0; 0 where `mask` is 0.
        states (`torch.Tensor` of shape `(B, T, k)`, *optional*):
            The policy's hidden state at the position that predicts the token, from a layer at two thirds of the depth,
            randomly projected to k numbers.
        prompt_key (`torch.Tensor` of shape `(B, 1)`, *optional*):
            int64, the same for the same prompt in every step and run.
    """

    returns: Tensor
    mask: Tensor
    scored: Tensor
    lengths: Tensor
    num_generations: int
    prompt: Tensor
    energy: Tensor | None = None
    weights: Tensor | None = None
    logps: Tensor | None = None
    states: Tensor | None = None
    completion_ids: Tensor | None = None
    turn: Tensor | None = None
    prompt_key: Tensor | None = None

    def __len__(self) -> int:
        return len(self.mask)

    @property
    def members(self) -> Tensor:
        """`(B, 1)` 1.0 for completions with a reward and a token that is trained on: truncated ones may have none."""
        return self.scored * (self.lengths > 0)

    @property
    def total_energy(self) -> Tensor:
        """`(B, 1)` W_T = Σ_t ρ_t² w_t."""
        return self.need("weights").cumsum(1)[:, -1:]  # in order, so that padding does not change rounding

    def need(self, name: str) -> Tensor:
        """
        A field that may be missing.

        Raises:
            ValueError: It is, because the baseline did not ask for it.
        """
        value = getattr(self, name)
        if value is None:
            raise ValueError(
                f"The baseline reads `{name}`, which is not there. Register it with `needs={{{name!r}}}` and use it in "
                f"an OTBGRPOTrainer, or pass `{name}` to `compute_advantages`."
            )
        return value

    def grouped(self, x: Tensor) -> Tensor:
        """`(B, T)` -> `(G, N, T)`"""
        return x.reshape(-1, self.num_generations, x.size(1))

    def mean(self, weights: Tensor, leave_one_out: bool = False) -> Tensor:
        """
        Per token: Σ_i ω_i G_i / Σ_i ω_i over the group, or over the others.

        Args:
            weights (`torch.Tensor` broadcastable to `(B, T)`):
                ω, not negative. Completions without a reward are ignored.
            leave_one_out (`bool`, *optional*, defaults to `False`):
                Whether to leave a completion out of its own mean.

        Returns:
            `torch.Tensor` of shape `(B, T)`. If all weights are 0, the plain mean of the completions that have a t-th
            token, and 0 if there are none.
        """
        return self.weighted_mean(weights, self.returns, self.mask, leave_one_out)

    def completion_mean(self, weights: Tensor, leave_one_out: bool = False) -> Tensor:
        """`(B, 1)` the same per completion, of whole returns; if all weights are 0, the plain mean of all returns."""
        return self.weighted_mean(weights, self.returns[:, :1], self.scored, leave_one_out)

    def weighted_mean(self, weights: Tensor, returns: Tensor, members: Tensor, leave_one_out: bool) -> Tensor:
        """The mean of `returns`; that of `members`, unweighted, if all weights are 0."""
        weights = torch.add(weights.float(), members, alpha=LEAST_WEIGHT).mul_(self.scored)
        of_groups = self.grouped(weights)
        mass = _sum_of_group(of_groups, leave_one_out)
        total = _sum_of_group(of_groups * self.grouped(returns.expand(weights.shape)), leave_one_out)
        mean = total / mass.clamp_(min=LEAST_WEIGHT)
        return mean.expand(of_groups.shape).reshape(weights.shape)

    # For crediting

    def totals(self) -> "Completions":
        """The same completions as one number each, T = 1: whole returns, W_T in the place of energies."""
        total = None if self.weights is None else self.total_energy
        one = dict.fromkeys(("logps", "states", "completion_ids", "turn"))
        return replace(self, returns=self.returns[:, :1], mask=self.members, energy=total, weights=total, **one)

    def rows(self, rows: slice) -> "Completions":
        """Some rows: whole groups, unless a baseline looks at each completion by itself."""
        return self._each(lambda values: values[rows])

    def blocks(self, tokens: int) -> Iterator["Completions"]:
        """All rows, in blocks of whole groups with at most so many tokens, if a group has fewer."""
        rows = max(tokens // max(self.mask.size(1), 1) // self.num_generations, 1) * self.num_generations
        for first in range(0, max(len(self), 1), rows):
            yield self.rows(slice(first, first + rows))

    def gathered(self, gather: Callable[[Tensor], Tensor], tokens: bool) -> "Completions":
        """
        The rows of all processes.

        Args:
            gather (`Callable`):
                Concatenates the tensors of all processes, which have one shape; all of them must call it.
            tokens (`bool`):
                Whether mask and energies are sent; states and log-probs never are.
        """
        names = ["returns", "scored", "lengths", "prompt"]
        names += ["mask", "weights"] if tokens else []
        own = {name: getattr(self, name) for name in (*names, "prompt_key") if getattr(self, name) is not None}
        length = int(gather(torch.tensor([self.mask.size(1)], device=self.mask.device)).max())
        more = length - self.mask.size(1)
        for name in ("mask", "weights") if more else ():
            if name in own:
                own[name] = torch.nn.functional.pad(own[name], (0, more))
        if more and self.returns.size(1) > 1:  # the last value is kept
            own["returns"] = torch.cat([self.returns, self.returns[:, -1:].expand(-1, more)], dim=1)
        everyone = {name: gather(values) for name, values in own.items()}
        everyone.setdefault("mask", everyone["scored"] * (everyone["lengths"] > 0))
        none = dict.fromkeys(name for name in (*NEEDS, "weights") if name not in everyone)
        return replace(self, **{**none, **everyone, "energy": everyone.get("weights")})

    def _each(self, function: Callable[[Tensor], Tensor]) -> "Completions":
        tensors = {f.name: getattr(self, f.name) for f in fields(self)}
        return replace(self, **{name: function(x) for name, x in tensors.items() if isinstance(x, Tensor)})


def _sum_of_group(x: Tensor, leave_one_out: bool) -> Tensor:
    """`(G, N, T)` -> `(G, 1, T)`, or `(G, N, T)` the sum over the others."""
    if not leave_one_out:
        return x.sum(dim=1, keepdim=True)
    # Sums before and after: the total minus the own term would cancel where the own term dominates
    before, after = x.cumsum(1).roll(1, 1), x.flip(1).cumsum(1).flip(1).roll(-1, 1)
    before[:, 0], after[:, -1] = 0, 0
    return before.add_(after)


def reward_to_go(token_rewards: Tensor) -> Tensor:
    """
    G_t = Σ_{k≥t} r_k, undiscounted.

    Args:
        token_rewards (`torch.Tensor` of shape `(B, T)`):
            r_t. Rewards count at every position, also on tool output; padding must hold 0.

    Returns:
        `torch.Tensor` of shape `(B, T)`, float32.
    """
    return token_rewards.float().flip(1).cumsum(dim=1).flip(1)


def completion_returns(rewards: Tensor) -> Tensor:
    """`(B,)` float32 return of every completion: its reward, or the sum over its tokens; NaN without a reward."""
    return rewards.float() if rewards.dim() == 1 else rewards.float().sum(dim=1)


def turns_of(mask: Tensor) -> Tensor:
    """`(B, T)` mask of generated tokens -> `(B, T)` the policy's turn of each token, from 0; undefined elsewhere."""
    before = torch.nn.functional.pad(mask, (1, 0))[:, :-1]
    return ((mask > 0) & (before == 0)).cumsum(dim=1) - 1


def squeeze(
    rewards: Tensor,
    mask: Tensor,
    num_generations: int,
    *,
    alignment: str = "generated",
    first_row: int = 0,
    energy: Tensor | None = None,
    weights: Tensor | None = None,
    prompt_key: Tensor | None = None,
    **of_tokens: Tensor | None,
) -> Completions:
    """
    Rows with padding and tool output -> [`Completions`].

    Args:
        rewards (`torch.Tensor` of shape `(B,)` or `(B, T)`):
            One return per completion, or one reward per token; NaN marks a completion without a reward.
        mask (`torch.Tensor` of shape `(B, T)`):
            1 on generated tokens.
        num_generations (`int`):
            N.
        alignment (`str`, *optional*, defaults to `"generated"`):
            `"position"` leaves tool output in its place, with mask 0, as the reference's single-turn form does.
        first_row (`int`, *optional*, defaults to 0):
            The index of the first row among those of all processes.
        energy, weights, prompt_key, and by name in `of_tokens` logps, states, completion_ids and turn:
            As in [`Completions`], before squeezing. Values where `mask` is 0 are ignored and may be NaN.
    """
    missing = rewards.isnan() if rewards.dim() == 1 else rewards.isnan().any(1)
    scored = (~missing).float().unsqueeze(1)
    columns = torch.arange(mask.size(1), device=mask.device)
    taken = mask.bool() & ~missing.unsqueeze(1)
    lengths = taken.sum(1, keepdim=True)
    ends = (taken * (columns + 1)).amax(1, keepdim=True) if mask.size(1) else lengths
    slots = None  # where each token goes, counted from 1; a column 0 for others is dropped
    if alignment == "generated" and bool((ends != lengths).any()):
        slots, ends = taken.cumsum(1) * taken, lengths
    present = taken.float() if slots is None else (columns < lengths).float()

    def place(values: Tensor) -> Tensor:
        keep = taken if values.dim() == 2 else taken.unsqueeze(-1)
        values = values.masked_fill(~keep, 0)
        if slots is None:
            return values
        at = slots if values.dim() == 2 else slots.unsqueeze(-1).expand_as(values)
        empty = values.new_zeros(values.size(0), values.size(1) + 1, *values.shape[2:])
        return empty.scatter_(1, at, values)[:, 1:]

    if rewards.dim() == 1:
        returns = rewards.float().unsqueeze(1)
    else:
        togo = reward_to_go(rewards)
        at_tokens = place(togo) if slots is not None else togo
        last = at_tokens.gather(1, (ends - 1).clamp(min=0))
        returns = torch.where(columns < ends, at_tokens, torch.where(lengths > 0, last, togo[:, :1]))
    placed = {name: place(values) for name, values in of_tokens.items() if values is not None}
    energy = None if energy is None else place(energy.float())
    prompt = torch.arange(first_row, first_row + len(mask), device=mask.device) // num_generations
    return Completions(
        returns=returns.masked_fill(scored == 0, 0.0),
        mask=present,
        scored=scored,
        lengths=lengths.float(),
        num_generations=num_generations,
        prompt=prompt,
        energy=energy,
        weights=energy if weights is None else place(weights.float()),
        prompt_key=prompt_key,
        **placed,
    )


def put_back(values: Tensor, mask: Tensor) -> Tensor:
    """`(B, T)` by generated token -> `(B, T)` at the tokens' places, 0 elsewhere; `(B, 1)` is spread over them."""
    place = (mask.long().cumsum(1) - 1).clamp(min=0)
    return values.expand(mask.shape).gather(1, place) * mask
