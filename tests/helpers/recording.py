"""A trainer that keeps what passes through its loss."""

import torch

from trl_otb import OTBGRPOTrainer


class Recording(OTBGRPOTrainer):
    """Keeps every generation batch and micro-batch, and counts the policy's scoring forwards."""

    def __init__(self, *args, **kwargs):
        self.batches, self.micro_batches, self.forwards = [], [], {"grad": 0, "no_grad": 0}
        super().__init__(*args, **kwargs)

    def _generate_and_score_completions(self, inputs):
        self.batches.append(super()._generate_and_score_completions(inputs))
        return self.batches[-1]

    def _get_per_token_logps_and_entropies(self, *args, **kwargs):
        self.forwards["grad" if torch.is_grad_enabled() else "no_grad"] += 1
        return super()._get_per_token_logps_and_entropies(*args, **kwargs)

    def _compute_loss(self, model, inputs):
        self.micro_batches.append(dict(inputs))
        return super()._compute_loss(model, inputs)

    takes_token_advantages = True  # it only adds


def first_rollout(trainer):
    """The first generation batch, in the order of generation."""
    return trainer.batches[0]
