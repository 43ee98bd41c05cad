import json
import math
from pathlib import Path

import pytest
import torch

from trl_otb import baselines
from trl_otb.baselines import (
    BASELINES,
    TOKEN_BASELINES,
    compute_advantages,
    compute_baselines,
    lone_tail,
    reward_to_go,
)
from trl_otb.energy import token_energy


CASES = json.loads((Path(__file__).parent / "otb_reference_cases.json").read_text())


class Group:
    """Random ragged rollouts: G groups of N, with tool output inside some completions."""

    def __init__(self, seed=0, groups=3, n=4, length=12, tools=True):
        g = torch.Generator().manual_seed(seed)
        rows = groups * n
        self.n = n
        self.rewards = torch.randn(rows, generator=g)
        self.energy = torch.rand(rows, length, generator=g) * 2
        ends = torch.randint(1, length + 1, (rows, 1), generator=g)
        self.mask = (torch.arange(length) < ends).long()
        if tools:
            self.mask *= (torch.rand(rows, length, generator=g) > 0.3).long()
        self.ratios = torch.rand(rows, length, generator=g) + 0.5

    def advantages(self, rewards=None, **options):
        options.setdefault("energy", self.energy)
        options.setdefault("mask", self.mask)
        return compute_advantages(
            self.rewards if rewards is None else rewards, options.pop("energy"), options.pop("mask"), self.n, **options
        )


OPTIONS = [
    *[{"baseline": b, "leave_one_out": loo} for b in BASELINES if b not in TOKEN_BASELINES for loo in (False, True)],
    *[
        {"baseline": "otb_shrunk", "alignment": a, "leave_one_out": loo}
        for a in ("generated", "position")
        for loo in (False, True)
    ],
    *[
        {"alignment": a, "zero_tail": z, "leave_one_out": loo}
        for a in ("generated", "position")
        for z in (False, True)
        for loo in (False, True)
    ],
]


def double_loop(
    rewards,
    energy,
    mask,
    n,
    *,
    baseline="otb",
    alignment="generated",
    zero_tail=True,
    leave_one_out=False,
    ratios=None,
):
    """The definitions of the docstrings, in Python floats, one row and one token at a time."""
    rows, length = len(mask), len(mask[0])
    dense = isinstance(rewards[0], list)
    out = [[0.0] * length for _ in range(rows)]
    total = [sum(r) if dense else r for r in rewards]
    steps = []  # per row: t -> (position, reward-to-go, realized energy)
    for i in range(rows):
        steps_i, energy_so_far = {}, 0.0
        for p in range(length):
            if not mask[i][p]:
                continue
            energy_so_far += energy[i][p] * (ratios[i][p] ** 2 if ratios else 1.0)
            t = len(steps_i) if alignment == "generated" else p
            steps_i[t] = (p, sum(rewards[i][p:]) if dense else rewards[i], energy_so_far)
        steps.append(steps_i)
    for i in range(rows):
        if math.isnan(total[i]):
            continue
        first = i // n * n
        others = [j for j in range(first, first + n) if not math.isnan(total[j]) and j != i]
        for t, (p, own, own_energy) in steps[i].items():
            if n == 1:
                out[i][p] = own if baseline in TOKEN_BASELINES else total[i]
                continue
            if baseline == "otb_shrunk":
                terms = []
                for j in others if leave_one_out else [*others, i]:
                    last, to_go, energy_before = -1, total[j], 0.0
                    now = 0.0  # the energy of j's t-th token, if it has one
                    for u, (_, g, e) in sorted(steps[j].items()):
                        if u == t:
                            now = e - energy_before
                        if u <= t:
                            to_go = g
                        energy_before, last = e, u
                    if alignment == "position" and dense and t <= last:  # also between j's own tokens
                        to_go = sum(rewards[j][t:])
                    terms.append((energy_before + 2.0 * now, to_go))
            elif baseline != "otb":
                out_of_group = leave_one_out or baseline == "rloo"
                members = others if out_of_group else [*others, i]
                weight = {
                    "opo": lambda j: len(steps[j]),
                    "ogb": lambda j: max((e for _, _, e in steps[j].values()), default=0.0),
                }.get(baseline, lambda j: 1.0)
                terms = [(weight(j), total[j]) for j in members]
                own = total[i]
            else:
                terms = [(steps[j][t][2], steps[j][t][1]) for j in others if t in steps[j]]
                if not leave_one_out:
                    terms.append((own_energy, own))
                if t > max((max(steps[j], default=-1) for j in others), default=-1):
                    terms = [] if zero_tail else [(1.0, own)]
                elif not terms:
                    terms = [] if zero_tail else [(1.0, own)]
            weights = sum(w for w, _ in terms)
            if weights > 0:
                b = sum(w * g for w, g in terms) / weights
            else:
                b = sum(g for _, g in terms) / len(terms) if terms else 0.0
            out[i][p] = own - b
    return torch.tensor(out)


# Identities


@pytest.mark.parametrize("n", [2, 3, 8])
def test_equal_energies_give_the_group_mean(n):
    x = Group(n=n, tools=False)
    full = torch.ones_like(x.mask)
    otb = x.advantages(energy=torch.full_like(x.energy, 0.7), mask=full)
    torch.testing.assert_close(otb, x.advantages(mask=full, baseline="group_mean"), atol=1e-6, rtol=0)


def test_equal_lengths_make_opo_the_group_mean():
    x = Group()
    full = torch.ones_like(x.mask)
    torch.testing.assert_close(x.advantages(mask=full, baseline="opo"), x.advantages(mask=full, baseline="group_mean"))


def test_rloo_is_the_group_mean_left_one_out_and_n_over_n_minus_one_of_it():
    x = Group()
    rloo = x.advantages(baseline="rloo")
    torch.testing.assert_close(rloo, x.advantages(baseline="group_mean", leave_one_out=True))
    torch.testing.assert_close(rloo, 4 / 3 * x.advantages(baseline="group_mean"))


def test_ogb_is_otb_at_the_last_token_of_equally_long_completions():
    x = Group()
    full = torch.ones_like(x.mask)
    torch.testing.assert_close(
        x.advantages(mask=full, baseline="ogb")[:, -1], x.advantages(mask=full)[:, -1], atol=1e-6, rtol=0
    )


def test_shrunk_baseline_is_ogb_where_no_token_stands_out_and_by_hand_else():
    """One completion of one token, one of two; W_T = 1 and 2; κ = 2."""
    rewards, mask = torch.tensor([1.0, 0.0]), torch.tensor([[1, 0], [1, 1]])
    even = torch.tensor([[1.0, 0.0], [1.0, 1.0]])
    shrunk = compute_baselines(rewards, even, mask, 2, baseline="otb_shrunk")
    # t = 1: (1 + 2·1)·1 / (3 + (2 + 2·1)) = 3/7; t = 2, where the first has ended: 1·1 / (1 + (2 + 2·1)) = 1/5
    torch.testing.assert_close(shrunk[1], torch.tensor([3 / 7, 1 / 5]))
    same = torch.full((2, 2), 0.5)  # equal lengths and energies: no time is unlike another
    shrunk, ogb = (compute_baselines(rewards, same, torch.ones(2, 2), 2, baseline=b) for b in ("otb_shrunk", "ogb"))
    torch.testing.assert_close(shrunk, ogb.expand(2, 2))


def test_shrunk_baseline_minimises_the_penalised_power():
    """By gradient descent on what the module's docstring minimises."""
    x = Group()
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
    shrunk = compute_baselines(rewards, energy, mask, 4, baseline="otb_shrunk")
    torch.testing.assert_close(shrunk[0], b.detach(), atol=1e-4, rtol=1e-4)


def test_leave_one_out_relation():
    """A_i = (1 − W_i/ΣW)(R_i − B^{(−i)}): the own return shrinks the advantage (SPEC of the method, on bias)."""
    x = Group(tools=False)
    full = torch.ones_like(x.mask)
    energy = x.energy.cumsum(1)
    share = energy / energy.view(-1, x.n, 12).sum(1).repeat_interleave(x.n, 0)
    torch.testing.assert_close(
        x.advantages(mask=full), (1 - share) * x.advantages(mask=full, leave_one_out=True), atol=1e-5, rtol=0
    )


def test_leave_one_out_baseline_ignores_the_own_return():
    x = Group()
    changed = x.rewards.clone()
    changed[0] += 5
    options = {"leave_one_out": True}
    before = compute_baselines(x.rewards, x.energy, x.mask, x.n, **options)[0]
    torch.testing.assert_close(before, compute_baselines(changed, x.energy, x.mask, x.n, **options)[0])


@pytest.mark.parametrize(
    "options", [o for o in OPTIONS if not (o.get("zero_tail") or ("baseline" not in o and o["leave_one_out"]))]
)
def test_a_shifted_reward_leaves_advantages_unchanged(options):
    x = Group()
    torch.testing.assert_close(x.advantages(x.rewards + 3, **options), x.advantages(**options), atol=3e-6, rtol=0)


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("scale", [1e-6, 1e6])
def test_scaling_all_energies_changes_nothing(options, scale):
    x = Group()
    torch.testing.assert_close(
        x.advantages(energy=x.energy * scale, **options), x.advantages(**options), atol=2e-6, rtol=0
    )


@pytest.mark.parametrize("options", OPTIONS)
def test_more_padding_changes_nothing(options):
    x = Group()
    pad = torch.nn.functional.pad
    padded = x.advantages(energy=pad(x.energy, (0, 5), value=math.nan), mask=pad(x.mask, (0, 5)), **options)
    assert torch.equal(padded, pad(x.advantages(**options), (0, 5)))


@pytest.mark.parametrize("options", OPTIONS)
def test_permuting_a_group_permutes_its_advantages(options):
    x = Group()
    order = torch.tensor([2, 0, 3, 1, 4, 5, 6, 7, 11, 10, 9, 8])
    permuted = x.advantages(x.rewards[order], energy=x.energy[order], mask=x.mask[order], **options)
    torch.testing.assert_close(permuted, x.advantages(**options)[order], atol=1e-6, rtol=0)


@pytest.mark.parametrize("options", OPTIONS)
def test_a_group_does_not_see_the_others(options):
    x = Group()
    alone = compute_advantages(x.rewards[:4], x.energy[:4], x.mask[:4], 4, **options)
    torch.testing.assert_close(x.advantages(**options)[:4], alone, atol=1e-6, rtol=0)


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("weighted", [False, True], ids=["on-policy", "ratios"])
def test_blocks_change_nothing(options, weighted, monkeypatch):
    x = Group()
    ratios = torch.rand(12, 1) + 0.5 if weighted else None
    inputs = (x.rewards, x.energy, x.mask, 4)
    whole = [f(*inputs, importance_weights=ratios, **options) for f in (compute_advantages, compute_baselines)]
    monkeypatch.setattr(baselines, "_BLOCK", 2 * 4 * 12)  # two groups, then the third
    blocks = [f(*inputs, importance_weights=ratios, **options) for f in (compute_advantages, compute_baselines)]
    for one, several in zip(whole, blocks, strict=True):
        torch.testing.assert_close(several, one, atol=1e-6, rtol=0)


@pytest.mark.parametrize("options", OPTIONS)
def test_a_terminal_token_reward_is_the_scalar_reward(options):
    x = Group()
    last = (x.mask * torch.arange(1, 13)).argmax(1)
    dense = torch.zeros_like(x.energy)
    dense[torch.arange(len(dense)), last] = x.rewards
    assert torch.equal(x.advantages(dense, **options), x.advantages(**options))


def test_reward_to_go_counts_rewards_on_tool_output():
    assert reward_to_go(torch.tensor([[0, 1, 0, 2]])).tolist() == [[3.0, 3.0, 2.0, 2.0]]


def test_alignments_agree_without_tool_output_and_differ_with_it():
    plain, tools = Group(tools=False), Group()
    assert torch.equal(plain.advantages(alignment="position"), plain.advantages())
    assert not torch.allclose(tools.advantages(alignment="position"), tools.advantages())


def test_tool_output_shifts_nothing():
    """Inserting tool output of any length between generated tokens leaves the advantages of those tokens alone."""
    x = Group(groups=1, tools=False)
    gap = torch.zeros(4, 3, dtype=torch.long)
    insert = [torch.cat([a[:, :2], gap.to(a.dtype), a[:, 2:]], 1) for a in (x.energy, x.mask)]
    rows = torch.tensor([True, False, True, False])
    energy = torch.where(rows[:, None], insert[0], torch.nn.functional.pad(x.energy, (0, 3)))
    mask = torch.where(rows[:, None], insert[1], torch.nn.functional.pad(x.mask, (0, 3)))
    shifted = x.advantages(energy=energy, mask=mask)
    assert torch.equal(shifted[mask.bool()], x.advantages()[x.mask.bool()])


# Independent oracles


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("dense", [False, True], ids=["terminal", "dense"])
@pytest.mark.parametrize("weighted", [False, True], ids=["on-policy", "ratios"])
@pytest.mark.parametrize("n", [1, 2, 4])
def test_plain_double_loop(options, dense, weighted, n):
    for seed in range(5):
        x = Group(seed, n=n)
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
    assert lone_tail(mask, 2).tolist() == [[False, False, False], [False, False, True]]


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
    actual = compute_advantages(torch.tensor([2.0]), torch.ones(1, 3), mask, 1, baseline=baseline, zero_tail=False)
    assert actual.tolist() == [[2.0, 2.0, 0.0]]


@pytest.mark.parametrize("options", OPTIONS)
def test_unscorable_completions(options):
    """A NaN reward leaves the group as if the completion had never been sampled."""
    x = Group(groups=1)
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
    x = Group()
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
    x = Group()
    actual = compute_advantages(
        x.rewards.bfloat16(), x.energy.half(), x.mask.bool(), x.n, importance_weights=x.ratios.double(), **options
    )
    assert actual.dtype == torch.float32


def test_leave_one_out_keeps_its_precision_where_one_energy_dominates():
    energy = torch.tensor([[1.0], [1e-7], [3e-7]])
    actual = compute_advantages(torch.tensor([1.0, 2.0, 4.0]), energy, torch.ones(3, 1), 3, leave_one_out=True)
    assert actual[0].item() == pytest.approx(1 - (2 * 1 + 4 * 3) / 4, abs=1e-5)  # the others weigh 1 : 3


def test_inputs_are_left_alone():
    x = Group()
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
    x = Group()
    arguments = {"rewards": x.rewards, "energy": x.energy, "mask": x.mask, "num_generations": x.n, **change}
    with pytest.raises(ValueError, match=message):
        compute_advantages(**arguments)
