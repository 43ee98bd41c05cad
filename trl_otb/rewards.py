"""Rewards for single turns or tokens of a completion, where TRL knows one number for all of it."""

import math
from collections.abc import Callable
from typing import Any

import torch


class TokenRewards(list):
    """
    Rewards of a completion's tokens, for a reward function or an environment's `get_reward` to return in the place of a
    number: one for every id in the completion's `completion_ids`, tool output included.

    A plain list, tuple or one-dimensional array in that place holds rewards of the completion's turns instead: one for
    every turn of the policy, that is, for every stretch of generated tokens between tool output, which in a conversation
    is every assistant message. A turn's reward is earned at its last token.

    Example:

    ```python
    def progress(completions, **kwargs):
        # half a point for each call, in the turn that made it, and the rest at the end
        return [[0.5 if "tool_calls" in m else 1.0 for m in c if m["role"] == "assistant"] for c in completions]


    def brevity(completion_ids, **kwargs):
        return [TokenRewards([-0.01] * len(ids)) for ids in completion_ids]
    ```
    """


class RewardRecorder:
    """
    Stands between GRPOTrainer and its reward functions: keeps what they credit to single turns and tokens, and hands on
    the sum, which GRPOTrainer logs and weighs as it does any reward.
    """

    def __init__(self):
        self._credited: dict[tuple[int, int], list[float]] = {}  # by function and row
        self._names: dict[int, str] = {}

    def __bool__(self):
        return bool(self._credited)

    def wrap(self, index: int, name: str, function: Callable, is_async: bool) -> Callable:
        """Reward function number `index`, returning one number, or None, a completion."""
        self._names[index] = name

        if is_async:

            async def wrapped(*args, **kwargs):
                return self._sums(index, await function(*args, **kwargs))
        else:

            def wrapped(*args, **kwargs):
                return self._sums(index, function(*args, **kwargs))

        return wrapped

    def _sums(self, index: int, rewards) -> list[Any]:
        sums = []
        for row, reward in enumerate(rewards):
            dimensions = getattr(reward, "ndim", 1 if isinstance(reward, list | tuple) else 0)
            if dimensions == 0:
                sums.append(reward)
                continue
            numbers = reward if isinstance(reward, TokenRewards) else list(reward)
            for position, number in enumerate(numbers):
                if dimensions > 1 or number is None or not math.isfinite(number):
                    raise ValueError(
                        f"The reward function '{self._names[index]}' returned {number!r} as reward {position} of "
                        f"completion {row}: rewards of turns or tokens must be finite numbers. A completion that cannot "
                        "be scored gets None as a whole."
                    )
            self._credited[index, row] = numbers
            sums.append(float(sum(numbers)))
        return sums

    def on_tokens(self, mask: torch.Tensor, lengths: list[int], factors: torch.Tensor) -> torch.Tensor:
        """
        What was credited, where it was earned.

        Args:
            mask (`torch.Tensor` of shape `(B, T)`):
                1 on generated tokens. Rows that are 0 throughout are left out.
            lengths (`list[int]` of length B):
                Tokens of each completion, tool output included.
            factors (`torch.Tensor` of shape `(B, F)`):
                What each of the F functions' rewards is multiplied by.

        Returns:
            `torch.Tensor` of shape `(B, T)`, float32.

        Raises:
            ValueError: A completion was credited with a number of rewards that is not that of its turns or tokens.
        """
        result = torch.zeros_like(mask, dtype=torch.float32)
        ends = turn_ends(mask)
        for (index, row), rewards in self._credited.items():
            if not mask[row].any():
                continue
            per_token = isinstance(rewards, TokenRewards)
            at = torch.arange(lengths[row], device=mask.device) if per_token else ends[row].nonzero().squeeze(1)
            if len(rewards) != len(at):
                what = "tokens" if per_token else "turns (stretches of generated tokens)"
                remedy = (
                    "Return one number for each id in `completion_ids`"
                    if per_token
                    else "Return one number for each assistant message, or `trl_otb.TokenRewards` for tokens"
                )
                raise ValueError(
                    f"The reward function '{self._names[index]}' returned {len(rewards)} rewards for completion {row}, "
                    f"which has {len(at)} {what}. {remedy}, or a single number for the whole completion."
                )
            result[row, at] += factors[row, index] * torch.tensor(rewards, dtype=torch.float32, device=mask.device)
        return result


def turn_ends(mask: torch.Tensor) -> torch.Tensor:
    """`(B, T)` -> `(B, T)` bool: the last token of each stretch of 1s, that is, of each turn of the policy."""
    mask = mask.bool()
    return mask & ~torch.nn.functional.pad(mask[:, 1:], (0, 1))
