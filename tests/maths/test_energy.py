import pytest
import torch

from trl_otb.energy import token_energy


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
