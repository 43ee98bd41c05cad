"""What samples carry from the group that they were scored in to the loss: stamps of TRL's worker, and its collator."""

import functools
import itertools
import math
import multiprocessing
import signal
from collections.abc import Callable
from typing import Any

import torch
from transformers import TrainerCallback

from ...seam.contract import incompatible_trl, trl_utils
from ...seam.older_trl import is_async_callable, no_asynchronous_training
from ...seam.token_rewards import passing
from .parts import ASYNC_GRPO
from .stopping import check_living, stop_living


if reason := no_asynchronous_training():
    raise ImportError(reason)
try:
    from trl.experimental.async_grpo import AsyncGRPOConfig as AsyncGRPOConfig
    from trl.experimental.async_grpo import AsyncGRPOTrainer as AsyncGRPOTrainer
    from trl.experimental.async_grpo import async_rollout_worker as trl_worker
except ImportError as error:
    raise incompatible_trl(str(error)) from error

MAX_OPEN_GROUPS = 10_000  # groups of which samples are awaited: dropped ones never come
# In the metrics of a sample, which are all that TRL passes on; it logs their means
MEAN, LEAVE_ONE_OUT_MEAN, ROWS = "otb/mean", "otb/others", "otb/rows"


def stamping(loop: Any) -> Any:
    """The loop, whose samples also hold what a baseline needs from their group; TRL's or one derived from it."""
    ASYNC_GRPO.check_attributes("_AsyncRolloutLoop", loop)
    score = loop._score_group

    async def score_and_stamp(group: Any) -> list[Any]:
        ASYNC_GRPO.check_attributes("RolloutGroup", group)
        of_environments = [None if result is None else result[1] for result in group.env_rewards]
        one_number_each("get_reward", of_environments)
        sizes = [len(sequences) for sequences in group.completions_sequences]  # samples of each conversation
        return stamped(await score(group), sizes)

    loop._score_group = score_and_stamp
    loop.reward_funcs = [checking(function) for function in loop.reward_funcs]
    return loop


def stamping_loop(kind: type, **options: Any) -> Any:
    if multiprocessing.parent_process() is not None:
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the child, too, which the trainer stops
    return stamping(kind(**options))


def one_number_each(name: str, rewards: Any) -> list[Any]:
    """The rewards; a `ValueError` if there are some of turns or tokens, which have no place, or infinite ones."""
    rewards = list(rewards)  # an iterator is read once
    for row, reward in enumerate(rewards):
        if isinstance(reward, list | tuple) or getattr(reward, "ndim", 0) > 0:
            raise ValueError(
                f"The reward function {name!r} returned {len(reward)} rewards for completion {row}: "
                "AsyncGRPOTrainer takes one per completion. Return their sum, or train with OTBGRPOTrainer."
            )
        if reward is not None and math.isinf(float(reward)):
            raise ValueError(f"The reward function {name!r} returned {reward} for completion {row}: make it finite.")
    return rewards


def checking(function: Callable) -> Callable:
    name = getattr(function, "__name__", type(function).__name__)
    return passing(function, is_async_callable(function), functools.partial(one_number_each, name))


def stamped(samples: list[Any], sizes: list[int]) -> list[Any]:
    """
    Adds to each sample of a group the mean reward of the group's other conversations, and the number of samples.

    `sizes` are the numbers of adjacent samples of each conversation, 1 for most; the sample's reward is
    `metrics["reward"]`. A `ValueError` if samples are missing, since it is not known which.
    """
    if sum(sizes) != len(samples):
        raise ValueError(
            f"A group of {len(sizes)} conversations has {len(samples)} samples, and {sum(sizes)} were expected. Drop "
            "completions before they are scored, or let their reward be None."
        )
    sizes = [size for size in sizes if size]
    firsts = [sum(sizes[:i]) for i in range(len(sizes))]
    rewards = torch.tensor([samples[first].metrics["reward"] for first in firsts], dtype=torch.float64)
    count, total = rewards.isfinite().sum(), rewards.nansum()
    leave_one_out = (total - rewards) / (count - 1)  # NaN of what has no reward, and of a single one
    of_group = {MEAN: (total / count).item(), ROWS: float(len(samples))}
    means = leave_one_out.repeat_interleave(torch.tensor(sizes).long()).tolist()
    for sample, mean in zip(samples, means, strict=True):
        sample.metrics.update(of_group | {LEAVE_ONE_OUT_MEAN: mean})
    return samples


def stamp_groups(worker: Any) -> None:
    """Let TRL's worker stamp its samples; a user's own calls [`stamped`]."""
    if isinstance(worker, trl_worker.AsyncRolloutWorker):
        ASYNC_GRPO.check_attributes("AsyncRolloutWorker", worker)
        worker._loop_cls = functools.partial(stamping_loop, type(worker)._loop_cls)  # made in the child process
        worker.stop = functools.partial(stop_living, worker)
        worker.check_health = functools.partial(check_living, worker)


def carried_of(sample: dict[str, Any], num_generations: int, scale: str | None) -> tuple[list[float], int]:
    """
    Reward, deviation, mean and leave-one-out mean of a sample; and how many samples its group has. Takes stamps out of
    its metrics, of which TRL logs the means. A `ValueError` if something is missing that B0 or the `scale` is made of;
    it is `None` for TRL's own advantages.
    """
    ASYNC_GRPO.check_attributes("AsyncGRPOTrainer's sample", sample)
    metrics = sample["metrics"] = dict(sample["metrics"])  # a worker may give a sample twice
    if scale == "group" and "reward_std" not in metrics:
        raise ValueError(
            "The rollout worker gave a sample without `reward_std` in its metrics, which `scale_rewards='group'` "
            "divides by. Add it, or set 'none'."
        )
    if scale is not None and MEAN not in metrics:  # an advantage does not say which mean it was formed with
        raise ValueError(
            "The rollout worker gave a sample that does not hold the mean reward of its group's other completions. "
            "Let the worker call `trl_otb.experimental.async_grpo.worker.stamped` on the samples of each group, or "
            "set `baseline='group_mean'` and `scale_rewards='group'`, whose advantages the worker computes."
        )
    numbers = [metrics.get("reward", math.nan), metrics.get("reward_std", math.nan)]
    numbers += [metrics.pop(name, math.nan) for name in (MEAN, LEAVE_ONE_OUT_MEAN)]
    return numbers, int(metrics.pop(ROWS, num_generations))


def carried_with(collate: Callable[[list[Any]], dict[str, Any]], num_generations: int, scale: str | None) -> Callable:
    """
    TRL's collator, which runs on the main process and makes a row for each process, with what samples carry: the bits
    of float64 numbers as integers, since DeepSpeed casts all other tensors of a batch, to bfloat16 for one.
    """
    # By a group's id, which may be anything: its number, as groups arrive, and how many of its samples are to come
    awaited: dict[Any, tuple[int, int]] = {}
    arrived = itertools.count()

    def carrying(examples: list[Any]) -> dict[str, Any]:
        (rows,), carried, groups = examples, [], {}
        for row in rows:
            of_row = []
            for sample in row.samples:
                stamps, size = carried_of(sample, num_generations, scale)
                group = sample["group_id"]
                number, left = awaited.get(group) or (next(arrived), size)
                awaited[group] = number, left - 1
                groups[number] = left - 1
                of_row.append([*stamps, float(number)])
            carried.append(torch.tensor(of_row, dtype=torch.float64))
        for group in [group for group, (_, left) in awaited.items() if left <= 0]:
            del awaited[group]
        while len(awaited) > MAX_OPEN_GROUPS:
            del awaited[next(iter(awaited))]
        # Not expanded: a broadcast sends memory as it lies
        of_groups = torch.tensor([*groups.items()]).long().repeat(len(rows), 1, 1)
        of_samples = trl_utils.pad(carried).view(torch.int64)
        return collate(examples) | {"otb_samples": of_samples, "otb_groups": of_groups}

    return carrying


class AfterStep(TrainerCallback):
    def __init__(self, function: Callable[[], None]) -> None:
        self.function = function

    def on_step_end(self, *args: Any, **kwargs: Any) -> None:
        self.function()
