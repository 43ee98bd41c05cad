"""Pooling: gains where prompts are alike without losses where they are not."""

import pytest
import torch

from trl_otb.baselines import compute_advantages


RATES = {  # of success, by kind of prompts; the form of λ was chosen on the first three
    "as a U": torch.distributions.Beta(0.3, 0.3),
    "even": torch.distributions.Beta(1.0, 1.0),
    "alike": torch.distributions.Uniform(0.299, 0.301),
    "two kinds": None,
    "near a half": torch.distributions.Beta(8.0, 8.0),
    "rare": torch.distributions.Uniform(0.049, 0.051),
}


def power_over_rloo(kind: str, n: int, prompts: int, batches: int = 800) -> float:
    """Σ (R − B)² under `rloo_pooled` over that under `rloo`, which is the noise of a gradient of equal energies."""
    g = torch.Generator().manual_seed(0)
    torch.manual_seed(0)
    of_two_kinds = 0.05 + 0.9 * torch.randint(2, (batches, prompts), generator=g) if RATES[kind] is None else None
    rates = RATES[kind].sample((batches, prompts)) if of_two_kinds is None else of_two_kinds
    rewards = (torch.rand(batches, prompts, n, generator=g) < rates.unsqueeze(2)).float()
    ones = torch.ones(prompts * n, 1)

    def power(baseline):
        of_batches = (compute_advantages(batch.flatten(), ones, ones, n, baseline=baseline) for batch in rewards)
        return sum(advantages.square().sum().item() for advantages in of_batches)

    return power("rloo_pooled") / power("rloo")


@pytest.mark.parametrize(
    ("kind", "n", "prompts", "most"),
    [
        ("as a U", 4, 4, 1.03), ("as a U", 4, 16, 0.99), ("as a U", 8, 3, 1.03), ("two kinds", 4, 4, 1.05),
        ("two kinds", 8, 4, 1.02), ("even", 4, 4, 0.97), ("even", 8, 8, 1.0), ("near a half", 4, 8, 0.85),
        ("alike", 4, 4, 0.88), ("alike", 4, 16, 0.79), ("rare", 4, 16, 0.81),
    ],
)  # fmt: skip
def test_pooling_gains_much_loses_little(kind, n, prompts, most):
    assert power_over_rloo(kind, n, prompts) < most
