"""A trainer that keeps what passes through its loss."""

import torch

from trl_otb import OTBGRPOTrainer


class Recording(OTBGRPOTrainer):
    """Keeps every micro-batch as the loss left it, and counts the policy's scoring forwards."""

    def __init__(self, *args, **kwargs):
        self.micro_batches, self.forwards = [], {"grad": 0, "no_grad": 0}
        super().__init__(*args, **kwargs)

    def _get_per_token_logps_and_entropies(self, *args, **kwargs):
        self.forwards["grad" if torch.is_grad_enabled() else "no_grad"] += 1
        return super()._get_per_token_logps_and_entropies(*args, **kwargs)

    def _compute_loss(self, model, inputs):
        loss = super()._compute_loss(model, inputs)
        self.micro_batches.append(dict(inputs))
        return loss


def first_rollout(trainer):
    """Rows of the first rollout, in the order in which they were generated, as the loss saw them."""
    rows, batches = [], trainer.micro_batches
    while sum(len(b["rows_of_rollout"]) for b in rows) < 8:
        rows.append(batches[len(rows)])
    order = torch.cat([b["rows_of_rollout"] for b in rows]).argsort()
    keys = ("prompt_ids", "prompt_mask", "completion_ids", "completion_mask", "tool_mask", "advantages")
    return {k: torch.cat([b[k] for b in rows])[order] for k in keys if k in rows[0]}
