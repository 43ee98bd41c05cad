"""Completions token by token, each by itself. Pure torch, with the notation of `trl_otb.energy`."""

from collections.abc import Callable, Iterator
from functools import cached_property

import torch

from ..blocks import blocks_of_rows
from .groups import completion_returns, declared, read, reward_to_go, scorable_rows


FINER = 32  # factor by which blocks are smaller for baselines with tens of features per token


class Tokens:
    """
    Completions token by token, each by itself: the argument of a baseline on top of another.

    Args:
        rewards (`torch.Tensor` of shape `(B,)` or `(B, T)`):
            One return per completion, or one reward per token. NaN marks a completion without a reward.
        base (`torch.Tensor` of shape `(B, T)` or `(B, 1)`):
            The baseline below.
        energy (`torch.Tensor` of shape `(B, T)`, *optional*):
            w_t; if omitted, reading it is an error. Values where `mask` is 0 are ignored and may be NaN.
        mask (`torch.Tensor` of shape `(B, T)`):
            1 on generated tokens.
        prompt (`torch.Tensor` of shape `(B,)`):
            The index of each completion's prompt in the generation batch of all processes.
        beside (`dict[str, torch.Tensor]`, *optional*):
            What else the baseline reads, by name, as in [`~trl_otb.baselines.Groups`].
        gather (`Callable`, *optional*):
            Concatenates the tensors of all processes along the first axis; all of them must call it.
        weights (`torch.Tensor` of shape `(B, T)`, *optional*):
            ρ_t² w_t with importance ratios ρ; by default `energy`.
    """

    def __init__(
        self,
        rewards: torch.Tensor,
        base: torch.Tensor,
        energy: torch.Tensor | None,
        mask: torch.Tensor,
        prompt: torch.Tensor,
        beside: dict[str, torch.Tensor] | None = None,
        gather: Callable[[torch.Tensor], torch.Tensor] = lambda values: values,
        weights: torch.Tensor | None = None,
    ):
        self.base = base
        self.prompt = prompt
        self.gather = gather
        self._rewards, self._energy, self._mask, self._beside = rewards, energy, mask, beside or {}
        self._weights = energy if weights is None else weights

    # Formed when they are first asked for, so that `blocks` takes no memory

    @cached_property
    def returns(self) -> torch.Tensor:
        """`(B, T)` G_t, the reward-to-go, or `(B, 1)` one return per completion; 0 without a reward."""
        per_completion = self._rewards.dim() == 1
        returns = completion_returns(self._rewards).unsqueeze(1) if per_completion else reward_to_go(self._rewards)
        return returns.masked_fill(~self._scorable, 0.0)

    @cached_property
    def mask(self) -> torch.Tensor:
        """`(B, T)` 1.0 on generated tokens of completions with a reward, else 0.0."""
        return self._mask.float() * self._scorable

    @cached_property
    def energy(self) -> torch.Tensor:
        """`(B, T)` w_t; 0 where `mask` is 0. Without importance ratios, so that it says nothing of later tokens."""
        return self._generated(self._energy)

    @cached_property
    def weights(self) -> torch.Tensor:
        """
        `(B, T)` ρ_t² w_t, each token's squared score in the loss; 0 where `mask` is 0. A ratio per completion depends
        on all of its tokens: use these to learn from a batch, never to predict.
        """
        return self.energy if self._weights is self._energy else self._generated(self._weights)

    def _generated(self, values: torch.Tensor | None) -> torch.Tensor:
        return declared(values).float().masked_fill(self.mask == 0, 0.0)

    @property
    def _scorable(self) -> torch.Tensor:
        return scorable_rows(self._rewards).unsqueeze(1)

    def __len__(self) -> int:
        return len(self._mask)

    @property
    def logps(self) -> torch.Tensor:
        """`(B, T)` log π(y_t)."""
        return read(self._beside, "logps")

    @property
    def states(self) -> torch.Tensor:
        """
        `(B, T, k)` the policy's hidden state at the position that predicts the token, from a layer at two thirds of
        the depth (or the decoder's output if it has no list of layers), randomly projected to k numbers.
        """
        return read(self._beside, "states")

    @property
    def completion_ids(self) -> torch.Tensor:
        """`(B, T)` the tokens."""
        return read(self._beside, "completion_ids")

    @property
    def turn(self) -> torch.Tensor:
        """`(B, T)` the policy's turn of a generated token, from 0."""
        return read(self._beside, "turn")

    @property
    def prompt_key(self) -> torch.Tensor:
        """`(B,)` int64, the same for the same prompt in every step and run."""
        return read(self._beside, "prompt_key")

    def rows(self, rows: slice) -> "Tokens":
        """Some of the completions."""
        return Tokens(
            self._rewards[rows],
            self.base[rows],
            None if self._energy is None else self._energy[rows],
            self._mask[rows],
            self.prompt[rows],
            {name: values[rows] for name, values in self._beside.items()},
            self.gather,
            None if self._weights is None or self._weights is self._energy else self._weights[rows],
        )

    def held(self) -> dict[str, torch.Tensor]:
        """The tensors that a baseline reads and must not modify, by name."""
        found = {"base": self.base, "prompt": self.prompt, "returns": self.returns, "mask": self.mask}
        if self._energy is not None:
            found["energy"] = self.energy
        if self._weights is not self._energy:
            found["weights"] = self.weights
        return found | self._beside

    def blocks(self) -> Iterator["Tokens"]:
        """All completions, in blocks small enough for tens of features per token."""
        return (self.rows(rows) for rows in blocks_of_rows(self._mask, finer=FINER))
