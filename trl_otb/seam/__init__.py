"""
Everything that relies on private parts of TRL, and nothing else.

- `contract`: which parts, checked when a trainer is constructed;
- `head`: Σπ² from TRL's fused LM head;
- `states`: hidden states of the forwards that the head scores;
- `recorded_rewards`: the rewards that GRPOTrainer uses;
- `returns`: what GRPOTrainer forms its advantages from, restated;
- `shuffling`: groups that stay together;
- `overrides`: a user's own overrides, before and after ours;
- `gspo_token`: one importance ratio per completion beside one advantage per token;
- `tool_loop`: turns that all processes take together;
- `trainer`: [`EnergyGRPOTrainer`], the overrides, with two openings for a subclass that sees no private part of TRL;
- `sampling`: pools of completions from a trainer that is left as it was.
"""

from .contract import check_trl
from .trainer import EnergyGRPOTrainer, config_model_id


__all__ = ["EnergyGRPOTrainer", "check_trl", "config_model_id"]
