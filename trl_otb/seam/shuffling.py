"""The shuffle of a generation batch, group by group."""

from typing import Any

import torch


def shuffle_groups(batch: dict[str, Any], num_generations: int) -> dict[str, Any]:
    """Permute whole groups of adjacent rows, in every tensor and list of the batch alike."""
    rows = torch.arange(len(batch["completion_ids"])).view(-1, num_generations)
    rows = rows[torch.randperm(len(rows))].flatten()

    def permute(value: Any) -> Any:
        if value is None or (isinstance(value, torch.Tensor) and value.dim() == 0):
            return value
        return value[rows] if isinstance(value, torch.Tensor) else [value[i] for i in rows.tolist()]

    return {key: permute(value) for key, value in batch.items()}
