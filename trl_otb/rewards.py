"""Rewards per turn or token of a completion, where TRL knows one number for all of it."""

import functools
import math
from collections.abc import Callable
from typing import Any

import torch


class TokenRewards(list):
    """
    Rewards of a completion's tokens, for a reward function or an environment's `get_reward` to return in the place of
    a number: one for every id in the completion's `completion_ids`, tool output included.

    A plain list, tuple or one-dimensional array in that place holds rewards of the completion's turns instead: one for
    every turn of the policy, that is, for every stretch of generated tokens between tool output, which in a
    conversation is every assistant message. A turn's reward is earned at its last token.

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
    Stands between GRPOTrainer and its reward functions for one rollout: keeps what they credit to single turns and
    tokens, and hands on the sum, which GRPOTrainer logs and weighs as it does any reward.

    Args:
        lengths (`list[int]` of length B):
            Tokens of each completion, tool output included.

    Attributes:
        rewards_per_func (`torch.Tensor` of shape `(B_all, F)`, *optional*):
            What GRPOTrainer made of the functions' rewards, on all processes.
    """

    def __init__(self, lengths: list[int]):
        self.rewards_per_func: torch.Tensor | None = None
        self._lengths = lengths
        self._credited: dict[tuple[int, int], list[float]] = {}  # by function and row
        self._names: dict[int, str] = {}

    def __bool__(self) -> bool:
        """Whether a single turn or token was credited."""
        return bool(self._credited)

    def wrap(self, index: int, name: str, function: Callable, is_async: bool) -> Callable:
        """
        Reward function number `index`, made to return one number or `None` per completion.

        When called, it raises a `ValueError` naming the function, the row and the value for anything but finite
        numbers, lists of them, and `None`.
        """
        self._names[index] = name

        if is_async:

            @functools.wraps(function)
            async def wrapped(*args: Any, **kwargs: Any) -> list[Any]:
                return self._sums(index, await function(*args, **kwargs))
        else:

            @functools.wraps(function)
            def wrapped(*args: Any, **kwargs: Any) -> list[Any]:
                return self._sums(index, function(*args, **kwargs))

        return wrapped

    def _sums(self, index: int, rewards: Any) -> list[Any]:
        name = self._names[index]
        if rewards is None or isinstance(rewards, str | bytes | dict) or not hasattr(rewards, "__iter__"):
            raise ValueError(
                f"The reward function '{name}' returned {_shown(rewards)}: it must return a list with one reward per "
                "completion."
            )
        sums = []
        for row, reward in enumerate(rewards):
            dimensions = getattr(reward, "ndim", 1 if isinstance(reward, list | tuple) else 0)
            if dimensions == 1 and not isinstance(reward, list | tuple) and len(reward) == 1 and _is_nan(reward[0]):
                reward, dimensions = None, 0  # as GRPOTrainer reads it: not scorable
            if dimensions == 0:
                sums.append(_number(reward, name, row))
                continue
            numbers = reward if isinstance(reward, TokenRewards) else list(reward)
            for position, number in enumerate(numbers):
                if dimensions > 1 or not _is_number(number) or not math.isfinite(number):
                    raise ValueError(
                        f"The reward function '{name}' returned {_shown(number)} as reward {position} of completion "
                        f"{row}: rewards of turns or tokens must be finite numbers. A completion that cannot be "
                        "scored gets None as a whole."
                    )
            self._credited[index, row] = numbers
            sums.append(float(sum(numbers)))
        return sums

    def token_rewards(self, mask: torch.Tensor, returns: torch.Tensor, factors: torch.Tensor) -> torch.Tensor:
        """
        The returns, where they were earned.

        Args:
            mask (`torch.Tensor` of shape `(B, T)`):
                1 on generated tokens. Rows that are 0 throughout are left out.
            returns (`torch.Tensor` of shape `(B,)`):
                Each completion's return. What no turn or token was credited with is earned at the last generated
                token.
            factors (`torch.Tensor` of shape `(B, F)`):
                What each of the F functions' rewards is multiplied by.

        Returns:
            `torch.Tensor` of shape `(B, T)`, float32; each row sums to its return.

        Raises:
            ValueError: A list of rewards is not as long as its completion has turns or tokens. The message names the
                function and the row.
        """
        rewards = torch.zeros_like(mask, dtype=torch.float32)
        ends = turn_ends(mask)
        for (index, row), credited in self._credited.items():
            if not mask[row].any():
                continue
            per_token = isinstance(credited, TokenRewards)
            length = self._lengths[row]
            at = torch.arange(length, device=mask.device) if per_token else ends[row].nonzero().squeeze(1)
            if len(credited) != len(at):
                what = "tokens" if per_token else "turns (stretches of generated tokens)"
                remedy = (
                    "Return one number for each id in `completion_ids`"
                    if per_token
                    else "Return one number for each assistant message, or `trl_otb.TokenRewards` for tokens"
                )
                raise ValueError(
                    f"The reward function '{self._names[index]}' returned {len(credited)} rewards for completion "
                    f"{row}, which has {len(at)} {what}. {remedy}, or a single number for the whole completion."
                )
            numbers = torch.tensor(credited, dtype=torch.float32, device=mask.device)
            rewards[row, at] += factors[row, index] * numbers
        return rewards + last_tokens(mask) * (returns - rewards.sum(dim=1)).unsqueeze(1)


def _number(reward: Any, name: str, row: int) -> Any:
    """
    `reward` itself, if it is a number that can be trained on, or `None` or NaN, which GRPOTrainer takes for
    unscorable.
    """
    if reward is None or (_is_number(reward) and not math.isinf(reward)):
        return reward
    raise ValueError(
        f"The reward function '{name}' returned {_shown(reward)} for completion {row}: a reward must be a finite "
        "number, or None for a completion that cannot be scored."
    )


def _is_number(value: Any) -> bool:
    if isinstance(value, str | bytes):
        return False
    try:
        float(value)
    except (TypeError, ValueError):
        return False
    return True


def _is_nan(value: Any) -> bool:
    return _is_number(value) and math.isnan(value)


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


def last_tokens(mask: torch.Tensor) -> torch.Tensor:
    """`(B, T)` -> `(B, T)` 1 at the last 1 of each row."""
    positions = torch.arange(1, mask.size(1) + 1, device=mask.device)
    return torch.nn.functional.one_hot((mask * positions).argmax(dim=1), mask.size(1))


def turn_ends(mask: torch.Tensor) -> torch.Tensor:
    """`(B, T)` -> `(B, T)` bool: the last token of each stretch of 1s, that is, of each turn of the policy."""
    mask = mask.bool()
    return mask & ~torch.nn.functional.pad(mask[:, 1:], (0, 1))
