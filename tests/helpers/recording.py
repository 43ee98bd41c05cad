"""What a trainer did: one that keeps what passes through its loss, and a stand-in for what samples in vLLM's place."""

import torch
from packaging.version import Version

from tests.helpers.tiny import TRL
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


class Sampler:
    """Stands in for TRL's VLLMGeneration: random completions, with log-probs that are not quite the policy's."""

    def __init__(self, model, **kwargs):
        self.model = model

    def sync_weights(self):
        pass

    @torch.no_grad()
    def generate(self, prompts, images, num_generations, profiler):
        g = torch.Generator().manual_seed(1)
        completions, self.logps = [], []
        for prompt in prompts:
            ids = torch.randint(0, 256, (int(torch.randint(2, 9, (1,), generator=g)),), generator=g)
            logits = self.model(torch.cat([torch.tensor(prompt), ids]).unsqueeze(0)).logits[0, -len(ids) - 1 : -1]
            logps = logits.log_softmax(-1).gather(-1, ids.unsqueeze(-1)).squeeze(-1)
            self.logps.append((logps + 0.4 * torch.randn(len(ids), generator=g)).tolist())
            completions.append(ids.tolist())
        if TRL >= Version("1.11"):  # before, log-probs that vLLM does not give are an error
            self.logps[2][1] = None  # vLLM's NaN, as TRL hands it on
        return None, completions, [[[lp] for lp in row] for row in self.logps], None
