"""The rewards of a generation batch as GRPOTrainer uses them, and checks that they are the batch's."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

import torch
from trl import GRPOTrainer

from ..rewards import RewardRecorder
from ..rollout import Rollout
from .contract import trl_grpo_trainer, trl_utils


_MAKING = ("_generate_and_score_completions", "_calculate_rewards")  # the methods that make a rollout


@dataclass
class Returns:
    """
    The weighted rewards of all processes' completions, in order of process.

    Args:
        returns (`torch.Tensor` of shape `(B_all,)`):
            Weighted sum of the functions' rewards; NaN if no function scored the completion. With
            `multi_objective_aggregation="normalize_then_sum"`, the sum of normalized rewards.
        scale (`torch.Tensor` of shape `(B_all,)`):
            The divisor of advantages under `scale_rewards`; 1 for `"none"`. Infinite where all returns that determine
            it are equal, so that A = 0 without rounding errors.
        factors (`torch.Tensor` of shape `(B_all, F)`):
            The factor of each function's rewards.
        group_mean_advantages (`torch.Tensor` of shape `(B_all,)`):
            The advantages that GRPOTrainer forms of them.
    """

    returns: torch.Tensor
    scale: torch.Tensor
    factors: torch.Tensor
    group_mean_advantages: torch.Tensor


def weigh_rewards(
    rewards_per_func: torch.Tensor,
    weights: torch.Tensor,
    num_generations: int,
    scale_rewards: str,
    multi_objective_aggregation: str,
) -> Returns:
    """
    Args:
        rewards_per_func (`torch.Tensor` of shape `(B_all, F)`):
            The result of `GRPOTrainer._calculate_rewards`.
        weights (`torch.Tensor` of shape `(F,)`):
            `reward_weights`.
        num_generations (`int`):
            N.
        scale_rewards, multi_objective_aggregation (`str`):
            As in [`~trl.GRPOConfig`].

    Raises:
        ValueError: Finite rewards have a sum or standard deviation that is not finite.
    """
    weights = weights.to(rewards_per_func.device)
    factors = weights.expand_as(rewards_per_func)
    unscored = rewards_per_func.isnan().all(dim=1)
    normalize_first = multi_objective_aggregation == "normalize_then_sum"
    if normalize_first:
        grouped = rewards_per_func.view(-1, num_generations, rewards_per_func.size(1))
        std = _nanstd(grouped, dim=1)
        grouped = (grouped - grouped.nanmean(dim=1, keepdim=True)) / (std.unsqueeze(1) + 1e-4)
        factors = (factors / (std + 1e-4).repeat_interleave(num_generations, dim=0)).nan_to_num(nan=0.0)
        rewards_per_func = grouped.view_as(rewards_per_func)
    returns = (rewards_per_func * weights).nansum(dim=1)
    returns[unscored] = torch.nan
    of_groups, sets = returns.view(-1, num_generations), None
    mean = of_groups.nanmean(dim=1).repeat_interleave(num_generations)
    if normalize_first or scale_rewards == "batch":
        sets, scale = returns.view(1, -1), _nanstd(returns, dim=0).expand_as(returns) + 1e-4
        mean = returns.nanmean() if normalize_first else mean
    elif scale_rewards == "group":
        sets, scale = of_groups, _nanstd(of_groups, dim=1).repeat_interleave(num_generations) + 1e-4
    else:
        scale = torch.ones_like(returns)
    _check_finite(returns, scale)
    advantages = ((returns - mean) / scale).nan_to_num(nan=0.0)
    if sets is not None:
        highest, lowest = sets.nan_to_num(nan=-torch.inf).amax(dim=1), sets.nan_to_num(nan=torch.inf).amin(dim=1)
        scale = scale.masked_fill((highest <= lowest).repeat_interleave(sets.size(1)), torch.inf)
    return Returns(returns, scale.nan_to_num(nan=torch.inf), factors, advantages)


def _nanstd(x: torch.Tensor, dim: int) -> torch.Tensor:
    """Standard deviation ignoring NaN; 0 for a single value, as in GRPOTrainer."""
    return trl_utils.nanstd(x, dim=dim) if x.size(dim) > 1 else torch.zeros_like(x.select(dim, 0))


def _check_finite(returns: torch.Tensor, scale: torch.Tensor) -> None:
    broken = returns.isinf() | scale.isinf()
    if broken.any():
        row = int(broken.nonzero()[0])
        what = "weighted sum of rewards" if returns[row].isinf() else "standard deviation of returns"
        raise ValueError(
            f"Completion {row} of all processes has a {what} that is not finite in float32, which holds up to 3.4e+38 "
            "and squares of up to 1.8e+19. Scale the rewards, or `reward_weights`, down."
        )


@contextmanager
def recorded_rewards(trainer: GRPOTrainer) -> Iterator[list[RewardRecorder]]:
    """
    Context in which a recorder of the rewards that `trainer` uses is appended to the yielded list: those that
    `_calculate_rewards` returns, even if a subclass overrides it.

    GRPOTrainer cannot handle rewards per turn or token: only while its own method runs, `reward_funcs` holds functions
    that return their sums.
    """
    recorders: list[RewardRecorder] = []
    calculate, of_trl = trainer._calculate_rewards, GRPOTrainer._calculate_rewards
    # Set on this trainer by a user; usually the method belongs to the class
    before = {key: value for key, value in vars(trainer).items() if key == "_calculate_rewards"}

    def outermost(inputs: Any, prompts: Any, completions: Any, completion_ids: Any, *args: Any, **kwargs: Any) -> Any:
        # Copies, as a function may change the lists that it gets
        ids = [torch.tensor(of_row, dtype=torch.long) for of_row in completion_ids]
        recorders.append(RewardRecorder(ids, trainer.reward_weights.tolist()))
        rewards = calculate(inputs, prompts, completions, completion_ids, *args, **kwargs)
        recorders[-1].rewards_per_func = rewards
        return rewards

    def innermost(self: Any, *args: Any, **kwargs: Any) -> Any:
        if self is not trainer or not recorders:
            return of_trl(self, *args, **kwargs)
        functions, names = self.reward_funcs, self.reward_func_names
        self.reward_funcs = [
            function
            if isinstance(function, torch.nn.Module)
            else recorders[-1].wrap(i, names[i], function, trl_utils.is_async_callable(function))
            for i, function in enumerate(functions)
        ]
        try:
            return of_trl(self, *args, **kwargs)
        finally:
            self.reward_funcs = functions

    trainer._calculate_rewards = outermost
    try:
        with patch.object(GRPOTrainer, "_calculate_rewards", innermost):
            yield recorders
    finally:
        del trainer._calculate_rewards
        vars(trainer).update(before)


def rollout_of(trainer: Any, batch: dict[str, Any], recorders: list[RewardRecorder], num_generations: int) -> Rollout:
    """The rollout of TRL's `batch`, after a check that it holds what was rewarded, with TRL's advantages."""
    if not recorders or recorders[-1].rewards_per_func is None:
        trainer.fail("rewards no longer come from `GRPOTrainer._calculate_rewards`", *_MAKING)
    recorder, options = recorders[-1], (trainer.scale_rewards, trainer.multi_objective_aggregation)
    found = weigh_rewards(recorder.rewards_per_func, trainer.reward_weights, num_generations, *options)
    rollout = Rollout.of_batch(batch, num_generations, trainer.accelerator.process_index, trainer.processing_class)
    own = rollout.own_rows
    _check_rows(trainer, batch, recorder)
    _check_advantages(trainer, batch["advantages"], found, own)
    rollout.rewards, rollout.scale = found.returns[own], found.scale[own].unsqueeze(1)
    along_the_way = torch.tensor([bool(recorder)], device=rollout.rewards.device)
    if trainer.accelerator.gather(along_the_way).any():
        rollout.rewards = recorder.token_rewards(rollout.mask, rollout.rewards, found.factors[own])
    return rollout


def _check_rows(trainer: Any, batch: dict[str, Any], recorder: RewardRecorder) -> None:
    ids, rewarded = batch["completion_ids"].cpu(), recorder.completion_ids
    if len(ids) != len(rewarded):
        trainer.fail(f"{len(rewarded)} completions were rewarded and {len(ids)} are to be trained on", *_MAKING)
    for row, of_row in enumerate(rewarded):
        if not torch.equal(ids[row, : len(of_row)], torch.as_tensor(of_row)):
            trainer.fail(f"completion {row} of a rollout is not the one that was rewarded in its place", *_MAKING)


def _check_advantages(trainer: Any, advantages: torch.Tensor, returns: Returns, own: slice) -> None:
    expected = returns.group_mean_advantages[own]
    difference = (expected - advantages) * returns.scale[own].nan_to_num(posinf=1.0)
    rounding = 1e-5 * (1 + returns.returns.abs().nan_to_num(nan=0.0).max())
    if (difference.abs() > rounding).any():
        row = int(difference.abs().argmax())
        trainer.fail(
            f"how GRPOTrainer forms its advantages: for completion {row} of a rollout it has "
            f"{advantages[row].item():.6g}, and the rewards, weights and scale that trl_otb relies on give "
            f"{expected[row].item():.6g}",
            *_MAKING,
        )


@contextmanager
def groups_kept_together(num_generations: int) -> Iterator[None]:
    """Context in which GRPOTrainer shuffles a generation batch group by group."""
    with patch.object(trl_grpo_trainer, "shuffle_sequence_dict", lambda batch: shuffle_groups(batch, num_generations)):
        yield


def shuffle_groups(batch: dict[str, Any], num_generations: int) -> dict[str, Any]:
    """Permute whole groups of adjacent rows, in the same way in all tensors and lists of the batch."""
    order = torch.randperm(len(batch["completion_ids"]))  # draws as many random numbers as GRPOTrainer
    rows = (order[order % num_generations == 0].unsqueeze(1) + torch.arange(num_generations)).flatten()

    def permute(value: Any) -> Any:
        if value is None or (isinstance(value, torch.Tensor) and value.dim() == 0):
            return value
        return value[rows] if isinstance(value, torch.Tensor) else [value[i] for i in rows.tolist()]

    return {key: permute(value) for key, value in batch.items()}
