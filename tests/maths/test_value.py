"""The baseline of a state: what it looks at, what it learns, and when it stands back."""

import logging
import math
from dataclasses import replace

import pytest
import torch

from tests.helpers.oracles import Rollouts
from tests.maths.test_derivation import Enumeration, V
from trl_otb.baselines import BASELINES, Completions, Value, compute_advantages, squeeze
from trl_otb.baselines import value as module


PROMPTS, N, T, K = 16, 4, 12, 3


class Batch:
    """Completions of groups of N, with the B0 of all of them."""

    def __init__(self, rewards, mask, base=None, **more):
        self.x: Completions = squeeze(rewards, mask, N, **more)
        self.base = Value()(self.x) if base is None else base

    def baseline(self, value):
        return value.adjust(self.x, self.base).expand_as(self.x.mask)

    def teach(self, value):
        return value.update(self.x, self.base, lambda values: values)

    def power(self, baseline):
        """Of a baseline, or of what `value` says."""
        baseline = self.baseline(baseline) if isinstance(baseline, Value) else baseline
        return (self.x.loss_energy * (self.x.returns - baseline).square()).sum().item()


class Task:
    """Completions whose early tokens may be mistakes; the state knows, the return is 1 without any."""

    def __init__(self, seed=0, prompts=PROMPTS, told=True):
        g = torch.Generator().manual_seed(seed)
        rows = prompts * N
        lengths = torch.randint(T // 2, T + 1, (rows, 1), generator=g)
        self.mask = (torch.arange(T) < lengths).long()
        mistakes = (torch.rand(rows, T, generator=g) < 0.2 * (torch.arange(T) < 3)).float() * self.mask
        self.energy = (0.2 + 0.2 * mistakes) * (0.5 + torch.rand(rows, T, generator=g))
        self.logps = -self.energy * (0.5 + torch.rand(rows, T, generator=g))
        before = torch.nn.functional.pad(mistakes.cumsum(1), (1, 0))[:, :-1]
        self.states = torch.randn(rows, T, K, generator=g)
        self.states[..., 0] = (before > 0).float()  # whether all is lost, before the token
        self.rewards = (mistakes.sum(1) == 0).float()
        if not told:  # each prompt has a rate of its own, which nothing tells
            rates = torch.rand(prompts, 1, generator=g).round().clamp(0.05, 0.95).expand(prompts, N)
            self.rewards = (torch.rand(prompts, N, generator=g) < rates).float().flatten()

    def batch(self, rewards=None, **changes):
        own = {name: getattr(self, name) for name in ("mask", "energy", "logps", "states")}
        return Batch(self.rewards if rewards is None else rewards, **own | changes)

    def advantages(self, value, rewards):
        more = {"logps": self.logps, "states": self.states}
        return compute_advantages(rewards, self.energy, self.mask, N, baseline=value, **more)


def learnt(seeds=range(8), value=None):
    value = Value() if value is None else value
    for seed in seeds:
        Task(seed).batch().teach(value)
    return value


def of_batches(batches, value):
    """The power that `value` leaves of batches, relative to B0."""
    return sum(batch.power(value) for batch in batches) / sum(batch.power(batch.base) for batch in batches)


def test_it_predicts_what_the_state_tells():
    value, batch = learnt(), Task(100).batch()
    left = of_batches([batch], value)
    assert value.weight > 0.9 and left < 0.6
    assert batch.teach(value) == pytest.approx({"explained": 1 - left, "weight": learnt().weight, "restarted": 0})


def test_batch_does_not_affect_itself():
    value, first = Value(), Task().batch()
    assert torch.equal(first.baseline(value), first.base.expand_as(first.x.mask))
    assert first.teach(value) == {"explained": 0.0, "weight": 0.0, "restarted": 0.0}
    batch = Task(1).batch()
    other = Task(1).batch(1 - Task(1).rewards, base=batch.base)  # with B0 held fixed
    assert torch.equal(other.baseline(value), batch.baseline(value))


@pytest.mark.parametrize("t", range(T))
def test_future_tokens_do_not_matter(t):
    value, task = learnt(), Task(100)
    batch = task.batch()
    energy, logps, states, mask = (v.clone() for v in (task.energy, task.logps, task.states, task.mask))
    energy[:, t:], logps[:, t:] = 1.7, -9.0
    states[:, t + 1 :] = 5.0  # the state that predicts token t is of the tokens before it
    expected, present = batch.baseline(value), task.mask[:, t] > 0
    found = task.batch(energy=energy, logps=logps, states=states, base=batch.base).baseline(value)
    assert t == T - 1 or (found[:, t:] - expected[:, t:]).abs().max() > 1e-3
    mask[:, t + 1 :] = 0
    found = task.batch(mask=mask, energy=energy, logps=logps, states=states, base=batch.base).baseline(value)
    torch.testing.assert_close(found[present, t], expected[present, t], atol=1e-6, rtol=0)


class OnRloo(Value):
    """On a B0 that compares no prompts; 0 for N = 1."""

    def __call__(self, x):
        return BASELINES["rloo"].estimator(x)


@pytest.mark.parametrize("sampler", [None, "other"])
@pytest.mark.parametrize("n", [1, 2, 3])
def test_fixed_theta_is_unbiased(n, sampler):
    """
    By all groups of a policy whose completions are all listed. Another sampler's completions are weighted with a ratio
    of their own, that is with one that depends on all of their tokens.
    """
    policy = Enumeration()
    sampled = policy.probability if sampler is None else policy.probability.flip(0).sqrt()
    sampled = sampled / sampled.sum()
    ratio = (policy.probability / sampled).unsqueeze(1)
    value = OnRloo()
    value.theta, value.weight = torch.randn(9 + 2 * V, generator=torch.Generator().manual_seed(0)), 0.7
    value._returns_seen = (-10.0, 10.0)
    rule = replace(BASELINES["value"], estimator=value)
    # A state that predicts token t: the tokens before it
    tokens = torch.tensor([[*history, 0, 0][:3] for history, _, _ in policy.completions])
    before = torch.nn.functional.one_hot(tokens, V).float() * policy.mask.unsqueeze(2)
    states = torch.nn.functional.pad(before.cumsum(1), (0, 0, 1, 0))[:, :-1]
    groups, inputs = policy.groups(n)
    rows = groups.flatten()
    more = {"logps": -inputs[1], "states": states[rows]}
    weights = None if sampler is None else ratio[rows].float()
    advantages = compute_advantages(*inputs, n, baseline=rule, importance_weights=weights, **more)
    policy.probability = sampled
    expected = policy.expectation(groups, ratio[rows] * advantages)
    assert (expected - Enumeration().gradient).abs().max() < 1e-6
    assert (advantages - compute_advantages(*inputs, n, baseline="rloo" if n > 1 else "none")).abs().max() > 0.1


def test_theta_is_earlier_batches_least_squares():
    """Feature by feature and token by token, with the ridge that was chosen as rows of a plain least squares."""
    value, batches = learnt(range(3)), [Task(seed).batch() for seed in range(3)]
    rows, targets, weights = [], [], []
    for age, batch in enumerate(reversed(batches)):
        x, base = batch.x, batch.base
        for i, t in x.mask.nonzero().tolist():
            sums = torch.stack([x.energy[i, :t].sum(), -x.logps[i, :t].sum(), torch.tensor(float(t))])
            numbers = torch.tensor([1.0, base[i, 0], 0.0])
            rows.append(torch.cat([numbers, sums, sums.sqrt(), x.states[i, t], x.states[i, : t + 1].mean(0)]))
            targets.append(x.returns[i, 0] - base[i, 0])
            weights.append(0.9**age * x.energy[i, t])
    x, y, w = (torch.stack(values).double() for values in (rows, targets, weights))
    centred = x - (w[:, None] * x).sum(0) / w.sum()
    spread = (w[:, None] * centred.square()).sum(0)
    spread[2] = 1.0  # no rewards along the way
    difference = []
    for ridge in Value.ridges:
        penalty = (ridge / (1 + 0.9 + 0.81) * spread).sqrt().diag()
        penalty[0] = 0
        right = torch.cat([y * w.sqrt(), torch.zeros(len(penalty))]).unsqueeze(1)
        theta = torch.linalg.lstsq(torch.cat([x * w.sqrt()[:, None], penalty]), right)[0].squeeze(1)
        difference.append((x @ (theta - value.theta)).abs().max().item())
    assert min(difference) < 1e-3 < sorted(difference)[1]


def test_two_choices_give_failure_chance():
    """Then every sample's gradient is the exact one: (1 − p) (1 − B) after a success, −p (0 − B) after a failure."""
    value, g = Value(), torch.Generator().manual_seed(0)
    for _ in range(8):
        sure = (torch.arange(400) // N % 2 == 0).float()
        chance = 0.6 + 0.3 * sure
        won = (torch.rand(400, generator=g) < chance).float()
        energy = (2 * (won - chance).square()).unsqueeze(1)
        logps = (won * chance + (1 - won) * (1 - chance)).log().unsqueeze(1)
        states = torch.stack([sure, 1 - sure], dim=1).unsqueeze(1)
        batch = Batch(won, torch.ones(400, 1).long(), energy=energy, logps=logps, states=states)
        baselines = batch.baseline(value)[:, 0]
        batch.teach(value)
    torch.testing.assert_close(baselines, 1 - chance, atol=0.05, rtol=0)
    gradients = (won - chance) * (won - baselines)
    torch.testing.assert_close(gradients, chance * (1 - chance), atol=0.05, rtol=0)


def test_spurious_slope_of_base_is_limited():
    """Within a batch, what the others earned and what a completion earned sum up to the same for all."""
    value, g = Value(), torch.Generator().manual_seed(0)
    batch = Task().batch((torch.rand(PROMPTS * N, generator=g) < 0.5).float())
    batch.teach(value)
    x, y = batch.base.double(), batch.x.returns.double()
    alone = ((x - x.mean()) * (y - x)).sum() / (x - x.mean()).square().sum()
    assert alone < -2  # what a regression on this batch says of B0
    assert -1 <= value.theta[1] <= 0


def test_weight_follows_success():
    value = Value()
    weights = [Task(seed).batch().teach(value)["weight"] for seed in range(5)]
    assert weights[:4] == [0.0, 0.25, 0.25, 0.5] and weights[4] > 0.9  # a single batch is no evidence
    for seed in range(5, 12):  # the opposite of all that it has learnt
        rewards = Task(seed).batch().baseline(value).mean(dim=1)
        Task(seed).batch((rewards < rewards.median()).float()).teach(value)
    assert value.weight < 0.2


@pytest.mark.parametrize("prompts", [4, 16])
def test_uninformative_states_give_base(prompts):
    """Prompts of very unequal rates: what the state says of one says nothing of another."""
    of_value = of_base = 0.0
    for seed in range(100):
        if seed % 20 == 0:
            value = Value()
        batch = Task(seed, prompts=prompts, told=False).batch()
        of_value += batch.power(value)
        of_base += batch.power(batch.base)
        batch.teach(value)
    assert of_value < 1.05 * of_base


def test_it_stays_within_the_returns_seen():
    value = learnt()
    value.theta = 100 * value.theta
    for shift in (0, 5):
        batch = Task(100).batch(Task(100).rewards + shift)
        found = batch.baseline(value)
        assert (found >= 0).all() and (found <= batch.base.clamp(min=1)).all()  # B0 has left them, no further


@pytest.mark.parametrize(("factor", "level"), [(100, 0), (1, 1e3), (1, 1e5)])
def test_it_follows_units_and_level_of_rewards(factor, level):
    value = Value()
    for seed in (*range(6), 100):
        batch = Task(seed).batch(factor * Task(seed).rewards + level)
        found = batch.baseline(value)
        explained = batch.teach(value)["explained"]
    assert explained > 0.3 and value.weight > 0.9
    if level == 0:
        plain = Task(100).batch().baseline(learnt(range(6)))
        torch.testing.assert_close(found, factor * plain, rtol=1e-3, atol=0.05)


CHANGES = {  # of rewards from batch 8 on, and how often it starts anew
    "none": (lambda seed, task: task.rewards, 0),
    "divided by 100": (lambda seed, task: task.rewards / 100, 1),
    "times 100": (lambda seed, task: task.rewards * 100, 0),
    "shifted": (lambda seed, task: task.rewards + 10, 1),
    "another function": (lambda seed, task: -task.mask.sum(1).float() / T, 1),
    "a second task": (lambda seed, task: task.rewards.where(torch.arange(64) < 32, 5.0 * (task.mask.sum(1) > 9)), 0),
    "all equal for 50 batches": (lambda seed, task: task.rewards if seed >= 58 else torch.ones(64), 0),
}


@pytest.mark.parametrize("change", CHANGES)
def test_changed_rewards_cost_one_batch(change, caplog):
    value, (rewards, expected), left, restarted = learnt(), CHANGES[change], [], 0
    for seed in range(8, 80 if "equal" in change else 28):
        batch = Task(seed).batch(rewards(seed, Task(seed)))
        base = batch.power(batch.base)
        left += [batch.power(value) / base] if base > 1e-6 else []
        restarted += batch.teach(value)["restarted"]
    assert restarted == expected == caplog.text.count("as after a change of rewards. It continues as 'rloo_pooled'")
    assert max(left[1:]) < 1.05 and left[-1] < 1 and (left[0] > 2) == (expected == 1)


@pytest.mark.parametrize(("prompts", "most"), [(1, 3), (4, 1)])
def test_quiet_batch_causes_no_restart(prompts, most):
    """Returns of all sizes in batches of 4 or 16: some happen to be nearly equal, where any error is large."""
    restarted = of_value = of_base = 0.0
    for draw in range(3):
        value = Value()
        for seed in range(60):
            task = Task(1000 * draw + seed, prompts=prompts)
            sizes = torch.distributions.Exponential(1.0)
            torch.manual_seed(1000 * draw + seed)
            batch = task.batch((0.2 + task.rewards) * sizes.sample(task.rewards.shape))
            of_value, of_base = of_value + batch.power(value), of_base + batch.power(batch.base)
            restarted += batch.teach(value)["restarted"]
    assert restarted <= most and of_value < 0.95 * of_base


def test_rewards_along_the_way_are_read():
    """The same returns as rewards of last tokens; and what was earned before a token."""
    task, value = Task(100), learnt()
    last = (task.mask.cumsum(1) == task.mask.sum(1, keepdim=True)) & (task.mask > 0)
    by_token, plain = (task.advantages(value, of) for of in (last * task.rewards.unsqueeze(1), task.rewards))
    torch.testing.assert_close(by_token, plain, atol=1e-5, rtol=0)

    # A reward for every token that is not told by anything before, and that is known as soon as it is earned
    value, g = Value(), torch.Generator().manual_seed(0)
    for seed in range(6):
        rewards = 0.5 * torch.randn(PROMPTS * N, 1, generator=g).expand(-1, T)
        base = Task(seed).batch(rewards.sum(1)).base
        explained = Task(seed).batch(rewards, base=base).teach(value)["explained"]
    assert explained > 0.2


def test_ratios_weight_only_learning():
    value, other, task = learnt(), learnt(), Task(100)
    ratio = 0.5 + torch.rand(len(task.mask), 1, generator=torch.Generator().manual_seed(0))
    plain, weighted = task.batch(), task.batch(loss_energy=ratio.square() * task.energy)
    assert torch.equal(weighted.baseline(value), plain.baseline(value))
    explained = 1 - of_batches([weighted], value)
    plain.teach(value)
    assert weighted.teach(other)["explained"] == pytest.approx(explained, rel=1e-4)
    assert not torch.equal(value.theta, other.theta)


@pytest.mark.parametrize("broken", [math.nan, -math.inf])
def test_tool_output_and_unscored_teach_nothing(broken):
    task, other = Task(3), Task(3)
    rewards = task.rewards.clone()
    rewards[5] = math.nan
    task.mask[7, 2:4] = other.mask[7, 2:4] = 0  # tool output
    task.states[7, 2:4] = task.logps[7, 2:4] = broken
    for name in ("energy", "logps", "states"):
        getattr(other, name)[5] = 0.3
        getattr(other, name)[7, 2:4] = 0.7
    one, two = Value(), Value()
    task.batch(rewards).teach(one)
    other.batch(rewards).teach(two)
    assert torch.equal(one.theta, two.theta) and one.theta.isfinite().all()
    assert torch.equal(task.batch().baseline(learnt())[7], other.batch().baseline(learnt())[7])
    found = task.advantages(learnt(), rewards)
    assert (found[5] == 0).all() and found.isfinite().all()


def test_blocks_change_nothing_but_rounding(monkeypatch):
    batch, found = Task(100).batch(), []
    for block in (module.FEATURE_BLOCK, 2 * T * N):
        monkeypatch.setattr(module, "FEATURE_BLOCK", block)
        value = learnt()
        before = batch.baseline(value)
        batch.teach(value)
        found.append(torch.stack([before, batch.baseline(value)]))
    torch.testing.assert_close(*found, atol=1e-4, rtol=0)


def test_processes_learn_from_each_others_completions():
    """Two of them, one after the other: sums are added, ends of returns compared, prompts counted."""
    whole, sent, value, expected = Task(100).batch(), ([], []), learnt(), learnt()
    half = PROMPTS * N // 2
    for rows, own in zip((slice(half), slice(half, None)), sent, strict=True):
        learnt().update(whole.x.rows(rows), whole.base[rows], lambda values, own=own: own.append(values) or values)
    together = iter(map(torch.cat, zip(*sent, strict=True)))
    metrics = value.update(whole.x.rows(rows), whole.base[rows], lambda values: next(together))
    assert metrics == pytest.approx(whole.teach(expected))
    torch.testing.assert_close(value.theta, expected.theta, atol=1e-5, rtol=1e-4)
    assert value._prompts == expected._prompts == 9 * PROMPTS and value._returns_seen == expected._returns_seen


def test_state_survives_a_file(tmp_path):
    """And is handed out and taken as a copy."""
    value, batch = learnt(), Task(100).batch()
    state = value.state_dict()
    torch.save(state, tmp_path / "value.pt")
    one, two = Value(), Value()
    one.load_state_dict(torch.load(tmp_path / "value.pt", weights_only=True))
    two.load_state_dict(state)
    assert torch.equal(batch.baseline(one), batch.baseline(value))
    assert batch.teach(one) == batch.teach(value)
    assert torch.equal(one.theta, value.theta) and torch.equal(two.theta, learnt().theta)
    batch.teach(two)
    assert torch.equal(two.theta, one.theta)


def test_what_does_not_fit_is_named():
    x, task = Rollouts(), Task(100)
    task.states = torch.randn(*task.mask.shape, K + 1)
    assert x.advantages(baseline="value").shape == x.mask.shape  # a new one looks at returns alone
    with pytest.raises(ValueError, match="reads `logps`, which is not there"):
        x.advantages(baseline=learnt())
    with pytest.raises(ValueError, match="'value' has learned from 15 numbers per token, and here are 17: its state"):
        task.batch().baseline(learnt())
    with pytest.raises(ValueError, match="another version's: it holds 'theta'. Without the checkpoint's"):
        Value().load_state_dict({"theta": None})


@pytest.mark.parametrize("broken", [math.nan, math.inf])
def test_nonfinite_states_teach_nothing(broken, caplog):
    """And predict nothing, which is said once."""
    value, task, other = learnt(), Task(100), Task(100)
    task.states[0, 3, 1] = broken
    batch, least = task.batch(), int(task.mask[0].sum())
    found = batch.baseline(value)
    assert torch.equal(found[0, 3:least], batch.base[0].expand(least - 3)) and found.isfinite().all()
    assert torch.equal(found[1:], other.batch().baseline(value)[1:])
    other.energy[0, 3:] = 0.0
    expected = learnt()
    other.batch().teach(expected)
    again = learnt()
    with caplog.at_level(logging.WARNING):
        for of in (again, value, value):
            batch.teach(of)
    torch.testing.assert_close(again.theta, expected.theta, atol=1e-6, rtol=1e-3)
    assert caplog.text.count(f"before {least - 3} tokens of a generation batch are not finite") == 2

    task.states[:] = broken  # in all batches, as of a model that overflows
    value, batch = Value(), task.batch()
    for _ in range(3):
        assert batch.teach(value)["weight"] == 0.0
    assert torch.equal(batch.baseline(value), batch.base.expand_as(batch.x.mask))


def test_unsolvable_sums_give_base(monkeypatch, caplog):
    value, batch = learnt(), Task(101).batch()
    with monkeypatch.context() as broken, caplog.at_level(logging.WARNING):
        broken.setattr(value, "_solution", lambda squares, products, ridge: math.nan * products)
        Task(100).batch().teach(value)
    assert "discards what it has learned: its linear system has no finite solution" in caplog.text
    assert torch.equal(batch.baseline(value)[:, :1], batch.base) and value._gains == (0.0, 0.0)
    assert learnt(range(4), value).weight > 0.5  # and it learns again


@pytest.mark.parametrize("what", ["nothing generated", "no energy", "no reward", "one completion"])
def test_empty_batches_do_no_harm(what):
    value, task = Value(), Task(0)
    scored = {"no reward": 0, "one completion": 1}.get(what, len(task.rewards))
    task.rewards[scored:] = math.nan
    task.mask *= what != "nothing generated"
    task.energy *= what != "no energy"
    task.batch().teach(value)
    batch = Task(1).batch()
    assert batch.baseline(value).isfinite().all()
    assert learnt(range(2, 6), value).weight > 0.5 and batch.baseline(value).isfinite().all()


@pytest.mark.parametrize("rewards", [math.nan, 0.1, 1 / 3, 1000.3])
def test_batches_without_advantages_keep_weight(rewards):
    value, task = learnt(), Task(100)
    before = value._most_weight, value._gains, value.theta
    for _ in range(8):
        batch = task.batch(torch.full_like(task.rewards, rewards))
        batch.base = batch.base * (1 + 6e-8)  # rounding
        assert math.isnan(batch.teach(value)["explained"])
    assert (value._most_weight, value._gains) == before[:2]
    if math.isnan(rewards):  # no token has a reward: nothing else changes, either
        assert value.theta is before[2] and value._batches == learnt()._batches


def test_limit_follows_gain_per_c():
    def limits(*gains, c=0.25):
        value = Value()
        value.weight = c
        return [(value._limit_weight(c * gain), value._most_weight)[1] for gain in gains]

    assert limits(1.0, 1.0, 1.0, 1.0) == [0.25, 0.5, 1.0, 1.0]  # never after a single batch
    # 0.9 · 1 + 10 exceeds √(0.81 + 100); after it a loss of 1 does not outweigh what was gained, and one of 10 does
    assert limits(1.0, 10.0, -1.0, -10.0) == [0.25, 0.5, 0.5, 0.25]
    assert limits(-10.0, 1.0, 1.0) == [0.125, 0.0625, 0.03125]  # a gain of 1 does not make up for it
    assert limits(*[-1.0] * 9)[-1] == 1 / 64
    value = Value()
    for value.weight, gain in ((0.25, 1.0), (1.0, 8.0)):
        value._limit_weight(gain)
    assert value._gains == pytest.approx((0.9 * 4 + 8, 0.9**2 * 4**2 + 8**2))


@pytest.mark.parametrize(("prompts", "slips"), [(2, 0.03), (4, 0.01), (16, 0.003)])
def test_near_certain_success_is_learned(prompts, slips):
    """In many batches all returns are equal, which is no evidence against it."""

    def batch(seed, prompts=16):
        task, g = Task(seed, prompts=prompts), torch.Generator().manual_seed(seed)
        mistakes = (torch.rand(task.mask.shape, generator=g) < slips * (torch.arange(T) < 3)).float() * task.mask
        task.energy = (0.2 + 0.2 * mistakes) * (0.5 + torch.rand(task.mask.shape, generator=g))
        task.states[..., 0] = (torch.nn.functional.pad(mistakes.cumsum(1), (1, 0))[:, :-1] > 0).float()
        return task.batch((mistakes.sum(1) == 0).float())

    unseen, left = [batch(10**6 + seed) for seed in range(20)], 0.0
    for draw in range(4):
        value = Value()
        for number in range(60):
            batch(1000 * draw + number, prompts).teach(value)
        left += of_batches(unseen, value) / 4
    assert left < 0.5
