"""Identities that hold for every baseline, or tell them apart."""

import itertools
import math

import pytest
import torch

from tests.helpers.oracles import OPTIONS, Rollouts
from trl_otb import blocks
from trl_otb.baselines import (
    BASELINES,
    assign_credit,
    compute_advantages,
    partial_pooling,
    register_baseline,
    reward_to_go,
)


def baselines_of(*inputs, **options):
    credit = assign_credit(*inputs, **options)
    return credit.returns - credit.advantages


@pytest.mark.parametrize("n", [2, 3, 8])
def test_equal_energies_give_the_group_mean(n):
    x = Rollouts(n=n, tools=False)
    full = torch.ones_like(x.mask)
    otb = x.advantages(energy=torch.full_like(x.energy, 0.7), mask=full)
    torch.testing.assert_close(otb, x.advantages(mask=full, baseline="group_mean"), atol=1e-6, rtol=0)


def test_equal_lengths_make_opo_the_group_mean():
    x = Rollouts()
    full = torch.ones_like(x.mask)
    torch.testing.assert_close(x.advantages(mask=full, baseline="opo"), x.advantages(mask=full, baseline="group_mean"))


def test_rloo_is_the_group_mean_left_one_out_and_n_over_n_minus_one_of_it():
    x = Rollouts()
    rloo = x.advantages(baseline="rloo")
    torch.testing.assert_close(rloo, x.advantages(baseline="group_mean", leave_one_out=True))
    torch.testing.assert_close(rloo, 4 / 3 * x.advantages(baseline="group_mean"))


def test_ogb_is_otb_at_the_last_token_of_equally_long_completions():
    x = Rollouts()
    full = torch.ones_like(x.mask)
    torch.testing.assert_close(
        x.advantages(mask=full, baseline="ogb")[:, -1], x.advantages(mask=full)[:, -1], atol=1e-6, rtol=0
    )


def test_shrunk_baseline_is_ogb_where_no_token_stands_out_and_by_hand_else():
    """One completion of one token, one of two; W_T = 1 and 2; κ = 2."""
    rewards, mask = torch.tensor([1.0, 0.0]), torch.tensor([[1, 0], [1, 1]])
    even = torch.tensor([[1.0, 0.0], [1.0, 1.0]])
    shrunk = baselines_of(rewards, even, mask, 2, baseline="otb_shrunk")
    # t = 1: (1 + 2·1)·1 / (3 + (2 + 2·1)) = 3/7; t = 2, where the first has ended: 1·1 / (1 + (2 + 2·1)) = 1/5
    torch.testing.assert_close(shrunk[1], torch.tensor([3 / 7, 1 / 5]))
    same = torch.full((2, 2), 0.5)  # equal lengths and energies: no time is unlike another
    shrunk, ogb = (baselines_of(rewards, same, torch.ones(2, 2), 2, baseline=b) for b in ("otb_shrunk", "ogb"))
    torch.testing.assert_close(shrunk, ogb.expand(2, 2))


def test_shrunk_baseline_minimises_the_penalised_power():
    """By gradient descent on what the module's docstring minimises."""
    x = Rollouts()
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
    shrunk = baselines_of(rewards, energy, mask, 4, baseline="otb_shrunk")
    torch.testing.assert_close(shrunk[0], b.detach(), atol=1e-4, rtol=1e-4)


def test_leave_one_out_relation():
    """A_i = (1 − W_i/ΣW)(R_i − B^{(−i)}): the own return shrinks the advantage (SPEC of the method, on bias)."""
    x = Rollouts(tools=False)
    full = torch.ones_like(x.mask)
    energy = x.energy.cumsum(1)
    share = energy / energy.view(-1, x.n, 12).sum(1).repeat_interleave(x.n, 0)
    torch.testing.assert_close(
        x.advantages(mask=full), (1 - share) * x.advantages(mask=full, leave_one_out=True), atol=1e-5, rtol=0
    )


def test_leave_one_out_baseline_ignores_the_own_return():
    x = Rollouts()
    changed = x.rewards.clone()
    changed[0] += 5
    options = {"leave_one_out": True}
    generated = x.mask[0].bool()
    before, after = (baselines_of(r, x.energy, x.mask, x.n, **options)[0, generated] for r in (x.rewards, changed))
    torch.testing.assert_close(before, after, atol=2e-6, rtol=0)


@pytest.mark.parametrize(
    "options", [o for o in OPTIONS if not (o.get("zero_tail") or ("baseline" not in o and o["leave_one_out"]))]
)
def test_a_shifted_reward_leaves_advantages_unchanged(options):
    x = Rollouts()
    torch.testing.assert_close(x.advantages(x.rewards + 3, **options), x.advantages(**options), atol=3e-6, rtol=0)


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("scale", [1e-6, 1e6])
def test_scaling_all_energies_changes_nothing(options, scale):
    x = Rollouts()
    torch.testing.assert_close(
        x.advantages(energy=x.energy * scale, **options), x.advantages(**options), atol=2e-6, rtol=0
    )


@pytest.mark.parametrize("options", OPTIONS)
def test_more_padding_changes_nothing(options):
    x = Rollouts()
    pad = torch.nn.functional.pad
    padded = x.advantages(energy=pad(x.energy, (0, 5), value=math.nan), mask=pad(x.mask, (0, 5)), **options)
    assert torch.equal(padded, pad(x.advantages(**options), (0, 5)))


@pytest.mark.parametrize("options", OPTIONS)
def test_permuting_a_group_permutes_its_advantages(options):
    x = Rollouts()
    order = torch.tensor([2, 0, 3, 1, 4, 5, 6, 7, 11, 10, 9, 8])
    permuted = x.advantages(x.rewards[order], energy=x.energy[order], mask=x.mask[order], **options)
    torch.testing.assert_close(permuted, x.advantages(**options)[order], atol=1e-6, rtol=0)


@pytest.mark.parametrize("options", OPTIONS)
def test_a_group_sees_the_others_only_where_prompts_are_compared(options):
    x = Rollouts()
    alone = compute_advantages(x.rewards[:4], x.energy[:4], x.mask[:4], 4, **options)
    beside = x.advantages(**options)[:4]
    if BASELINES[options["baseline"]].compares_prompts:
        assert (beside - alone).abs().max() > 1e-3
    else:
        torch.testing.assert_close(beside, alone, atol=1e-6, rtol=0)


@pytest.mark.parametrize("pooled", ["ogb_pooled", "rloo_pooled"])
def test_pooling_with_few_prompts_or_prompts_apart_is_leaving_one_out(pooled):
    x = Rollouts(groups=8)
    x.mask[:, 0] = 1  # nobody is masked: `rloo` counts such completions, as TRL does, and pooling leaves them out
    plain = {"ogb_pooled": {"baseline": "ogb", "leave_one_out": True}, "rloo_pooled": {"baseline": "rloo"}}[pooled]
    two = [values[:8] for values in (x.rewards, x.energy, x.mask)]
    found, expected = compute_advantages(*two, 4, baseline=pooled), compute_advantages(*two, 4, **plain)
    torch.testing.assert_close(found, expected, atol=1e-6, rtol=0)
    apart = x.rewards + 1e4 * torch.arange(8).repeat_interleave(4)
    torch.testing.assert_close(x.advantages(apart, baseline=pooled), x.advantages(apart, **plain), atol=0.01, rtol=0)
    alike = x.advantages(baseline=pooled)
    assert (alike - x.advantages(**plain)).abs().max() > 0.1


@pytest.mark.parametrize(("rate", "length"), [(0.1, 0.291), (0.05, 0.149), (0.02, 0.060), (0.01, 0.030)])
def test_ones_own_weight_forgets_rare_successes(rate, length):
    """E ĝ over the true gradient, of a policy of one choice and groups of 4, by all groups."""
    rewards = torch.tensor(list(itertools.product((0.0, 1.0), repeat=4)))
    probability = (rate**rewards * (1 - rate) ** (1 - rewards)).prod(dim=1)
    energy = torch.where(rewards > 0, 2 * (1 - rate) ** 2, 2 * rate**2)
    for baseline, expected in (("rloo", 1.0), ("group_mean", 0.75), ("otb", length), ("ogb", length)):
        inputs = rewards.flatten(), energy.view(-1, 1), torch.ones(rewards.numel(), 1).long()
        advantages = compute_advantages(*inputs, 4, baseline=baseline).view(-1, 4)
        mean = (probability * (advantages * (rewards - rate)).mean(dim=1)).sum()
        assert (mean / (rate * (1 - rate))).item() == pytest.approx(expected, abs=6e-4), baseline


def test_steps_of_exact_gradient_from_a_success_rate_of_1_to_50_percent():
    """Of the same policy, one logit: time is ∫ dz / E ĝ(z), in units of that without a bias."""
    rewards = torch.tensor(list(itertools.product((0.0, 1.0), repeat=4)))
    ones, start, points = torch.ones(rewards.numel(), 1).long(), math.log(0.01 / 0.99), 200

    def time(baseline):
        found = 0.0
        for z in (start * (i + 0.5) / points for i in range(points)):
            rate = 1 / (1 + math.exp(-z))
            probability = (rate**rewards * (1 - rate) ** (1 - rewards)).prod(dim=1)
            energy = torch.where(rewards > 0, 2 * (1 - rate) ** 2, 2 * rate**2).view(-1, 1)
            advantages = compute_advantages(rewards.flatten(), energy, ones, 4, baseline=baseline).view(-1, 4)
            found -= start / points / (probability * (advantages * (rewards - rate)).mean(dim=1)).sum().item()
        return found

    assert time("otb") / time("rloo") == pytest.approx(16.1, abs=0.1)


def test_a_masked_completion_says_nothing_of_its_prompt():
    """As `mask_truncated_completions` leaves it: without it, and with any reward, baselines are the same."""
    x = Rollouts(groups=8)
    x.mask[:, 0] = 1
    x.mask[5] = 0
    unscorable = x.rewards.clone()
    unscorable[5] = math.nan
    for pooled in ("ogb_pooled", "rloo_pooled", "ogb_pooled_damped"):
        expected = x.advantages(unscorable, baseline=pooled)
        for reward in (-3.0, 0.0, 100.0):
            x.rewards[5] = reward
            torch.testing.assert_close(x.advantages(baseline=pooled), expected, atol=1e-5, rtol=0)


@pytest.mark.usefixtures("registry")
def test_on_top_of_a_baseline_within_groups_rewards_per_token_are_pooled_over_all_blocks(monkeypatch):
    """What a completion is compared with is decided by the baseline below, which is another for rewards per token."""
    register_baseline("plus", on_top_of="rloo")(lambda tokens: tokens.base + 0.25)
    x = Rollouts(groups=8)
    rewards = torch.randn_like(x.energy) * x.mask
    whole = x.advantages(rewards, baseline="plus")
    monkeypatch.setattr(blocks, "LEAST", 2 * 4 * 12)  # two groups at a time, where groups are compared
    torch.testing.assert_close(x.advantages(rewards, baseline="plus"), whole, atol=1e-6, rtol=0)


def test_a_prompt_with_a_single_scorable_completion_has_the_others_mean():
    rewards = torch.tensor([5.0, math.nan, 1.0, 2.0, 3.0, 6.0, 4.0, 4.0])
    ones = torch.ones(8, 1)
    advantages = compute_advantages(rewards, ones, ones, 2, baseline="rloo_pooled").flatten()
    # The other prompts' means are 1.5, 4.5 and 4
    assert advantages[0].item() == pytest.approx(5 - 10 / 3, abs=1e-5) and advantages[1] == 0


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("weighted", [False, True], ids=["on-policy", "ratios"])
def test_blocks_change_nothing(options, weighted, monkeypatch):
    x = Rollouts()
    ratios = torch.rand(12, 1) + 0.5 if weighted else None
    whole = x.advantages(importance_weights=ratios, **options)
    monkeypatch.setattr(blocks, "LEAST", 2 * 4 * 12)  # two groups, then the third
    in_blocks = x.advantages(importance_weights=ratios, **options)
    torch.testing.assert_close(in_blocks, whole, atol=1e-6, rtol=0)


@pytest.mark.parametrize("options", OPTIONS)
def test_a_terminal_token_reward_is_the_scalar_reward(options):
    x = Rollouts()
    last = (x.mask * torch.arange(1, 13)).argmax(1)
    dense = torch.zeros_like(x.energy)
    dense[torch.arange(len(dense)), last] = x.rewards
    assert torch.equal(x.advantages(dense, **options), x.advantages(**options))


def test_reward_to_go_counts_rewards_on_tool_output():
    assert reward_to_go(torch.tensor([[0, 1, 0, 2]])).tolist() == [[3.0, 3.0, 2.0, 2.0]]


def test_alignments_agree_without_tool_output_and_differ_with_it():
    plain, tools = Rollouts(tools=False), Rollouts()
    assert torch.equal(plain.advantages(alignment="position"), plain.advantages())
    assert not torch.allclose(tools.advantages(alignment="position"), tools.advantages())


def test_tool_output_shifts_nothing():
    """Inserting tool output of any length between generated tokens leaves the advantages of those tokens alone."""
    x = Rollouts(groups=1, tools=False)
    gap = torch.zeros(4, 3, dtype=torch.long)
    insert = [torch.cat([a[:, :2], gap.to(a.dtype), a[:, 2:]], 1) for a in (x.energy, x.mask)]
    rows = torch.tensor([True, False, True, False])
    energy = torch.where(rows[:, None], insert[0], torch.nn.functional.pad(x.energy, (0, 3)))
    mask = torch.where(rows[:, None], insert[1], torch.nn.functional.pad(x.mask, (0, 3)))
    shifted = x.advantages(energy=energy, mask=mask)
    assert torch.equal(shifted[mask.bool()], x.advantages()[x.mask.bool()])


def pooling_of(returns):
    """λ, `(P, N)`, and the target, `(P,)`, of the plain mean."""
    left_out = (returns.sum(1, keepdim=True) - returns) / (returns.size(1) - 1)
    share, target = partial_pooling(left_out.unsqueeze(2), torch.ones_like(returns).unsqueeze(2))
    return share.squeeze(2), target.flatten()


def test_the_share_and_the_target_of_pooling_by_hand():
    """Of the plain mean: v = σ² / (N − 1), u = σ² / N; the error of τ² is told with the own b_(−i) too."""
    returns = torch.rand(5, 4, generator=torch.Generator().manual_seed(0)).double()
    share, target = pooling_of(returns)
    for p in range(5):
        others = returns[[q for q in range(5) if q != p]]
        noise, of_means = others.var(dim=1).mean() / 3, others.var(dim=1).mean() / 4
        assert target[p].item() == pytest.approx(others.mean().item())
        between = max(others.mean(dim=1).var() - of_means, 0)
        for i in range(4):
            own = (returns[p].sum() - returns[p, i]) / 3
            with_own = torch.cat([others.mean(dim=1), own.view(1)]).var()
            expected = noise / (noise + between + (between + of_means + 2 * with_own) / 4)
            assert share[p, i].item() == pytest.approx(expected.item())


def test_prompts_alike_are_pooled_and_prompts_apart_are_not():
    noise = torch.randn(400, 4, generator=torch.Generator().manual_seed(0)).double()
    alike, _ = pooling_of(noise)
    assert alike.min() > 0.8
    apart = noise + 100 * torch.randn(400, 1, generator=torch.Generator().manual_seed(1))
    share, _ = pooling_of(apart)
    assert share.max() < 0.01
