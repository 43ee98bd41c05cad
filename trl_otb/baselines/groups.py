"""The completions of a prompt, aligned token by token. Pure torch, with the notation of `trl_otb.energy`."""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cached_property
from typing import Any

import torch


ALIGNMENTS = ("generated", "position")

LEAST_WEIGHT = 1e-30  # added to all weights: lost in rounding unless all of them are 0


def reward_to_go(token_rewards: torch.Tensor) -> torch.Tensor:
    """
    G_t = Σ_{k≥t} r_k, undiscounted.

    Args:
        token_rewards (`torch.Tensor` of shape `(B, T)`):
            r_t. Rewards count at every position, also on tool output; padding must hold 0.

    Returns:
        `torch.Tensor` of shape `(B, T)`, float32.
    """
    return token_rewards.float().flip(1).cumsum(dim=1).flip(1)


def scorable_rows(rewards: torch.Tensor) -> torch.Tensor:
    """`(B,)` bool from rewards `(B,)` or `(B, T)`: False for a completion without a reward (NaN)."""
    return ~(rewards.isnan() if rewards.dim() == 1 else rewards.isnan().any(dim=1))


def completion_returns(rewards: torch.Tensor) -> torch.Tensor:
    """`(B,)` float32 return of every completion: its reward, or the sum over its tokens; NaN without a reward."""
    return rewards.float() if rewards.dim() == 1 else rewards.float().sum(dim=1)


def turns_of(mask: torch.Tensor) -> torch.Tensor:
    """`(B, T)` mask of generated tokens -> `(B, T)` the policy's turn of each token, from 0; undefined elsewhere."""
    before = torch.nn.functional.pad(mask, (1, 0))[:, :-1]
    return ((mask > 0) & (before == 0)).cumsum(dim=1) - 1


class Completions:
    """
    G prompts with N completions each, as a few numbers per completion: the argument of baselines with `totals_only`.

    Args:
        returns (`torch.Tensor` of shape `(B,)`):
            One return per completion. NaN marks a completion without a reward.
        total_energy (`torch.Tensor` of shape `(B,)`, *optional*):
            W_T; if omitted, reading it is an error.
        lengths (`torch.Tensor` of shape `(B,)`):
            Number of generated tokens.
        num_generations (`int`):
            N; the N rows of a prompt are adjacent.
        leave_one_out (`bool`, *optional*, defaults to `False`):
            Whether [`mean`] leaves a completion's own return out of its baseline.
        beside (`dict[str, torch.Tensor]`, *optional*):
            What else a baseline reads: `prompt_key`, of shape `(B,)`.
    """

    per_token = False

    def __init__(
        self,
        returns: torch.Tensor,
        total_energy: torch.Tensor | None,
        lengths: torch.Tensor,
        num_generations: int,
        *,
        leave_one_out: bool = False,
        beside: dict[str, torch.Tensor] | None = None,
    ):
        self.leave_one_out = leave_one_out
        self._beside = beside or {}
        self.row_scorable = scorable_rows(returns).unsqueeze(1)
        self.row_returns = returns.float().unsqueeze(1).masked_fill(~self.row_scorable, 0.0)
        self._num_generations = num_generations
        self._total_energy = None if total_energy is None else total_energy.float().unsqueeze(1)
        self._lengths = lengths.float().unsqueeze(1)

    @property
    def shape(self) -> tuple[int, int, int]:
        """(G, N, 1)"""
        return len(self.row_returns) // self._num_generations, self._num_generations, 1

    @property
    def returns(self) -> torch.Tensor:
        """`(G, N, 1)` each completion's return; 0 without a reward."""
        return self._grouped(self.row_returns)

    @property
    def total_energy(self) -> torch.Tensor:
        """`(G, N, 1)` W_T; 0 for a completion without a reward."""
        return self._grouped(declared(self._total_energy) * self.row_scorable)

    @property
    def lengths(self) -> torch.Tensor:
        """`(G, N, 1)` number of generated tokens; 0 for a completion without a reward."""
        return self._grouped(self._lengths * self.row_scorable)

    @property
    def scorable(self) -> torch.Tensor:
        """`(G, N, 1)` 0 for completions with a NaN reward, else 1."""
        return self._grouped(self.row_scorable).float()

    @property
    def prompt_key(self) -> torch.Tensor:
        """`(G, 1, 1)` int64, the same for the same prompt in every step and run."""
        return self._grouped(read(self._beside, "prompt_key").unsqueeze(1))[:, :1]

    def mean(self, weights: torch.Tensor, leave_one_out: bool | None = None) -> torch.Tensor:
        """
        Σ_i ω_i G_i / Σ_i ω_i over the group or, with one left out, over the other completions.

        Args:
            weights (`torch.Tensor` broadcastable to `(G, N, T)`):
                ω, not negative. Completions without a reward are ignored.
            leave_one_out (`bool`, *optional*):
                By default, the option of the run.

        Returns:
            `torch.Tensor` of shape `(G, 1, T)`, or `(G, N, T)` with one left out; T is 1 if one number serves all
            tokens. If all weights are 0, the plain mean over the completions present at t (for a baseline per
            completion, over all with a reward), and 0 if there are none.
        """
        leave_one_out = self.leave_one_out if leave_one_out is None else leave_one_out
        weights = torch.add(weights.float(), self._members, alpha=LEAST_WEIGHT).mul_(self.scorable)
        total = _sum_of_group(weights, leave_one_out)
        return _sum_of_group(weights * self.returns, leave_one_out) / total.clamp_(min=LEAST_WEIGHT)

    @property
    def lone_tail_tokens(self) -> torch.Tensor:
        """`(B, 1)` number of a completion's generated tokens beyond the length of all others in its group."""
        lengths = self.lengths
        return (lengths - _second_largest(lengths)).clamp_(min=0).long().view(-1, 1)

    @property
    def _members(self) -> torch.Tensor:
        """1 for completions whose returns are averaged if all weights are 0."""
        return self.scorable

    def _grouped(self, rows: torch.Tensor) -> torch.Tensor:
        return rows.reshape(-1, self._num_generations, rows.size(1))

    def held(self) -> dict[str, torch.Tensor]:
        """The tensors that a baseline reads and must not modify, by name."""
        return {"returns": self.row_returns, **self._beside}


@contextmanager
def left_as_it_is(group: Any, baseline: str) -> Iterator[None]:
    """Context in which a user's function reads `group` and must not modify it."""

    def mark(values: torch.Tensor) -> Any:  # inference mode counts no changes
        return values.clone() if values.is_inference() else values._version

    before = {name: (values, mark(values)) for name, values in group.held().items()}
    yield
    for name, now in group.held().items():
        values, marked = before[name]
        same = torch.equal(now, marked) if isinstance(marked, torch.Tensor) else now._version == marked
        if now is not values or not same:
            raise ValueError(
                f"The baseline {baseline!r} modified `{name}` in place, but the advantages need the original values. "
                f"Work on a copy, `{name}.clone()`, or use operations without a trailing underscore."
            )


def declared(energy: torch.Tensor | None) -> torch.Tensor:
    """The energies, if the baseline was registered as reading them."""
    if energy is None:
        raise ValueError(
            "The baseline reads energies but was registered with `uses_energy=False`, so they may not exist. Register "
            "it with `uses_energy=True`."
        )
    return energy


def read(beside: dict[str, torch.Tensor], name: str) -> torch.Tensor:
    """A tensor that a baseline listed in `reads`."""
    if name not in beside:
        raise ValueError(
            f"The baseline reads `{name}`, which is not available. Register it with `reads=({name!r},)` and use it in "
            f"an OTBGRPOTrainer, or pass `{name}` to `compute_advantages`."
        )
    return beside[name]


class Groups(Completions):
    """
    G prompts with N completions each, aligned token by token: the argument of a baseline.

    `alignment="generated"` aligns the t-th generated tokens of completions, skipping tool output; `"position"` aligns
    tokens at the same position of the completion.

    Args:
        rewards (`torch.Tensor` of shape `(B,)` or `(B, T)`):
            One return per completion, or one reward per token. NaN marks a completion without a reward.
        energy (`torch.Tensor` of shape `(B, T)`, *optional*):
            ρ_t² w_t; if omitted, reading it is an error. Values where `mask` is 0 are ignored and may be NaN.
        mask (`torch.Tensor` of shape `(B, T)`):
            1 on generated tokens.
        num_generations (`int`):
            N; the N rows of a prompt are adjacent.
        per_token (`bool`, *optional*, defaults to `True`):
            Whether token rewards become a reward-to-go per token, or one sum per completion.
        alignment (`str`, *optional*, defaults to `"generated"`):
            `"generated"` or `"position"`.
        leave_one_out (`bool`, *optional*, defaults to `False`):
            Whether [`mean`] leaves a completion's own return out of its baseline.
        beside (`dict[str, torch.Tensor]`, *optional*):
            What else a baseline reads, by name: `logps`, `completion_ids` and `turn`, each `(B, T)`, `states`, `(B, T,
            k)`, and `prompt_key`, `(B,)`.

    Every attribute below has three axes (prompt, completion, token) and is computed on first use.
    """

    def __init__(
        self,
        rewards: torch.Tensor,
        energy: torch.Tensor | None,
        mask: torch.Tensor,
        num_generations: int,
        *,
        per_token: bool = True,
        alignment: str = "generated",
        leave_one_out: bool = False,
        beside: dict[str, torch.Tensor] | None = None,
    ):
        self._beside = beside or {}
        self.per_token = per_token
        self.leave_one_out = leave_one_out
        self.row_scorable = scorable_rows(rewards).unsqueeze(1)
        returns = reward_to_go(rewards) if per_token and rewards.dim() == 2 else completion_returns(rewards)
        self.row_returns = returns.view(len(returns), -1).masked_fill(~self.row_scorable, 0.0)  # not aligned
        self._mask = mask.long() * self.row_scorable
        self._energy = energy
        self._num_generations = num_generations
        self._squeezed = alignment == "generated"

    # What a baseline sees

    @property
    def shape(self) -> tuple[int, int, int]:
        """(G, N, T)"""
        return len(self._mask) // self._num_generations, self._num_generations, self._mask.size(1)

    @cached_property
    def returns(self) -> torch.Tensor:
        """
        `(G, N, T)` G_t, or `(G, N, 1)` if there is one return per completion; 0 without a reward.

        After its last token a completion keeps the last token's reward-to-go.
        """
        if self.row_returns.size(1) == 1:
            return self._grouped(self.row_returns)
        returns = self._aligned(self.row_returns)
        last = returns.gather(2, (self._ends - 1).clamp(min=0))
        return torch.where(self._positions < self._ends, returns, last)

    @cached_property
    def energy(self) -> torch.Tensor:
        """`(G, N, T)` ρ_t² w_t, 0 where `present` is 0."""
        return self._in_groups(declared(self._energy).float())

    @cached_property
    def present(self) -> torch.Tensor:
        """`(G, N, T)` 1 where the completion has a reward and a t-th generated token, else 0."""
        # Float, here and below: on a CPU, arithmetic between float and bool takes ten times as long
        if self._squeezed:
            return (self._ends - self._positions.float()).clamp_(0, 1)
        return self._grouped(self._mask).float()

    @property
    def logps(self) -> torch.Tensor:
        """`(G, N, T)` log π(y_t), 0 where `present` is 0."""
        return self._read("logps")

    @property
    def states(self) -> torch.Tensor:
        """
        `(G, N, T, k)` the policy's hidden state at the position that predicts the token, from a layer at two thirds of
        the depth and randomly projected to k numbers; 0 where `present` is 0.
        """
        return torch.stack([self._in_groups(x) for x in read(self._beside, "states").unbind(dim=-1)], dim=-1)

    @property
    def completion_ids(self) -> torch.Tensor:
        """`(G, N, T)` the tokens, 0 where `present` is 0."""
        return self._read("completion_ids")

    @property
    def turn(self) -> torch.Tensor:
        """`(G, N, T)` the policy's turn, from 0, that a token is part of; 0 where `present` is 0."""
        return self._read("turn")

    def _read(self, name: str) -> torch.Tensor:
        return self._in_groups(read(self._beside, name))

    def _in_groups(self, values: torch.Tensor) -> torch.Tensor:
        return self._aligned(values) if self._squeezed else self._grouped(values.masked_fill(self._mask == 0, 0))

    @property
    def total_energy(self) -> torch.Tensor:
        """`(G, N, 1)` W_T."""
        return self.energy.cumsum(dim=-1)[..., -1:]  # summed in order, so that padding does not change rounding

    @property
    def lengths(self) -> torch.Tensor:
        """`(G, N, 1)` generated tokens."""
        return self.present.sum(dim=-1, keepdim=True)

    @property
    def _members(self) -> torch.Tensor:
        return self.present if self.per_token else self.scorable

    def held(self) -> dict[str, torch.Tensor]:
        energy = {} if self._energy is None else {"energy": self.energy}
        return {"returns": self.returns, "present": self.present, **energy, **self._beside}

    # The lone tail

    @property
    def lone_tail(self) -> torch.Tensor:
        """
        `(G, 1, T)` 1 where at most the group's longest completion still generates, else 0; with N = 1, 1 throughout.
        """
        return (self._positions >= self._second_end).float()

    @property
    def lone_tail_tokens(self) -> torch.Tensor:
        """`(B, 1)` number of a completion's generated tokens on the lone tail."""
        if self._squeezed:
            return (self._ends - self._second_end).clamp_(min=0).view(-1, 1)
        return (self.present * self.lone_tail).sum(dim=2).long().view(-1, 1)

    @property
    def alone(self) -> torch.Tensor:
        """`(G, N, T)` bool, True where no other completion of the group is present."""
        return _sum_of_group(self.present, own_left_out=True) == 0

    # Alignment

    def in_place(self, values: torch.Tensor) -> torch.Tensor:
        """`(G, N, T)` aligned values -> `(B, T)`, each at its token; 0 where no token was generated."""
        if self._squeezed:
            values = torch.nn.functional.pad(values, (1, 0)).gather(2, self._grouped(self._slots))
        else:
            values = values * self._grouped(self._mask)
        return values.reshape(self._mask.shape)

    def _aligned(self, values: torch.Tensor) -> torch.Tensor:
        """`(B, T)` -> `(G, N, T)`: generated tokens moved to the left, then 0; or unchanged."""
        if self._squeezed:
            values = values.new_zeros(len(values), values.size(1) + 1).scatter_(1, self._slots, values)[:, 1:]
        return self._grouped(values)

    @cached_property
    def _slots(self) -> torch.Tensor:
        """`(B, T)` 1, 2, … for generated tokens; 0, a column that is dropped, for others."""
        return self._mask.cumsum(dim=1) & -self._mask

    @cached_property
    def _ends(self) -> torch.Tensor:
        """`(G, N, 1)` one past the completion's last position."""
        if self._squeezed:
            return self._grouped(self._mask.sum(dim=1, keepdim=True))
        return self._grouped((self._mask * (self._positions + 1)).amax(dim=1, keepdim=True))

    @property
    def _second_end(self) -> torch.Tensor:
        """`(G, 1, 1)` where the second longest completion ends, 0 with N = 1."""
        return _second_largest(self._ends)

    @property
    def _positions(self) -> torch.Tensor:
        return torch.arange(self._mask.size(1), device=self._mask.device)


def _second_largest(values: torch.Tensor) -> torch.Tensor:
    """`(G, N, 1)` -> `(G, 1, 1)` of each group, 0 with N = 1."""
    if values.size(1) == 1:
        return torch.zeros_like(values)
    return values.topk(2, dim=1).values[:, 1:]


def _sum_of_group(x: torch.Tensor, own_left_out: bool) -> torch.Tensor:
    """`(G, N, T)` -> `(G, 1, T)`, or `(G, N, T)` the sum over the others."""
    if not own_left_out:
        return x.sum(dim=1, keepdim=True)
    # Sums before and after, rather than the total minus the own term, which would cancel where the own term dominates.
    before = x.cumsum(dim=1).roll(1, dims=1)
    after = x.flip(1).cumsum(dim=1).flip(1).roll(-1, dims=1)
    before[:, 0] = 0
    after[:, -1] = 0
    return before + after
