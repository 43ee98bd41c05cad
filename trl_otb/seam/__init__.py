"""
All code that relies on private parts of TRL, and only that.

- `contract`: a list of these parts, checked when a trainer is constructed;
- `head`: Σπ² from TRL's fused LM head;
- `states`: hidden states of the same forwards;
- `recorded_rewards`: the rewards that GRPOTrainer uses;
- `returns`: the returns behind GRPOTrainer's advantages, recomputed;
- `shuffling`: a shuffle that keeps groups together;
- `overrides`: checks of a user's own overrides, before and after ours;
- `gspo_token`: one importance ratio per completion with one advantage per token;
- `tool_loop`: turns that all processes take together;
- `trainer`: [`EnergyGRPOTrainer`], the overrides, with two hooks for a subclass that uses no private part of TRL;
- `sampling`: pools of completions from a trainer, whose state is restored afterwards.
"""

from .contract import check_trl
from .trainer import EnergyGRPOTrainer, config_model_id


__all__ = ["EnergyGRPOTrainer", "check_trl", "config_model_id"]
