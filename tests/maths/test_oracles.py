"""Advantages against independent computations, and small cases with the arithmetic beside the number."""

import json
import math
from pathlib import Path

import pytest
import torch

from tests.helpers.oracles import OPTIONS, Rollouts, double_loop
from trl_otb.baselines import BASELINES, assign_credit, compute_advantages
from trl_otb.energy import token_energy


CASES = json.loads((Path(__file__).parent / "otb_reference_cases.json").read_text())


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("dense", [False, True], ids=["terminal", "dense"])
@pytest.mark.parametrize("weighted", [False, True], ids=["on-policy", "ratios"])
@pytest.mark.parametrize("n", [1, 2, 4])
def test_plain_double_loop(options, dense, weighted, n):
    for seed in range(5):
        x = Rollouts(seed, n=n)
        x.mask[-1] = 0  # one completion without a single generated token
        x.energy[x.n :, ::3] = 0  # and stretches of zero energy
        x.energy[-x.n :] = 0  # a whole group of them
        rewards = (
            torch.randn(x.energy.shape, generator=torch.Generator().manual_seed(seed)) * x.mask if dense else x.rewards
        )
        rewards = rewards.clone()
        rewards[n - 1] = math.nan
        ratios = x.ratios if weighted else None
        actual = x.advantages(rewards, importance_weights=ratios, **options)
        expected = double_loop(
            rewards.tolist(),
            x.energy.tolist(),
            x.mask.tolist(),
            n,
            ratios=ratios.tolist() if weighted else None,
            **options,
        )
        torch.testing.assert_close(actual, expected, atol=1e-5, rtol=0)


@pytest.mark.parametrize("index", range(len(CASES)))
def test_reference_implementation(index):
    """Numbers that verl at 1dda039 printed, to 1e-5."""
    case = {key: torch.tensor(value) if isinstance(value, list) else value for key, value in CASES[index].items()}
    energy = token_energy(case["token_logps"], case["sum_sq_probs"].log())
    rewards = case["token_rewards"]
    for name, expected in case["expected"].items():
        if name in BASELINES:
            options = {"baseline": name}
            rewards = case["rewards"]
        else:
            alignment, _, _, zero_tail = name.split("_")
            options = {
                "alignment": alignment,
                "zero_tail": zero_tail == "True",
                "importance_weights": case["importance_weights"],
            }
        actual = compute_advantages(rewards, energy, case["mask"], case["num_generations"], **options)
        torch.testing.assert_close(actual, torch.tensor(expected), atol=1e-5, rtol=0, msg=name)


# Small cases with the arithmetic beside the number


def test_by_hand():
    rewards = torch.tensor([1.0, 0.0])
    energy = torch.tensor([[1.0, 1.0, 0.0], [3.0, 1.0, 4.0]])
    mask = torch.tensor([[1, 1, 0], [1, 1, 1]])
    # W = [[1, 2], [3, 4, 8]]; B_1 = 1·1/(1+3) = 1/4, B_2 = 2·1/(2+4) = 1/3, and row 2 is alone at t = 3
    expected = torch.tensor([[3 / 4, 2 / 3, 0], [-1 / 4, -1 / 3, 0]])
    torch.testing.assert_close(compute_advantages(rewards, energy, mask, 2), expected)
    assert assign_credit(rewards, energy, mask, 2).lone_tail_tokens.tolist() == [[0], [1]]


def test_lone_tail_by_hand():
    rewards = torch.tensor([0.0, 1.0])
    energy = torch.ones(2, 3)
    mask = torch.tensor([[1, 1, 0], [1, 1, 1]])
    half = [0.5, 0.5]
    for zero_tail, tail in ((True, 1.0), (False, 0.0)):
        actual = compute_advantages(rewards, energy, mask, 2, zero_tail=zero_tail)
        assert actual.tolist() == [[-0.5, -0.5, 0.0], [*half, tail]]


@pytest.mark.parametrize("baseline", BASELINES)
def test_groups_of_one_have_baseline_zero(baseline):
    mask = torch.tensor([[1, 1, 0]])
    actual = compute_advantages(torch.tensor([2.0]), torch.ones(1, 3), mask, 1, baseline=baseline)
    assert actual.tolist() == [[2.0, 2.0, 0.0]]


@pytest.mark.parametrize("options", OPTIONS)
def test_unscorable_completions(options):
    """A NaN reward leaves the group as if the completion had never been sampled."""
    x = Rollouts(groups=1)
    rewards = x.rewards.clone()
    rewards[1] = math.nan
    actual = x.advantages(rewards, **options)
    keep = torch.tensor([0, 2, 3])
    without = compute_advantages(x.rewards[keep], x.energy[keep], x.mask[keep], 3, **options)
    torch.testing.assert_close(actual[keep], without, atol=1e-6, rtol=0)
    assert torch.equal(actual[1], torch.zeros(12))


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("hole", ["all rows masked", "all rewards NaN", "zero energy", "one token each"])
def test_holes_are_finite(options, hole):
    x = Rollouts()
    if hole == "all rows masked":
        x.mask[:] = 0
    elif hole == "all rewards NaN":
        x.rewards[:] = math.nan
    elif hole == "zero energy":
        x.energy[:] = 0
    else:
        x.mask[:, 1:] = 0
    actual = x.advantages(**options)
    assert actual.isfinite().all() and (actual[x.mask == 0] == 0).all()


@pytest.mark.parametrize("options", OPTIONS)
def test_float32_whatever_the_inputs(options):
    x = Rollouts()
    actual = compute_advantages(
        x.rewards.bfloat16(), x.energy.half(), x.mask.bool(), x.n, importance_weights=x.ratios.double(), **options
    )
    assert actual.dtype == torch.float32


def test_leave_one_out_keeps_its_precision_where_one_energy_dominates():
    energy = torch.tensor([[1.0], [1e-7], [3e-7]])
    actual = compute_advantages(torch.tensor([1.0, 2.0, 4.0]), energy, torch.ones(3, 1), 3, leave_one_out=True)
    assert actual[0].item() == pytest.approx(1 - (2 * 1 + 4 * 3) / 4, abs=1e-5)  # the others weigh 1 : 3


def test_inputs_are_left_alone():
    x = Rollouts()
    copies = x.rewards.clone(), x.energy.clone(), x.mask.clone(), x.ratios.clone()
    x.advantages(importance_weights=x.ratios)
    assert all(torch.equal(a, b) for a, b in zip(copies, (x.rewards, x.energy, x.mask, x.ratios), strict=True))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"baseline": "mean"}, "'mean'.*'otb', 'otb_shrunk', 'ogb', 'opo', 'rloo', 'group_mean'"),
        ({"alignment": "turn"}, "'turn'.*'generated', 'position'"),
        ({"num_generations": 5}, "5 and there are 12 rows"),
        ({"num_generations": 0}, "0 and there are 12 rows"),
        ({"rewards": torch.zeros(12, 3)}, r"`rewards` has shape \(12, 3\)"),
        ({"energy": torch.zeros(12, 3)}, r"`energy` has shape \(12, 3\)"),
        ({"importance_weights": torch.ones(12)}, r"`importance_weights` has shape \(12,\)"),
    ],
)
def test_wrong_input_is_named(change, message):
    x = Rollouts()
    arguments = {"rewards": x.rewards, "energy": x.energy, "mask": x.mask, "num_generations": x.n, **change}
    with pytest.raises(ValueError, match=message):
        compute_advantages(**arguments)
