"""The study of bias: its expectations by brute force."""

import pytest
import torch

from recipes.studies import bias, render


@pytest.fixture
def policy():
    return bias.Policy(0)


def test_all_completions_are_listed(policy):
    assert len(policy.ids) == 1 + 3 + 9 + 27 + 81 and len({tuple(ids) for ids in policy.ids.tolist()}) == 121
    assert policy.probabilities(policy.weights).sum().item() == pytest.approx(1, abs=1e-12)


def test_scores_are_the_gradient_of_log_probs(policy):
    weights = policy.weights.clone().requires_grad_()
    row = 57
    logp = (policy.logps(weights)[row].gather(-1, policy.ids[row].unsqueeze(-1)).squeeze(-1) * policy.mask[row]).sum()
    (expected,) = torch.autograd.grad(logp, weights)
    torch.testing.assert_close(policy.scores()[row].sum(dim=0), expected.flatten())


@pytest.mark.parametrize("batch", [1, 2])
def test_divisors_by_listing_batches(policy, batch, monkeypatch):
    """Of one completion dapo's is grpo's; of two, by all pairs."""
    monkeypatch.setattr(bias, "BATCH", batch)
    chances, lengths = policy.probabilities(policy.weights), policy.lengths.double()
    of = bias.divisors(policy, chances, torch.zeros(len(lengths), dtype=torch.bool))
    mean = chances @ lengths
    pairs = 2 * mean / (lengths.unsqueeze(1) + lengths)
    torch.testing.assert_close(of["dapo"], mean / lengths if batch == 1 else pairs @ chances)
    torch.testing.assert_close(of["grpo"], mean / lengths)


def test_what_the_page_says():
    """Under `dr_grpo` no part moves the mean; elsewhere B0 moves it more than what `value` adds to it."""
    published = render.load("bias")["policies"]
    for found in [bias.biases(0), *published]:
        assert max(found["dr_grpo"].values()) < 1e-5
        for loss in ("dapo", "grpo", "sequence_mask"):
            of = found[loss]
            assert of["constant"] > 2 * max(of["prediction"], of["later luck"]) > 0
            assert of["value"] < of["constant"] + of["prediction"] + of["later luck"] + 1e-6
    assert bias.biases(0)["grpo"]["constant"] == pytest.approx(published[0]["grpo"]["constant"], rel=1e-3)
    assert len(published) == 10
