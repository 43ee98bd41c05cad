"""Shuffles a generation batch group by group."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch

from .contract import trl_grpo_trainer


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
