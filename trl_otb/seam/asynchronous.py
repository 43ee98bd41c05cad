"""What is relied on of TRL's AsyncGRPOTrainer: its samples' stamps, its collator, and the loop of its worker."""

from collections.abc import Callable
from typing import Any

import torch
from trl.experimental.async_grpo import async_grpo_trainer as trl_trainer
from trl.experimental.async_grpo import async_rollout_worker as trl_worker
from trl.experimental.async_grpo import packing as trl_packing

from .contract import incompatible_trl, moved, trl_utils


# As in `trl_otb.seam.contract`
ASYNC_PARTS: dict[Any, dict[str, str]] = {
    trl_trainer.AsyncGRPOTrainer: {
        "compute_loss": "self model inputs return_outputs num_items_in_batch",
        "get_train_dataloader": "self",
    },
    trl_trainer.DataCollatorForRollout: {"torch_call": "self examples"},
    trl_trainer.StepIntervalCallback: {"on_step_end": "self _args state"},
    trl_worker._AsyncRolloutLoop: {"_score_group": "self group"},
    trl_worker.AsyncRolloutWorker: {"start": "self"},
    trl_packing.TreeRow: {"pack": "self"},
}

MOST_OPEN = 10_000  # groups of which samples are awaited: dropped ones never come
MEAN, OTHERS, ROWS = "otb/mean", "otb/others", "otb/rows"  # in the metrics of a sample, whose means TRL logs


class StampedLoop(trl_worker._AsyncRolloutLoop):
    """TRL's loop, which also says of each sample what a baseline must know of its group."""

    async def _score_group(self, group: Any) -> list[Any]:
        functions = self.reward_funcs
        self.reward_funcs = [one_number_each(function) for function in functions]
        try:
            samples = await super()._score_group(group)
        finally:
            self.reward_funcs = functions
        sizes = [len(sequences) for sequences in group.completions_sequences]  # samples of each conversation
        return stamped(samples, sizes)


def one_number_each(function: Callable) -> Callable:
    """A reward function whose rewards are checked: there is no place for those of turns or tokens."""

    def checked(rewards: Any) -> Any:
        for row, reward in enumerate(rewards):
            if isinstance(reward, list | tuple):
                name = getattr(function, "__name__", type(function).__name__)
                raise ValueError(
                    f"The reward function {name!r} returned {len(reward)} rewards for completion {row}: AsyncGRPOTrainer "
                    "has one per completion. Return their sum, or train with OTBGRPOTrainer."
                )
        return rewards

    if trl_utils.is_async_callable(function):

        async def of_async(**columns: Any) -> Any:
            return checked(await function(**columns))

        return of_async
    return lambda **columns: checked(function(**columns))


def stamped(samples: list[Any], sizes: list[int]) -> list[Any]:
    """Samples of one group, conversation by conversation, with the mean of the others' rewards and their number."""
    firsts = [sum(sizes[:i]) for i, size in enumerate(sizes) if size]
    rewards = torch.tensor([samples[first].metrics["reward"] for first in firsts], dtype=torch.float64)
    count, total = rewards.isfinite().sum(), rewards.nansum()
    others = torch.where(rewards.isfinite(), (total - rewards) / (count - 1), torch.nan)  # NaN of a single one
    conversation = 0
    for row, sample in enumerate(samples):
        conversation += row in firsts[1:]
        mean = total / count if count else torch.tensor(torch.nan)
        found = {MEAN: mean.item(), OTHERS: others[conversation].item(), ROWS: float(len(samples))}
        sample.metrics.update(found if count > 1 else found | {OTHERS: torch.nan})
    return samples


def stamp_groups(worker: Any) -> None:
    """Let TRL's own worker stamp its samples; of another one TRL's stamps tell as much, but for `None` and forks."""
    if isinstance(worker, trl_worker.AsyncRolloutWorker) and worker._loop_cls is trl_worker._AsyncRolloutLoop:
        worker._loop_cls = StampedLoop


def carried_of(sample: dict[str, Any], num_generations: int) -> tuple[list[float], int]:
    """
    Reward, deviation, mean, the others' mean and the group of a sample; and how many samples its group has. Stamps are
    taken from its metrics, of which TRL logs the means.
    """
    told, n = sample["metrics"], num_generations
    reward, std = told["reward"], told["reward_std"]
    mean = told.pop(MEAN, reward - sample["advantage"] * (std + 1e-8))
    others = told.pop(OTHERS, (n * mean - reward) / (n - 1) if n > 1 else torch.nan)
    return [reward, std, mean, others, float(sample["group_id"])], int(told.pop(ROWS, n))


def carried_with(collate: Callable[[list[Any]], dict[str, Any]], num_generations: int) -> Callable:
    """TRL's collator, which runs on the main process and makes a row for each process, with what samples carry."""
    to_come: dict[int, int] = {}

    def carrying(examples: list[Any]) -> dict[str, Any]:
        (rows,), carried, groups = examples, [], {}
        for row in rows:
            found = [carried_of(sample, num_generations) for sample in row.samples]
            carried.append(torch.tensor([numbers for numbers, _ in found], dtype=torch.float64))
            for sample, (_, size) in zip(row.samples, found, strict=True):
                group = sample["group_id"]
                groups[group] = to_come[group] = to_come.get(group, size) - 1
        for group, left in groups.items():
            if left <= 0:
                del to_come[group]
        while len(to_come) > MOST_OPEN:
            del to_come[next(iter(to_come))]
        of_groups = torch.tensor([*groups.items()]).long().expand(len(rows), -1, -1)
        return collate(examples) | {"otb_samples": trl_utils.pad(carried), "otb_groups": of_groups}

    return carrying


def check_async_trl() -> None:
    """Raise an `ImportError` if a part of TRL's asynchronous trainer has moved."""
    found = moved(ASYNC_PARTS)
    if found:
        raise incompatible_trl("; ".join(found))
