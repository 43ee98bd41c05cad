"""Metrics, with the arithmetic beside the number."""

import math

import pytest
import torch

from trl_otb.baselines import Credit, squeeze
from trl_otb.metrics import STATISTICS, completion_statistics, summarize


def rows(energy):
    """With ratios of 2 in the second completion."""
    loss_energy = None if energy is None else energy * torch.tensor([[1.0], [4.0]])
    x = squeeze(torch.zeros(2), torch.tensor([[1, 1, 0], [1, 1, 1]]), 2, energy=energy, loss_energy=loss_energy)
    advantages = 2 * torch.tensor([[0.5, -1.0, 7.0], [1.0, 2.0, 0.0]])
    baselines = torch.tensor([[1.0, 3.0, 7.0], [2.0, 2.0, 5.0]])
    reference = Credit(torch.tensor([[1.0], [-1.0]]), *[torch.zeros(2, 1)] * 2)
    return completion_statistics(x, Credit(advantages, baselines, baselines), reference, torch.full((2, 1), 2.0))


def test_metrics_by_hand():
    statistics = rows(torch.tensor([[1.0, 0.5, 9.0], [2.0, 1.0, 1.0]]))
    assert dict(zip(STATISTICS, statistics[0].tolist(), strict=True)) == {
        "tokens": 2, "energy": 1.5, "loss_energy": 1.5, "advantage": -0.5, "abs_advantage": 1.5, "baseline": 4.0,
        "power": 0.25 + 0.5, "power_reference": 0.25 * 1.5,
    }  # fmt: skip
    assert summarize(statistics, 2) == pytest.approx(
        {
            "energy/token_mean": 5.5 / 5,
            "energy/completion_mean": (1.5 + 4 * 4) / 2,
            "energy/effective_completions": 17.5**2 / (1.5**2 + 16**2),
            "baseline/mean": (4 + 9) / 5,
            "advantage/abs_mean": 4.5 / 5,
            "lone_tail_ratio": 1 / 5,
            "grad_power": (0.75 + 4 * (2 + 4)) / 2,
            "grad_power_reference": 0.25 * 17.5 / 2,
            "grad_power_ratio": 24.75 / (0.25 * 17.5),
        }
    )


def test_ratio_to_rounding_error_is_nan():
    statistics = rows(torch.ones(2, 3))
    statistics[:, STATISTICS.index("power_reference")] *= 1e-7
    assert math.isnan(summarize(statistics, 2)["grad_power_ratio"])


def test_missing_energies_give_nan():
    known = summarize(rows(torch.ones(2, 3)), 2)
    for name, value in summarize(rows(None), 2).items():
        assert math.isnan(value) if name.startswith(("energy/", "grad_power")) else value == known[name], name


def test_lone_tail_is_longest_completions():
    tokens = torch.zeros(8, len(STATISTICS))
    tokens[:, 0] = torch.tensor([5, 3, 3, 0, 2, 0, 0, 0])
    assert summarize(tokens, 4)["lone_tail_ratio"] == pytest.approx((2 + 2) / 13)
    assert summarize(tokens, 1)["lone_tail_ratio"] == 1


def test_metrics_of_nothing_are_nan():
    assert all(math.isnan(v) for v in summarize(torch.zeros(4, len(STATISTICS)), 2).values())
