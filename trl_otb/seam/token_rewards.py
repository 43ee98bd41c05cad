"""Rewards per turn or token, which TRL reduces to one number per completion."""

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch

from ..progress import short


MAX_REWARD = torch.finfo(torch.float32).max  # rewards are float32, in TRL too


class TokenRewards(list):
    """
    Rewards per token, which a reward function or an environment's `get_reward` may return instead of a number: one for
    each id in the completion's `completion_ids`, including tool output.

    A plain list, tuple or one-dimensional array means rewards per turn: one for each of the policy's turns, that is,
    for each stretch of generated tokens between tool output (in a conversation, each assistant message). A turn's
    reward is earned at its last token. An array with one number, such as a reward model's logits, is one reward for
    the completion, as in TRL. A reward must not depend on what follows its turn or token, unless
    `credit_whole_return` is set in the config: else the gradient is biased.

    ```python
    def brevity(completion_ids, **kwargs):
        return [TokenRewards([-0.01] * len(ids)) for ids in completion_ids]
    ```
    """

    def __init__(self, rewards: Sequence[float] | torch.Tensor):
        super().__init__(rewards.tolist() if hasattr(rewards, "tolist") else rewards)

    def __repr__(self) -> str:
        return f"TokenRewards({super().__repr__()})"


def passing(function: Callable, is_async: bool, on: Callable[[Any], Any]) -> Callable:
    """A reward function, wrapped to return what `on` makes of its result."""
    if not is_async:
        return functools.wraps(function)(lambda *args, **kwargs: on(function(*args, **kwargs)))

    @functools.wraps(function)
    async def wrapped(*args: Any, **kwargs: Any) -> Any:
        return on(await function(*args, **kwargs))

    return wrapped


class RewardRecorder:
    """
    Wraps the reward functions of one rollout: it stores rewards per turn and token, and passes on their sum, which
    GRPOTrainer logs and weights like any reward. `completion_ids` are the tokens of each completion, including tool
    output, and `weights` those of the F functions: of weight 0, rewards may be infinite.
    """

    def __init__(self, completion_ids: Sequence[torch.Tensor], weights: Sequence[float]):
        self.rewards_per_func: torch.Tensor | None = None  # (B_all, F), GRPOTrainer's, from all processes
        self.completion_ids, self._weights = completion_ids, weights
        self._rewards: dict[tuple[int, int], tuple[torch.Tensor, bool]] = {}  # by function and row; of tokens?
        self._names: dict[int, str] = {}

    def __bool__(self) -> bool:
        """Whether any turn or token was rewarded."""
        return bool(self._rewards)

    def wrap(self, index: int, name: str, function: Callable, is_async: bool) -> Callable:
        """
        Reward function number `index`, wrapped to return one number or `None` per completion; a `ValueError` with the
        function, the row and the value unless all rewards are finite numbers, lists of them, or `None`.
        """
        self._names[index] = name
        return passing(function, is_async, functools.partial(self._sums, index))

    def _sums(self, index: int, rewards: Any) -> list[Any]:
        name = self._names[index]
        if isinstance(rewards, TokenRewards) or not hasattr(rewards, "__iter__") or getattr(rewards, "ndim", 1) == 0:
            raise ValueError(
                f"The reward function '{name}' returned {short(rewards)}: it must return a list with one reward per "
                "completion."
            )
        return [self._sum(index, row, reward) for row, reward in enumerate(rewards)]

    def _sum(self, index: int, row: int, reward: Any) -> Any:
        name, several = self._names[index], isinstance(reward, list | tuple)
        if not several and getattr(reward, "ndim", 0) == 1:
            several = len(reward) != 1
            reward = reward if several else next(iter(reward))  # one number, as GRPOTrainer reads it
        if not several and getattr(reward, "ndim", 0) == 0:
            number = _float(reward)
            if reward is None or (number is not None and (self._weights[index] == 0 or not abs(number) > MAX_REWARD)):
                return reward
            raise ValueError(
                f"The reward function '{name}' returned {short(reward)} for completion {row}: a reward must be a "
                f"finite number (in float32, up to {MAX_REWARD:.1e}), or None for a completion that cannot be scored."
            )
        numbers = [_float(number) for number in reward]
        culprit = next((i for i, x in enumerate(numbers) if x is None or not abs(x) <= MAX_REWARD), None)
        total = math.fsum(x for x in numbers if x is not None) if culprit is None else math.nan
        if not abs(total) <= MAX_REWARD:
            what = f"rewards that sum to {total:g}"
            what = what if culprit is None else f"{short(reward[culprit])} as reward {culprit}"
            raise ValueError(
                f"The reward function '{name}' returned {what} of completion {row}: rewards of turns or tokens, and "
                "their sum, must be finite in float32. Return None for a completion that cannot be scored."
            )
        self._rewards[index, row] = torch.tensor(numbers, dtype=torch.float32), isinstance(reward, TokenRewards)
        return total

    def token_rewards(self, mask: torch.Tensor, returns: torch.Tensor, factors: torch.Tensor) -> torch.Tensor:
        """
        `(B, T)` float32: rewards at the tokens where they were earned; each row sums to its return, `(B,)`. What was
        not given to a turn or token is earned at the last generated token. `factors`, `(B, F)`, are those of the
        functions' rewards. A `ValueError` if the number of rewards is not that of turns or tokens.
        """
        rewards = torch.zeros_like(mask, dtype=torch.float32)
        ends, generated = turn_ends(mask), mask.any(dim=1).tolist()
        for (index, row), (earned, per_token) in self._rewards.items():
            if not generated[row]:
                continue
            at: Any = slice(len(self.completion_ids[row])) if per_token else ends[row].nonzero().squeeze(1)
            length = len(self.completion_ids[row]) if per_token else len(at)
            if len(earned) != length:
                what = "tokens" if per_token else "turns (stretches of generated tokens)"
                remedy = "id in `completion_ids`" if per_token else "assistant message, or `trl_otb.TokenRewards`"
                raise ValueError(
                    f"The reward function '{self._names[index]}' returned {len(earned)} rewards for completion "
                    f"{row}, which has {length} {what}. Return one number for each {remedy}, or one for the whole "
                    "completion."
                )
            rewards[row, at] += factors[row, index] * earned.to(mask.device)
        positions = torch.arange(1, mask.size(1) + 1, device=mask.device)
        last = torch.nn.functional.one_hot((mask * positions).argmax(dim=1), mask.size(1))
        return rewards + last * (returns - rewards.sum(dim=1)).unsqueeze(1)


def turn_ends(mask: torch.Tensor) -> torch.Tensor:
    """`(B, T)` -> `(B, T)` bool: the last token of each stretch of 1s, that is, of each turn of the policy."""
    mask = mask.bool()
    return mask & ~torch.nn.functional.pad(mask[:, 1:], (0, 1))


def _float(value: Any) -> float | None:
    try:
        return None if isinstance(value, str | bytes) else float(value)
    except (TypeError, ValueError, RuntimeError, OverflowError):
        return None
