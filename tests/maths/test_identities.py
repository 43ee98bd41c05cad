"""Identities that hold for every baseline, or tell them apart; and what pooling gains and loses."""

import itertools
import math
from functools import partial

import pytest
import torch

from tests.helpers.oracles import ALIGNED, ESTIMATORS, RandomBatch
from trl_otb.baselines import BASELINES, advantages, compute_advantages, find_baseline, reward_to_go, subtract


def found(x, baseline):
    return subtract(find_baseline(ESTIMATORS[baseline]).instance(), x)


@pytest.mark.parametrize("baseline", [name for name, entry in ESTIMATORS.items() if find_baseline(entry).unbiased])
def test_unbiased_baseline_ignores_own_return(baseline):
    x = RandomBatch(groups=5)
    before = found(x.completions(), baseline).baselines
    x.rewards[0] += 5
    after = found(x.completions(), baseline).baselines
    columns = (x.mask[0].cumsum(0) * x.mask[0])[x.mask[0] > 0] - 1 if before.size(1) > 1 else [0]
    torch.testing.assert_close(before[0, columns], after[0, columns], atol=2e-6, rtol=0)


@pytest.mark.parametrize(("baseline", "alignment"), [pair for pair in ALIGNED if pair[0] != "none"])
def test_a_shifted_reward_leaves_advantages_unchanged(baseline, alignment):
    x, options = RandomBatch(), {"baseline": baseline, "alignment": alignment}
    plain, shifted = (x.advantages(rewards, **options) for rewards in (x.rewards, x.rewards + 3))
    same = x.mask > 0
    if baseline in ("otb", "otb_loo"):  # on the lone tail B is 0
        same = same & ((plain - x.rewards.unsqueeze(1)).abs() > 1e-6)
    torch.testing.assert_close(shifted[same], plain[same], atol=3e-6, rtol=0)
    assert same.sum() > 20


PAD, ORDER = partial(torch.nn.functional.pad, pad=(0, 5)), torch.tensor([2, 0, 3, 1, 4, 5, 6, 7, 11, 10, 9, 8])
AT, LAST = torch.arange(1, 13), torch.eye(12)
# What is done to rewards, energies and mask, and what becomes of advantages
SAME = {
    "energies times 1e-6": (lambda r, w, m: (r, 1e-6 * w, m), lambda a: a),
    "energies times 1e6": (lambda r, w, m: (r, 1e6 * w, m), lambda a: a),
    "rewards times 1e-20": (lambda r, w, m: (1e-20 * r, w, m), lambda a: 1e-20 * a),
    "rewards times 1e20": (lambda r, w, m: (1e20 * r, w, m), lambda a: 1e20 * a),
    "padding": (lambda r, w, m: (r, PAD(w, value=math.nan), PAD(m)), PAD),
    "permuted groups": (lambda r, w, m: (r[ORDER], w[ORDER], m[ORDER]), lambda a: a[ORDER]),
    "a reward of the last token": (lambda r, w, m: (r.unsqueeze(1) * LAST[(m * AT).argmax(1)], w, m), lambda a: a),
}  # fmt: skip


@pytest.mark.parametrize(("baseline", "alignment"), ALIGNED)
@pytest.mark.parametrize("what", SAME)
def test_advantages_follow_input_transformations(baseline, alignment, what):
    x, (change, of_advantages) = RandomBatch(), SAME[what]
    plain = x.advantages(baseline=baseline, alignment=alignment)
    expected, unit = of_advantages(plain), (of_advantages(plain).abs().max() / plain.abs().max()).item()
    actual = x.advantages(*change(x.rewards, x.energy, x.mask), baseline=baseline, alignment=alignment)
    exact = what in ("padding", "a reward of the last token")
    torch.testing.assert_close(actual, expected, atol=0 if exact else 1e-6 * unit, rtol=0)


@pytest.mark.parametrize("baseline", ESTIMATORS)
def test_only_batch_scope_reads_other_groups(baseline):
    x = RandomBatch()
    alone = compute_advantages(x.rewards[:4], x.energy[:4], x.mask[:4], 4, baseline=ESTIMATORS[baseline])
    beside = x.advantages(baseline=baseline)[:4]
    difference = (beside - alone).abs().max()
    assert difference > 1e-3 if find_baseline(ESTIMATORS[baseline]).scope == "batch" else difference < 1e-6


@pytest.mark.parametrize(("pooled", "plain"), [("ogb_pooled", "ogb_loo"), ("rloo_pooled", "rloo")])
def test_pooling_may_leave_one_out(pooled, plain):
    x = RandomBatch(groups=8)
    x.mask[:, 0] = 1  # nobody is masked: `rloo` counts such completions, as TRL does, and pooling leaves them out
    two = [values[:8] for values in (x.rewards, x.energy, x.mask)]
    of_two, expected = (compute_advantages(*two, 4, baseline=name) for name in (pooled, plain))
    torch.testing.assert_close(of_two, expected, atol=1e-6, rtol=0)
    apart = x.rewards + 1e4 * torch.arange(8).repeat_interleave(4)
    of_apart, expected = (x.advantages(apart, baseline=name) for name in (pooled, plain))
    torch.testing.assert_close(of_apart, expected, atol=0.01, rtol=0)
    assert (x.advantages(baseline=pooled) - x.advantages(baseline=plain)).abs().max() > 0.1


def one_choice(baseline, rate):
    """E ĝ of a policy of one choice and groups of 4, by all groups; the true gradient is rate · (1 − rate)."""
    rewards = torch.tensor(list(itertools.product((0.0, 1.0), repeat=4)))
    probability = (rate**rewards * (1 - rate) ** (1 - rewards)).prod(dim=1)
    energy = torch.where(rewards > 0, 2 * (1 - rate) ** 2, 2 * rate**2).view(-1, 1)
    inputs = rewards.flatten(), energy, torch.ones(rewards.numel(), 1).long()
    of_groups = compute_advantages(*inputs, 4, baseline=baseline).view(-1, 4)
    return (probability * (of_groups * (rewards - rate)).mean(dim=1)).sum().item()


@pytest.mark.parametrize(("rate", "length"), [(0.1, 0.291), (0.05, 0.149), (0.02, 0.060), (0.01, 0.030)])
def test_ones_own_weight_forgets_rare_successes(rate, length):
    for baseline, expected in (("rloo", 1.0), ("group_mean", 0.75), ("otb", length), ("ogb", length)):
        assert one_choice(baseline, rate) / (rate * (1 - rate)) == pytest.approx(expected, abs=6e-4), baseline


@pytest.mark.parametrize("pooled", ["ogb_pooled", "rloo_pooled", "value"])
def test_nothing_to_compare_subtracts_nothing(pooled):
    """One completion of a group has a reward, and there are no other prompts."""
    rewards, ones = torch.tensor([1.0, math.nan, math.nan, math.nan]), torch.ones(4, 1)
    assert compute_advantages(rewards, ones, ones, 4, baseline=pooled).flatten().tolist() == [1.0, 0.0, 0.0, 0.0]


@pytest.mark.parametrize("baseline", ESTIMATORS)
@pytest.mark.parametrize("dense", [False, True], ids=["terminal", "dense"])
@pytest.mark.parametrize("weighted", [False, True], ids=["on-policy", "ratios"])
def test_blocks_change_nothing(baseline, dense, weighted, monkeypatch):
    x = RandomBatch(groups=8)
    rewards = torch.randn_like(x.energy) * x.mask if dense else x.rewards
    ratios = torch.rand(32, 1) + 0.5 if weighted else None
    whole = x.advantages(rewards, baseline=baseline, importance_weights=ratios)
    monkeypatch.setattr(advantages, "BLOCK", 3 * 4 * 12)  # three groups twice, then two
    in_blocks = x.advantages(rewards, baseline=baseline, importance_weights=ratios)
    torch.testing.assert_close(in_blocks, whole, atol=1e-6, rtol=0)


def test_reward_to_go_counts_tool_rewards():
    assert reward_to_go(torch.tensor([[0, 1, 0, 2]])).tolist() == [[3.0, 3.0, 2.0, 2.0]]


@pytest.mark.parametrize("scalable", [name for name, entry in BASELINES.items() if entry.built_in and entry.scalable])
def test_scalable_baselines_cancel_equal_returns(scalable):
    x = RandomBatch(groups=1)
    x.mask[:] = 1
    assert x.advantages(torch.full((4,), 3.0), baseline=scalable).abs().max() < 1e-6


RATES = {  # of success, by kind of prompts; the form of λ was chosen on the first three
    "as a U": torch.distributions.Beta(0.3, 0.3),
    "even": torch.distributions.Beta(1.0, 1.0),
    "alike": torch.distributions.Uniform(0.299, 0.301),
    "two kinds": None,
    "near a half": torch.distributions.Beta(8.0, 8.0),
    "rare": torch.distributions.Uniform(0.049, 0.051),
}


def power_over_rloo(kind: str, n: int, prompts: int, batches: int = 150) -> float:
    """Σ (R − B)² under `rloo_pooled` over that under `rloo`, which is the noise of a gradient of equal energies."""
    g = torch.Generator().manual_seed(0)
    torch.manual_seed(0)
    of_two_kinds = 0.05 + 0.9 * torch.randint(2, (batches, prompts), generator=g) if RATES[kind] is None else None
    rates = RATES[kind].sample((batches, prompts)) if of_two_kinds is None else of_two_kinds
    rewards = (torch.rand(batches, prompts, n, generator=g) < rates.unsqueeze(2)).float()

    def power(rewards, baseline):
        ones = torch.ones(rewards.numel(), 1)
        return compute_advantages(rewards.flatten(), ones, ones, n, baseline=baseline).square().sum().item()

    return sum(power(batch, "rloo_pooled") for batch in rewards) / power(rewards, "rloo")


@pytest.mark.parametrize(
    ("kind", "n", "prompts", "most"),
    [
        ("as a U", 8, 3, 1.03), ("two kinds", 4, 4, 1.05), ("even", 4, 4, 0.97), ("near a half", 4, 8, 0.85),
        ("alike", 4, 16, 0.79), ("rare", 4, 16, 0.81),
    ],
)  # fmt: skip
def test_pooling_gains_much_loses_little(kind, n, prompts, most):
    assert power_over_rloo(kind, n, prompts) < most
