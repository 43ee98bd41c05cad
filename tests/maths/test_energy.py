"""Energies of tokens; and metrics, with the arithmetic beside the number."""

import math

import pytest
import torch

from trl_otb.baselines import Advantages, squeeze
from trl_otb.energy import token_energy
from trl_otb.run.metrics import STATISTICS, completion_statistics, summarize


def from_logits(logits, targets):
    """(log π(y), log Σπ²) of float64 logits, by the plain definitions."""
    log_probs = logits.double().log_softmax(-1)
    return log_probs.gather(-1, targets.unsqueeze(-1)).squeeze(-1), (2 * log_probs).logsumexp(-1)


@pytest.fixture
def logits():
    scale = torch.tensor([0.1, 1.0, 4.0, 20.0]).view(-1, 1, 1)  # from nearly uniform to nearly certain
    return torch.randn(4, 50, 37, generator=torch.Generator().manual_seed(0)) * scale


@pytest.fixture
def targets(logits):
    return torch.randint(logits.size(-1), logits.shape[:-1], generator=torch.Generator().manual_seed(1))


def test_energy_is_squared_score_norm(logits, targets):
    """‖e_y − π‖², and by autograd."""
    one_hot = torch.nn.functional.one_hot(targets, logits.size(-1))
    expected = (one_hot - logits.double().softmax(-1)).square().sum(-1)
    energy = token_energy(*from_logits(logits, targets)).double()
    torch.testing.assert_close(energy, expected, atol=5e-7, rtol=1e-6)
    logits = logits.double().requires_grad_()
    (score,) = torch.autograd.grad(from_logits(logits, targets)[0].sum(), logits)
    torch.testing.assert_close(energy, score.square().sum(-1), atol=5e-7, rtol=1e-6)


def test_range(logits, targets):
    energy = token_energy(*from_logits(logits, targets))
    assert energy.min() >= 0 and 1.9 < energy[3].max() <= 2  # the near-certain policy makes confident mistakes
    # certain and right: π(y) = 1, Σπ² = 1; certain and wrong: π(y) = 0, Σπ² = 1; uniform over 4: 1 − 2/4 + 1/4
    logps = torch.tensor([[0.0, -torch.inf, -torch.tensor(4.0).log()]])
    log_sum_sq_probs = torch.tensor([[0.0, 0.0, -torch.tensor(4.0).log()]])
    torch.testing.assert_close(token_energy(logps, log_sum_sq_probs), torch.tensor([[0.0, 2.0, 0.75]]))


@pytest.mark.parametrize("p", [1 - 1e-3, 1 - 1e-6, 1 - 1e-9])
def test_energy_is_never_negative(p):
    p = torch.tensor([[p]], dtype=torch.float64)
    energy = token_energy(p.log(), (p**2 + (1 - p) ** 2).log())  # two tokens: w = 2 (1 − p)²
    assert 0 <= energy.item()
    assert energy.item() == pytest.approx(2 * (1 - p.item()) ** 2, abs=2e-7)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_float32_whatever_the_inputs(dtype):
    x = torch.full((1, 1), -1.0, dtype=dtype)
    assert token_energy(x, x).dtype == torch.float32


def test_shapes_in_signatures_are_checked():
    with pytest.raises(TypeError, match="token_energy"):
        token_energy(torch.zeros(2, 3), torch.zeros(3, 2))


# Metrics


def rows(energy):
    """With ratios of 2 in the second completion."""
    loss_energy = None if energy is None else energy * torch.tensor([[1.0], [4.0]])
    x = squeeze(torch.zeros(2), torch.tensor([[1, 1, 0], [1, 1, 1]]), 2, energy=energy, loss_energy=loss_energy)
    advantages = 2 * torch.tensor([[0.5, -1.0, 7.0], [1.0, 2.0, 0.0]])
    baselines = torch.tensor([[1.0, 3.0, 7.0], [2.0, 2.0, 5.0]])
    reference = Advantages(torch.tensor([[1.0], [-1.0]]), *[torch.zeros(2, 1)] * 2)
    return completion_statistics(x, Advantages(advantages, baselines, baselines), reference, torch.full((2, 1), 2.0))


def test_metrics_by_hand():
    statistics = rows(torch.tensor([[1.0, 0.5, 9.0], [2.0, 1.0, 1.0]]))
    assert dict(zip(STATISTICS, statistics[0].tolist(), strict=True)) == {
        "tokens": 2, "energy": 1.5, "loss_energy": 1.5, "advantage": -0.5, "abs_advantage": 1.5, "baseline": 4.0,
        "power": 0.25 + 0.5, "power_reference": 0.25 * 1.5,
    }  # fmt: skip
    expected = {
        "energy/token_mean": 5.5 / 5, "energy/completion_mean": (1.5 + 4 * 4) / 2,
        "energy/effective_completions": 17.5**2 / (1.5**2 + 16**2), "baseline/mean": (4 + 9) / 5,
        "advantage/abs_mean": 4.5 / 5, "lone_tail_ratio": 1 / 5, "grad_power": (0.75 + 4 * (2 + 4)) / 2,
        "grad_power_reference": 0.25 * 17.5 / 2, "grad_power_ratio": 24.75 / (0.25 * 17.5),
    }  # fmt: skip
    assert summarize(statistics, 2) == pytest.approx(expected)


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
    alone = summarize(tokens, 1)
    assert math.isnan(alone["lone_tail_ratio"]) and math.isnan(alone["energy/effective_completions"])


def test_metrics_of_nothing_are_nan():
    assert all(math.isnan(v) for v in summarize(torch.zeros(4, len(STATISTICS)), 2).values())
