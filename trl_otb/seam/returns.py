"""Recomputes the quantities behind GRPOTrainer's advantages: the returns, and the scale."""

from dataclasses import dataclass

import torch

from .contract import trl_utils


@dataclass
class Returns:
    """
    The weighted rewards of all processes' completions, in order of process.

    Args:
        returns (`torch.Tensor` of shape `(B_all,)`):
            Weighted sum of the functions' rewards; NaN if no function scored the completion. With
            `multi_objective_aggregation="normalize_then_sum"`, the sum of normalized rewards.
        scale (`torch.Tensor` of shape `(B_all,)`):
            The divisor of advantages under `scale_rewards`; 1 for `"none"`.
        level (`torch.Tensor` of shape `(B_all,)`):
            bool: whether all returns that determine the scale are equal, so that it is 0 up to rounding.
        factors (`torch.Tensor` of shape `(B_all, F)`):
            The factor of each function's rewards.
    """

    returns: torch.Tensor
    scale: torch.Tensor
    level: torch.Tensor
    factors: torch.Tensor


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
    """
    weights = weights.to(rewards_per_func.device)
    factors = weights.expand_as(rewards_per_func)
    unscorable = rewards_per_func.isnan().all(dim=1)
    normalize_first = multi_objective_aggregation == "normalize_then_sum"
    if normalize_first:
        grouped = rewards_per_func.view(-1, num_generations, rewards_per_func.size(1))
        std = _nanstd(grouped, dim=1)
        grouped = (grouped - grouped.nanmean(dim=1, keepdim=True)) / (std.unsqueeze(1) + 1e-4)
        factors = factors / (std + 1e-4).repeat_interleave(num_generations, dim=0)
        rewards_per_func = grouped.view_as(rewards_per_func)
    returns = (rewards_per_func * weights).nansum(dim=1)
    returns[unscorable] = torch.nan
    if normalize_first or scale_rewards == "batch":
        scale = _nanstd(returns, dim=0).expand_as(returns) + 1e-4
        level = _level(returns.view(1, -1)).expand_as(returns)
    elif scale_rewards == "group":
        std = _nanstd(returns.view(-1, num_generations), dim=1)
        scale = std.repeat_interleave(num_generations) + 1e-4
        level = _level(returns.view(-1, num_generations)).repeat_interleave(num_generations)
    else:
        scale, level = torch.ones_like(returns), torch.zeros_like(returns, dtype=torch.bool)
    return Returns(returns, scale, level, factors)


def _level(sets: torch.Tensor) -> torch.Tensor:
    """`(S, n)` -> `(S,)` bool: whether all values other than NaN are equal."""
    return sets.nan_to_num(nan=-torch.inf).amax(dim=1) <= sets.nan_to_num(nan=torch.inf).amin(dim=1)


def _nanstd(x: torch.Tensor, dim: int) -> torch.Tensor:
    """Standard deviation ignoring NaN; 0 for a single value, as in GRPOTrainer."""
    return trl_utils.nanstd(x, dim=dim) if x.size(dim) > 1 else torch.zeros_like(x.select(dim, 0))
