"""Rewards per turn or token, which TRL reduces to one number per completion."""

import functools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from typing import Any

import numpy as np
import torch


MOST = torch.finfo(torch.float32).max  # rewards are float32, in TRL too


class TokenRewards:
    """
    Rewards per token, which a reward function or an environment's `get_reward` may return instead of a number: one for
    each id in the completion's `completion_ids`, including tool output.

    A plain list, tuple or one-dimensional array means rewards per turn: one for each of the policy's turns, that is,
    for each stretch of generated tokens between tool output (in a conversation, each assistant message). A turn's
    reward is earned at its last token. An array with one number, such as a reward model's logits, is one reward for
    the completion, as in TRL.

    Args:
        rewards (sequence of numbers, or one-dimensional array):
            A list, or a NumPy or PyTorch array, which is much faster for long completions.

    Raises:
        TypeError: `rewards` has no order, as a number, a set or a dictionary has none, or is text.

    Example:

    ```python
    def progress(completions, **kwargs):
        # half a point for each turn with a call, one for each without
        return [[0.5 if "tool_calls" in m else 1.0 for m in c if m["role"] == "assistant"] for c in completions]


    def brevity(completion_ids, **kwargs):
        return [TokenRewards(torch.full((len(ids),), -0.01)) for ids in completion_ids]
    ```
    """

    def __init__(self, rewards: Sequence[float] | np.ndarray | torch.Tensor):
        if not _in_order(rewards):
            raise TypeError(
                f"TokenRewards got {_shown(rewards)}: give a list or an array of numbers, one for each id in "
                "`completion_ids`."
            )
        self.rewards = rewards if hasattr(rewards, "ndim") else list(rewards)

    def __len__(self) -> int:
        return len(self.rewards)

    def __iter__(self) -> Iterator[Any]:
        return iter(self.rewards)

    def __getitem__(self, position: Any) -> Any:
        return self.rewards[position]

    def __repr__(self) -> str:
        return f"TokenRewards({self.rewards!r})"


class RewardRecorder:
    """
    Wraps GRPOTrainer's reward functions for one rollout: it stores rewards per turn and token, and passes on their
    sum, which GRPOTrainer logs and weights like any reward.

    Args:
        completion_ids (`list` of length B):
            The tokens of each completion, including tool output: a `torch.Tensor` of shape `(T,)`, or a list.
        weights (`list` of length F, *optional*):
            The weight of each function's rewards: those of weight 0 may be infinite, as in GRPOTrainer.

    Attributes:
        rewards_per_func (`torch.Tensor` of shape `(B_all, F)`, *optional*):
            GRPOTrainer's tensor of rewards, from all processes.
    """

    def __init__(self, completion_ids: Sequence[Sequence[int] | torch.Tensor], weights: Sequence[float] | None = None):
        self._weights = weights
        self.rewards_per_func: torch.Tensor | None = None
        self.completion_ids = completion_ids
        self._credited: dict[tuple[int, int], tuple[torch.Tensor, bool]] = {}  # by function and row; of tokens?
        self._names: dict[int, str] = {}

    def __bool__(self) -> bool:
        """Whether any turn or token was rewarded."""
        return bool(self._credited)

    def wrap(self, index: int, name: str, function: Callable, is_async: bool) -> Callable:
        """
        Reward function number `index`, wrapped to return one number or `None` per completion.

        When called, it raises a `ValueError` with the function, the row and the value unless all rewards are finite
        numbers, lists of them, or `None`.
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
        if isinstance(rewards, TokenRewards) or not _in_order(rewards):
            raise ValueError(
                f"The reward function '{name}' returned {_shown(rewards)}: it must return a list with one reward per "
                "completion."
            )
        sums = []
        for row, reward in enumerate(rewards):
            of_tokens = isinstance(reward, TokenRewards)
            several = of_tokens or isinstance(reward, list | tuple)
            if not several and getattr(reward, "ndim", 0) == 1:
                several = len(reward) != 1
                reward = reward if several else next(iter(reward))  # one number, as GRPOTrainer reads it
            if not several and getattr(reward, "ndim", 0) == 0:
                ignored = self._weights is not None and self._weights[index] == 0 and _is_number(reward)
                sums.append(reward if ignored else _number(reward, name, row))
                continue
            numbers = _numbers(reward.rewards if of_tokens else reward)
            total = math.nan if numbers is None else numbers.sum().item()
            if numbers is None or not (abs(total) <= MOST and (numbers.abs() <= MOST).all()):
                raise ValueError(
                    f"The reward function '{name}' returned {_culprit(reward)} of completion {row}: rewards of turns "
                    "or tokens, and their sum, must be finite in float32. Return None for a completion that cannot be "
                    "scored."
                )
            self._credited[index, row] = numbers.float(), of_tokens
            sums.append(total)
        return sums

    def token_rewards(self, mask: torch.Tensor, returns: torch.Tensor, factors: torch.Tensor) -> torch.Tensor:
        """
        The rewards at the tokens where they were earned.

        Args:
            mask (`torch.Tensor` of shape `(B, T)`):
                1 on generated tokens. Rows of zeros are skipped.
            returns (`torch.Tensor` of shape `(B,)`):
                Each completion's return. The part that was not given to a turn or token is earned at the last
                generated token.
            factors (`torch.Tensor` of shape `(B, F)`):
                The factor of each of the F functions' rewards.

        Returns:
            `torch.Tensor` of shape `(B, T)`, float32; each row sums to its return.

        Raises:
            ValueError: The number of rewards is not the number of turns or tokens. The message names the function and
                the row.
        """
        rewards = torch.zeros_like(mask, dtype=torch.float32)
        ends = turn_ends(mask)
        generated = mask.any(dim=1).tolist()
        for (index, row), (credited, per_token) in self._credited.items():
            if not generated[row]:
                continue
            at: Any = slice(len(self.completion_ids[row])) if per_token else ends[row].nonzero().squeeze(1)
            length = len(self.completion_ids[row]) if per_token else len(at)
            if len(credited) != length:
                what = "tokens" if per_token else "turns (stretches of generated tokens)"
                remedy = (
                    "Return one number for each id in `completion_ids`"
                    if per_token
                    else "Return one number for each assistant message, or `trl_otb.TokenRewards` for tokens"
                )
                raise ValueError(
                    f"The reward function '{self._names[index]}' returned {len(credited)} rewards for completion "
                    f"{row}, which has {length} {what}. {remedy}, or a single number for the whole completion."
                )
            rewards[row, at] += factors[row, index] * credited.to(mask.device)
        return rewards + last_tokens(mask) * (returns - rewards.sum(dim=1)).unsqueeze(1)


def _number(reward: Any, name: str, row: int) -> Any:
    """
    `reward`, if it is a finite number, or `None` or NaN, which GRPOTrainer treats as no reward.
    """
    if reward is None or (_is_number(reward) and (math.isnan(reward) or abs(reward) <= MOST)):
        return reward
    raise ValueError(
        f"The reward function '{name}' returned {_shown(reward)} for completion {row}: a reward must be a finite "
        f"number (in float32, up to {MOST:.1e}), or None for a completion that cannot be scored."
    )


def _numbers(values: Any) -> torch.Tensor | None:
    """`(n,)` float64 on the CPU; `None` if some are not numbers, or there is more than one dimension."""
    if not isinstance(values, torch.Tensor):
        try:
            array = np.asarray(values)
        except (TypeError, ValueError, RuntimeError):  # tensors on a GPU, or lists of unequal length
            array = np.empty(0, dtype=object)
        if array.dtype.kind not in "biuf":
            if not all(map(_is_number, values)):
                return None
            array = np.asarray([float(value) for value in values])
        values = torch.from_numpy(array.astype(np.float64))
    return values.detach().double().cpu() if values.dim() == 1 else None


def _culprit(reward: Any) -> str:
    """A description of the first invalid reward."""
    shape = getattr(getattr(reward, "rewards", reward), "shape", (0,))
    if len(shape) != 1:
        return f"an array of shape {tuple(shape)} as rewards"
    for position, number in enumerate(reward):
        if not _is_number(number) or not abs(float(number)) <= MOST:
            return f"{_shown(number)} as reward {position}"
    return f"rewards that sum to {sum(map(float, reward)):g}"


def _in_order(values: Any) -> bool:
    """Whether values come one by one, in an order of their own."""
    several = hasattr(values, "__iter__") and getattr(values, "ndim", 1) > 0
    return several and not isinstance(values, str | bytes | Mapping | Set)


def _is_number(value: Any) -> bool:
    if isinstance(value, str | bytes):
        return False
    try:
        float(value)
    except (TypeError, ValueError, RuntimeError, OverflowError):
        return False
    return True


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
