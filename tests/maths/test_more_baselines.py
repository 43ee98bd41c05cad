"""The baselines of recipes/more_baselines.py: as the others are tested, and what is theirs alone."""

import sys
from importlib import import_module

import pytest
import torch

from tests.helpers.oracles import RandomBatch
from tests.maths.test_derivation import Enumeration, gradient_in_batches, size_and_cosine
from tests.maths.test_oracles import assert_double_loop, assert_reference
from trl_otb.baselines import BASELINES, compute_advantages, find_baseline


NAMES = ["opo", "otb_shrunk", "ogb_pooled_damped"]


@pytest.fixture(autouse=True)
def registered(registry):
    sys.modules.pop("recipes.more_baselines", None)
    return import_module("recipes.more_baselines")


def baselines_of(rewards, energy, mask, n, baseline):
    return rewards.unsqueeze(1) - compute_advantages(rewards, energy, mask, n, baseline=baseline)


def test_importing_registers_them_with_their_flags():
    flags = [(False, "group", True, 0), (True, "group", True, 1), (False, "batch", False, 1)]
    for name, of_name in zip(NAMES, flags, strict=True):
        entry = find_baseline(f"recipes.more_baselines:{name}")
        assert entry is BASELINES[name] and entry.summary.startswith("Per ") and not entry.unbiased
        assert (entry.per_token, entry.scope, entry.scalable, len(entry.needs)) == of_name


@pytest.mark.parametrize("baseline", NAMES)
@pytest.mark.parametrize("dense", [False, True], ids=["terminal", "dense"])
@pytest.mark.parametrize("n", [1, 2, 4])
def test_advantages_match_double_loop(baseline, dense, n):
    for alignment in ("generated", "position") if baseline == "otb_shrunk" else ("generated",):
        for weighted in (False, True):
            assert_double_loop(baseline, alignment, dense, weighted, n)


def test_opo_is_the_reference_implementations():
    assert assert_reference({"opo"}) == 4


def test_shrunk_minimises_the_penalised_power():
    """By gradient descent on what its docstring minimises."""
    x = RandomBatch()
    rewards, energy, mask = x.rewards[:4], (x.energy * x.mask)[:4], torch.ones(4, 12)
    total = energy.sum(1)
    group = (total * rewards).sum() / total.sum()
    b = torch.zeros(12, requires_grad=True)
    optimizer = torch.optim.LBFGS([b], max_iter=200, tolerance_grad=1e-9)

    def power():
        optimizer.zero_grad()
        value = (energy * (rewards.unsqueeze(1) - b).square()).sum() + (total.sum() / 2 * (b - group).square()).sum()
        value.backward()
        return value

    optimizer.step(power)
    shrunk = baselines_of(rewards, energy, mask, 4, "otb_shrunk")
    torch.testing.assert_close(shrunk[0], b.detach(), atol=1e-4, rtol=1e-4)


BIAS = {"opo": ((0.497, 0.999), (0.330, 1.000)), "otb_shrunk": ((0.591, 0.997), (0.408, 0.998))}


@pytest.mark.parametrize("n", [2, 3])
@pytest.mark.parametrize("baseline", BIAS)
def test_how_large_the_bias_is(baseline, n):
    assert size_and_cosine(Enumeration(), n, baseline) == pytest.approx(BIAS[baseline][n - 2], abs=1e-3)


def test_damping_turns_the_gradient_a_little():
    policy = Enumeration()
    found = gradient_in_batches(policy, 2, "ogb_pooled_damped")
    assert torch.nn.functional.cosine_similarity(found, policy.gradient, dim=0).item() == pytest.approx(0.992, abs=1e-3)
