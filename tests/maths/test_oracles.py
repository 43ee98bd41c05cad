"""Advantages against independent computations, and small cases with the arithmetic beside the number."""

import json
import math
from pathlib import Path

import pytest
import torch

from tests.helpers.oracles import ALIGNED, ESTIMATORS, RandomBatch, double_loop
from trl_otb.baselines import compute_advantages
from trl_otb.energy import token_energy


def assert_double_loop(baseline, alignment, dense, weighted, n):
    for seed in range(5):
        x, g = RandomBatch(seed, n=n), torch.Generator().manual_seed(seed)
        x.mask[-1] = 0  # one completion without a single generated token
        x.energy[x.n :, ::3] = 0  # and stretches of zero energy
        x.energy[-x.n :] = 0  # a whole group of them
        rewards = torch.randn(x.energy.shape, generator=g) * x.mask if dense else x.rewards.clone()
        rewards[n - 1] = math.nan
        ratios = x.ratios if weighted else None
        actual = x.advantages(rewards, baseline=baseline, alignment=alignment, importance_weights=ratios)
        inputs = (values.tolist() for values in (rewards, x.energy, x.mask))
        ratios = x.ratios.tolist() if weighted else None
        expected = double_loop(*inputs, n, baseline=baseline, alignment=alignment, ratios=ratios)
        torch.testing.assert_close(actual, expected, atol=1e-5, rtol=0)


@pytest.mark.parametrize(("baseline", "alignment"), ALIGNED)
@pytest.mark.parametrize("dense", [False, True], ids=["terminal", "dense"])
@pytest.mark.parametrize("weighted", [False, True], ids=["on-policy", "ratios"])
@pytest.mark.parametrize("n", [1, 2, 4])
def test_advantages_match_double_loop(baseline, alignment, dense, weighted, n):
    assert_double_loop(baseline, alignment, dense, weighted, n)


def assert_reference(names):
    """Numbers that verl at 1dda039 printed, to 1e-5; `names` are the baselines to check, `otb` by its options."""
    checked = 0
    for of_case in json.loads((Path(__file__).parent / "otb_reference_cases.json").read_text()):
        case = {key: torch.tensor(value) if isinstance(value, list) else value for key, value in of_case.items()}
        energy = token_energy(case["token_logps"], case["sum_sq_probs"].log())
        for name in names & {*case["expected"]}:
            rewards, options = case["rewards"], {"baseline": name}
            if "zero_tail" in name:
                rewards, zero_tail = case["token_rewards"], name.endswith("True")
                options = {
                    "baseline": ESTIMATORS["otb" if zero_tail else "otb_no_zero_tail"],
                    "alignment": name.partition("_")[0], "importance_weights": case["importance_weights"],
                }  # fmt: skip
            actual = compute_advantages(rewards, energy, case["mask"], case["num_generations"], **options)
            torch.testing.assert_close(actual, torch.tensor(case["expected"][name]), atol=1e-5, rtol=0, msg=name)
            checked += 1
    return checked


def test_advantages_match_reference_implementation():
    of_otb = {f"{alignment}_zero_tail_{on}" for alignment in ("generated", "position") for on in (True, False)}
    assert assert_reference(of_otb) == 22 and assert_reference({"rloo", "group_mean"}) == 8


def test_otb_by_hand():
    rewards = torch.tensor([1.0, 0.0])
    energy = torch.tensor([[1.0, 1.0, 0.0], [3.0, 1.0, 4.0]])
    mask = torch.tensor([[1, 1, 0], [1, 1, 1]])
    # W = [[1, 2], [3, 4, 8]]; B_1 = 1·1/(1+3) = 1/4, B_2 = 2·1/(2+4) = 1/3, and row 2 is alone at t = 3
    expected = torch.tensor([[3 / 4, 2 / 3, 0], [-1 / 4, -1 / 3, 0]])
    torch.testing.assert_close(compute_advantages(rewards, energy, mask, 2), expected)


@pytest.mark.parametrize(("baseline", "alignment"), ALIGNED)
@pytest.mark.parametrize("hole", ["all rows masked", "all rewards NaN", "zero energy", "one token each"])
def test_holes_are_finite(baseline, alignment, hole):
    x = RandomBatch()
    values, value = {
        "all rows masked": (x.mask, 0), "all rewards NaN": (x.rewards, math.nan), "zero energy": (x.energy, 0),
        "one token each": (x.mask[:, 1:], 0),
    }[hole]  # fmt: skip
    values[:] = value
    actual = x.advantages(baseline=baseline, alignment=alignment)
    assert actual.isfinite().all() and (actual[x.mask == 0] == 0).all()


@pytest.mark.parametrize("baseline", ESTIMATORS)
def test_advantages_are_float32_inputs_unchanged(baseline):
    x = RandomBatch()
    inputs = x.rewards.bfloat16(), x.energy.half(), x.mask.bool(), x.ratios.double()
    copies = [values.clone() for values in inputs]
    actual = x.advantages(*inputs[:3], baseline=baseline, importance_weights=inputs[3])
    assert actual.dtype == torch.float32
    assert all(torch.equal(a, b) for a, b in zip(copies, inputs, strict=True))


def test_leave_one_out_survives_dominant_energy():
    energy = torch.tensor([[1.0], [1e-7], [3e-7]])
    actual = compute_advantages(torch.tensor([1.0, 2.0, 4.0]), energy, torch.ones(3, 1), 3, baseline="otb_loo")
    assert actual[0].item() == pytest.approx(1 - (2 * 1 + 4 * 3) / 4, abs=1e-5)  # the others weigh 1 : 3


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"alignment": "turn"}, "'turn'.*'generated', 'position'"),
        ({"num_generations": 5}, "5 and there are 12 rows"),
        ({"rewards": torch.zeros(12, 3)}, r"`rewards` has shape \(12, 3\)"),
        ({"energy": torch.zeros(12, 3)}, r"`energy` has shape \(12, 3\)"),
        ({"importance_weights": torch.ones(12)}, r"`importance_weights` has shape \(12,\)"),
    ],
)
def test_wrong_input_is_named(change, message):
    x = RandomBatch()
    arguments = {"rewards": x.rewards, "energy": x.energy, "mask": x.mask, "num_generations": x.n, **change}
    with pytest.raises(ValueError, match=message):
        compute_advantages(**arguments)
