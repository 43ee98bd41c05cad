"""The baseline of a state: what it looks at, what it learns, and when it stands back."""

import copy
import logging
import math
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial

import jaxtyping
import pytest
import torch

from tests.helpers.coefficients import give_coefficients
from tests.helpers.oracles import RandomBatch
from tests.helpers.settings import in_turn
from tests.maths.test_derivation import Enumeration, V
from trl_otb.baselines import (
    BASELINES,
    Completions,
    Value,
    bound,
    compute_advantages,
    joined,
    least_squares,
    prefix,
    squeeze,
)
from trl_otb.run import baseline as run_baseline


PROMPTS, N, T, K = 16, 4, 12, 3
NAMES = ("explained", "explained_by_state", "weight", "luck_weight", "restarted", "r2_at_end", "slope_at_start")
NAMES += ("luck_mean", "luck_left_out")


@pytest.fixture(autouse=True)
def unchecked(monkeypatch):
    """Of hundreds of batches, shapes are not checked: that took a third of the time. Other tests check those."""
    monkeypatch.setattr(jaxtyping.config, "jaxtyping_disable", True)


class Batch:
    """Completions of groups of N, with the B0 of all of them."""

    def __init__(self, rewards, mask, b0=None, n=N, **more):
        self.x: Completions = squeeze(rewards, mask, n, **more)
        self.b0 = Value()(self.x) if b0 is None else b0

    def baseline(self, value):
        return value.adjust(self.x, self.b0).expand_as(self.x.mask)

    def teach(self, value):
        return value.update(self.x, self.b0, lambda values: values)

    def power(self, baseline):
        """Of a baseline, or of what `value` says."""
        baseline = self.baseline(baseline) if isinstance(baseline, Value) else baseline
        return (self.x.loss_energy * (self.x.returns - baseline).square()).sum().item()


class Task:
    """
    Completions whose early tokens may be mistakes; the state knows, the return is 1 without any. Each token is one of 2
    to 8 that are equally probable, so that none is luckier than another; or mistakes come later and are improbable.
    """

    def __init__(self, seed=0, prompts=PROMPTS, told=True, seen=False):
        g = torch.Generator().manual_seed(seed)
        rows = prompts * N
        lengths = torch.randint(T // 2, T + 1, (rows, 1), generator=g)
        self.mask = (torch.arange(T) < lengths).long()
        place = (torch.arange(T) // 3 == seen).float()
        mistakes = (torch.rand(rows, T, generator=g) < 0.2 * place).float() * self.mask
        probs = 0.5 ** torch.randint(1, 4, (rows, T), generator=g)
        self.energy, self.logps = 1 - probs, probs.log()
        if seen:
            chances = torch.where(place > 0, 0.8 - 0.6 * mistakes, probs)
            self.energy = self.energy.where(place == 0, 1.68 - 2 * chances)
            self.logps = chances.log()
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


def learnt(seeds=range(8), value=None, **kind):
    value = Value() if value is None else value
    for seed in seeds:
        Task(seed, **kind).batch().teach(value)
    return value


def of_batches(batches, value):
    """The power that `value` leaves of batches, relative to B0."""
    return sum(batch.power(value) for batch in batches) / sum(batch.power(batch.b0) for batch in batches)


def test_it_predicts_what_the_state_tells():
    value, batch = learnt(), Task(100).batch()
    left = of_batches([batch], value)
    assert value.weight > 0.9 and left < 0.6
    found = batch.teach(value)
    assert tuple(found) == NAMES and found["explained"] == pytest.approx(1 - left) and found["restarted"] == 0


def test_later_luck_is_subtracted():
    """Of mistakes that are improbable; then hardly anything is left, and nothing is recorded that says so."""
    value, task = learnt(seen=True), Task(100, seen=True)
    left = of_batches([task.batch()], value)
    by_state = of_batches([task.batch(draw_ratio=torch.zeros(task.mask.shape))], value)
    assert left < 0.15 and 0.3 < by_state < 0.8 and value.luck_weight > 0.9
    found = task.batch().teach(value)
    assert [found[name] for name in NAMES[:2]] == pytest.approx([1 - left, 1 - by_state])


def test_joined_batches_keep_the_ratios_of_their_draws():
    drawn, unknown = Task().batch().x, Task(1).batch(draw_ratio=torch.zeros(PROMPTS * N, T)).x
    ratio = joined([drawn, unknown]).draw_ratio
    assert torch.equal(ratio, torch.cat([torch.ones_like(drawn.mask), torch.zeros_like(unknown.mask)]))


def test_batch_does_not_affect_itself():
    value, first = Value(), Task(seen=True).batch()
    assert torch.equal(first.baseline(value), first.b0.expand_as(first.x.mask))
    found = first.teach(value)
    assert {name: found[name] for name in NAMES[:5]} == dict.fromkeys(NAMES[:5], 0.0)
    batch = Task(1, seen=True).batch()
    other = Task(1, seen=True).batch(1 - Task(1, seen=True).rewards, b0=batch.b0)  # with B0 held fixed
    assert torch.equal(other.baseline(value), batch.baseline(value))


@pytest.mark.parametrize("t", [0, 1, T // 2, T - 1])
def test_future_tokens_do_not_matter(t):
    """But for their luck, which is left out here."""
    value, task, off = learnt(seen=True), Task(100, seen=True), torch.zeros(PROMPTS * N, T)
    batch = task.batch(draw_ratio=off)
    energy, logps, states, mask = (v.clone() for v in (task.energy, task.logps, task.states, task.mask))
    energy[:, t:], logps[:, t:] = 1 - (logps[:, t:].exp() / 2), logps[:, t:] - math.log(2)
    energy[:, t], logps[:, t] = task.energy[:, t], task.logps[:, t]  # how sure it was is known before
    states[:, t + 1 :] = 5.0  # the state that predicts token t is of the tokens before it
    expected, present = batch.baseline(value), task.mask[:, t] > 0
    more = {"energy": energy, "logps": logps, "states": states, "b0": batch.b0, "draw_ratio": off}
    found = task.batch(**more).baseline(value)
    torch.testing.assert_close(found[present, t], expected[present, t], atol=1e-6, rtol=0)
    assert t == T - 1 or (found[:, t + 1 :] - expected[:, t + 1 :]).abs().max() > 1e-3
    mask[:, t + 1 :] = 0
    found = task.batch(mask=mask, **more).baseline(value)
    torch.testing.assert_close(found[present, t], expected[present, t], atol=1e-6, rtol=0)


@pytest.mark.parametrize("seed", [0, 1])
def test_few_short_completions_do_no_harm(seed):
    """32 completions of up to 3 tokens per batch; the noise is exact, as all that the policy may write is listed."""
    policy, value, g = Enumeration(), Value(), torch.Generator().manual_seed(seed)
    every = torch.arange(len(policy.mask))
    b0 = policy.mean(policy.rewards).float().expand(len(every), 1)

    def batch(rows):
        more = {"energy": policy.energy[rows].float(), "logps": policy.logps[rows].float()}
        states = torch.zeros(*policy.mask[rows].shape, 1)
        return Batch(policy.rewards[rows].float(), policy.mask[rows], b0[rows], states=states, **more)

    def noise(baseline):
        advantages = (policy.rewards[:, None] - baseline) * policy.mask
        gradients = torch.einsum("it,itv->iv", advantages, policy.scores)
        return (policy.mean(gradients.square().sum(1)) - policy.gradient.square().sum()).item()

    left = []
    for _ in range(12):
        found = batch(torch.multinomial(policy.probability, 32, True, generator=g))
        found.b0 = value(found.x)
        assert found.teach(value)["restarted"] == 0
        left.append(noise(batch(every).baseline(value)) / noise(b0))
    assert max(left) < 1.05 and left[-1] < 0.9


class OnRloo(Value):
    """On a B0 that compares no prompts; 0 for N = 1."""

    def __call__(self, x):
        return BASELINES["rloo"].estimator(x)


@pytest.mark.parametrize("width", [10.0, 1.0])  # of the returns seen: 1 bounds prediction and luck
@pytest.mark.parametrize("weighted", [None, "by completion", "by token"])
@pytest.mark.parametrize("n", [1, 2, 3])
def test_what_it_subtracts_is_unbiased(n, weighted, width):
    """
    By all groups of a policy whose completions are all listed. Another sampler's completions are weighted with a ratio
    of their own, which depends on all of their tokens; or each token is, which leaves out the tokens before it: then
    the gradient is another one, but not because of what is subtracted.
    """
    policy, sampler = Enumeration(), Enumeration(scale=1.0 if weighted is None else 0.5)
    of_tokens = (policy.logps - sampler.logps).exp()
    ratio = of_tokens if weighted == "by token" else of_tokens.prod(1, keepdim=True)
    value, g = OnRloo(), torch.Generator().manual_seed(0)
    value.weight, value.luck_weight, value.returns_seen = 0.7, 0.9, (-width, width)
    entry = replace(BASELINES["value"], estimator=value)
    # A state that predicts token t: the tokens before it
    tokens = torch.tensor([[*history, 0, 0][:3] for history, _, _ in policy.completions])
    before = torch.nn.functional.one_hot(tokens, V).float() * policy.mask.unsqueeze(2)
    states = torch.nn.functional.pad(before.cumsum(1), (0, 0, 1, 0))[:, :-1]
    groups, inputs = policy.groups(n)
    rows = groups.flatten()

    def expected(baseline, **more):
        weights = None if weighted is None else ratio[rows].float()
        advantages = compute_advantages(*inputs, n, baseline=baseline, importance_weights=weights, **more)
        return advantages, sampler.expectation(groups, ratio[rows] * advantages, policy.scores)

    plain, gradient = expected("rloo" if n > 1 else "none")
    if weighted != "by token":
        torch.testing.assert_close(gradient, policy.gradient, atol=1e-6, rtol=0)
    more = {"logps": policy.logps[rows].float(), "states": states[rows]}
    if weighted == "by token":
        more["draw_ratio"] = of_tokens[rows].float()
    give_coefficients(value, squeeze(inputs[0], inputs[2], n, energy=inputs[1], **more), generator=g)
    advantages, found = expected(entry, **more)
    torch.testing.assert_close(found, gradient, atol=1e-5, rtol=0)
    for part in ("weight", "luck_weight"):  # each has an effect
        kept = getattr(value, part)
        setattr(value, part, 1e-9)
        assert (expected(entry, **more)[0] - advantages).abs().max() > 0.1
        setattr(value, part, kept)
    assert (advantages - plain).abs().max() > 0.1
    if weighted == "by token":  # without the ratio of the draws it would be biased
        del more["draw_ratio"]
        assert (expected(entry, **more)[1] - gradient).abs().max() > 1e-3


def fitted(rows, ridge):
    """
    By numpy's way, of rows of features, target and weight, with the ridge as rows of its own; the coefficient of B0 is
    between -1 and 0.
    """
    rows = torch.stack(rows).double()
    x, y, w = rows[:, :-2], rows[:, -2], rows[:, -1]
    centred = x - (w[:, None] * x).sum(0) / w.sum()
    spread = (w[:, None] * centred.square()).sum(0)
    squares = (w[:, None] * x.square()).sum(0)
    penalty = (ridge * spread + 1e-9 * squares).where(squares > 0, 1.0).sqrt().diag()
    x, y = torch.cat([x * w.sqrt()[:, None], penalty]), torch.cat([y * w.sqrt(), torch.zeros(len(penalty))])
    free = torch.linalg.lstsq(x, y[:, None], driver="gelsd")[0][:, 0]
    fixed = free[1].clamp(-1, 0)
    rest = torch.tensor([i for i in range(len(free)) if i != 1])
    free[rest] = torch.linalg.lstsq(x[:, rest], (y - x[:, 1] * fixed)[:, None], driver="gelsd")[0][:, 0]
    free[1] = fixed
    return free


@pytest.mark.parametrize("functions", [0, 2])
def test_coefficients_are_least_squares_of_earlier_batches(functions):
    """Feature by feature and token by token, as the definitions read; with progress states have more ridge."""
    value, of_value, of_both, g = Value(), [], [], torch.Generator().manual_seed(0)
    factors = torch.ones(9 + 2 + 2 * K + 2 * functions, dtype=torch.float64)
    factors[11 : 11 + 2 * K] = 4 if functions else 1
    for number in range(3):
        progress = torch.randn(PROMPTS * N, T, functions, generator=g)
        batch = Task(number, seen=True).batch(**({"progress": progress} if functions else {}))
        x, b0 = batch.x, batch.b0[:, 0]
        batch.teach(value)
        of_value, of_both = ([[*row[:-1], 0.9 * row[-1]] for row in rows] for rows in (of_value, of_both))
        of_value, of_both = ([torch.stack(row) for row in rows] for rows in (of_value, of_both))
        numbers, sure, luck, worst = {}, {}, {}, {}
        for i, t in x.mask.nonzero().tolist():
            pi = x.logps[i, t].exp()
            sure[i, t] = x.energy[i, t] - 1 + 2 * pi
            luck[i, t] = sure[i, t] - pi
            worst[i, t] = max([torch.tensor(0.0), *(luck[i, j] for j in range(t))])
            sums = torch.stack([x.energy[i, :t].sum(), -x.logps[i, :t].sum(), torch.tensor(float(t))])
            numbers[i, t] = torch.cat([torch.stack([torch.tensor(1.0), b0[i], torch.tensor(0.0)]), sums, sums.sqrt()])
        new = {}
        for i, t in numbers:
            of_states = [x.states[i, t], x.states[i, : t + 1].mean(0)]
            known = torch.cat([numbers[i, t], torch.stack([worst[i, t], sure[i, t]]), *of_states])
            known = torch.cat([known, progress[i, t], progress[i, t] * t**0.5])
            new[i, t] = torch.cat([known, torch.stack([x.returns[i, 0] - b0[i], torch.tensor(1.0)])])
        ridge, fold = factors * 4 / ((number + 1) * PROMPTS), (x.prompt + number * PROMPTS) % 4
        etas = [fitted(of_value + [new[at] for at in new if fold[at[0]] != k], ridge) for k in range(4)]
        of_value += new.values()
        psi, phi = {}, {}
        for i, t in numbers:
            v = (b0[i] + new[i, t][:-2] @ etas[fold[i]].float()).clamp(0, 1) - 0.5
            m, root = worst[i, t], torch.tensor(t**0.5)
            q = torch.stack([torch.tensor(1.0), root, v, v * v, m, v * m, v * root])
            q0, others = q[:1], torch.cat([q[1:], sure[i, t] * q, sure[i, t] ** 2 * q, torch.zeros(1)])
            phi[i, t] = torch.cat([q0, b0[i : i + 1], others])
            psi[i, t] = torch.cat([q, sure[i, t] * q])
        for i, t in numbers:
            later = sum((luck[i, j] * psi[i, j] for j in range(t + 1, T) if (i, j) in psi), torch.zeros(14))
            of_both.append(torch.cat([phi[i, t], later, new[i, t][-2:-1], x.energy[i, t : t + 1]]))
    torch.testing.assert_close(value.eta.float(), fitted(of_value, ridge).float(), atol=1e-3, rtol=1e-3)
    assert (value.eta - fitted(of_value, 2 * ridge)).abs().max() > 5e-3
    found, x = torch.cat([value.theta, value.gamma]), torch.stack(of_both)[:, :-2].double()
    tokens = sum(0.9 ** (2 - number) * Task(number, seen=True).mask.sum().item() for number in range(3))
    ridge = max(0.5 / (3 * PROMPTS), 38 / tokens)
    assert (x @ (fitted(of_both, ridge) - found)).abs().max() < 2e-3
    assert (x @ (fitted(of_both, 2 * ridge) - found)).abs().max() > 2e-3


def test_spurious_slope_of_base_is_limited():
    """Within a batch, what the others earned and what a completion earned sum up to the same for all."""
    value, g = Value(), torch.Generator().manual_seed(0)
    batch = Task().batch((torch.rand(PROMPTS * N, generator=g) < 0.5).float())
    batch.teach(value)
    x, y = batch.b0.double(), batch.x.returns.double()
    alone = ((x - x.mean()) * (y - x)).sum() / (x - x.mean()).square().sum()
    assert alone < -2  # what a regression on this batch says of B0
    assert -1 <= value.theta[1] <= 0


@pytest.mark.parametrize("n", [3, 4])
def test_samples_of_a_prompt_count_once(n):
    """As in asynchronous training, where a batch has samples of any group, each told by its number."""
    value = Value()
    for step in range(8):
        x = replace(Task(step).batch().x.rows(slice(0, n), 1), prompt=torch.full((n,), 40 + step))
        value.update(x, torch.full((n, 1), 0.5), lambda values: values)
    assert value.state_dict()["_prompts"] == 8
    assert (value.state_dict()["_sums"][:, 0, 0] > 0).all()  # each fold has seen some of them


def test_weight_grows_with_prompts():
    value = Value()
    weights = [Task(seed, prompts=4).batch().teach(value)["weight"] for seed in range(9)]
    assert weights[0] == 0 and weights[8] > 0.9
    assert all(weight <= number / 4 for number, weight in enumerate(weights[:4]))  # 16 prompts are enough


@pytest.mark.parametrize("prompts", [4, 16])
def test_uninformative_states_give_b0(prompts):
    """Prompts of very unequal rates: what the state says of one says nothing of another."""
    of_value = of_b0 = 0.0
    for seed in range(40):
        if seed % 20 == 0:
            value = Value()
        batch = Task(seed, prompts=prompts, told=False).batch()
        of_value += batch.power(value)
        of_b0 += batch.power(batch.b0)
        batch.teach(value)
    assert of_value < 1.05 * of_b0


def test_it_stays_within_the_returns_seen():
    value = learnt()
    value.theta = 100 * value.theta
    for shift in (0, 5):
        batch = Task(100).batch(Task(100).rewards + shift)
        found = batch.baseline(value)
        assert (found >= 0).all() and (found <= batch.b0.clamp(min=1)).all()  # B0 has left them, no further


def test_one_draws_luck_is_limited_by_the_width_of_the_returns_seen():
    """Whatever Γ says."""
    value, task, found = learnt(seen=True), Task(100, seen=True), []
    without = task.batch(draw_ratio=torch.zeros(task.mask.shape)).baseline(value)
    for factor in (1, 1e3):
        taught = copy.deepcopy(value)
        taught.gamma = factor * taught.gamma
        for t in range(1, T):  # of one token the luck is subtracted
            only = (torch.arange(T) == t).float().expand(task.mask.shape)
            moved = (task.batch(draw_ratio=only).baseline(taught) - without)[:, t - 1] / taught.luck_weight
            luck = (task.energy - 1 + task.logps.exp()).where(task.mask > 0, 0.0)[:, t]
            assert (moved.abs() <= luck.abs() + 1e-5).all()  # times a width of 1
            found.append((moved.abs().max().item(), luck.abs().max().item()))
    assert any(most > 0.99 * limit > 0.1 for most, limit in found)


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
    "shifted": (lambda seed, task: task.rewards + 10, 0),
    "another function": (lambda seed, task: -task.mask.sum(1).float() / T, 0),
    "a second task": (lambda seed, task: task.rewards.where(torch.arange(64) < 32, 5.0 * (task.mask.sum(1) > 9)), 0),
    "all equal for 50 batches": (lambda seed, task: task.rewards if seed >= 58 else torch.ones(64), 0),
}


@pytest.mark.parametrize("change", CHANGES)
def test_changed_rewards_cost_two_batches(change, caplog):
    value, (rewards, expected), left, restarted = learnt(), CHANGES[change], [], 0
    for seed in range(8, 80 if "equal" in change else 28):
        batch = Task(seed).batch(rewards(seed, Task(seed)))
        b0 = batch.power(batch.b0)
        left += [batch.power(value) / b0] if b0 > 1e-6 else []
        restarted += batch.teach(value)["restarted"]
    assert restarted == expected == caplog.text.count("as after a change of rewards. It continues as 'rloo_pooled'")
    assert max(left[2:]) < 1.05 and left[-1] < 1 and (left[1] > 2) == (expected == 1)


@pytest.mark.parametrize("prompts", [1, 4])
def test_quiet_batch_causes_no_restart(prompts):
    """Returns of all sizes in batches of 4 or 16: some happen to be nearly equal, where any error is large."""
    value, restarted, of_value, of_b0 = Value(), 0.0, 0.0, 0.0
    for seed in range(1000, 1060):
        task, sizes = Task(seed, prompts=prompts), torch.distributions.Exponential(1.0)
        torch.manual_seed(seed)
        batch = task.batch((0.2 + task.rewards) * sizes.sample(task.rewards.shape))
        of_value, of_b0 = of_value + batch.power(value), of_b0 + batch.power(batch.b0)
        restarted += batch.teach(value)["restarted"]
    assert restarted == 0 and of_value < 0.95 * of_b0


JUMPS = {  # of the rewards of batch b, again and again
    "of level": lambda b, rewards: rewards + 5 * (b % 5 == 4),
    "of scale": lambda b, rewards: rewards * (100 if b % 2 else 1),
    "of one completion": lambda b, rewards: rewards + 1000 * (torch.arange(64) == 2 * b) * (b % 5 == 4),
    "of level, few scored": lambda b, rewards: (rewards + 5 * (b % 5 == 4)).where(
        (torch.arange(64) % 4 == 0) | (torch.arange(64) < 16), math.nan
    ),
}


def largest_power(jump, n):
    """That a run's baseline leaves of a batch, relative to B0."""
    run, most = run_baseline.RunBaseline(BASELINES["value"]), 0.0
    for seed in range(15):
        batch = Task(seed, seen=True).batch(JUMPS[jump](seed, Task(seed, seen=True).rewards), n=n)
        step = run.advantages_of(batch.x, learn=True)
        most = max(most, batch.power(step.baselines) / batch.power(batch.b0))
    return most


@pytest.mark.parametrize(("jump", "n"), in_turn(JUMPS, [1, N]))
def test_jumps_again_and_again_do_no_harm(jump, n, monkeypatch):
    assert largest_power(jump, n) < 2
    monkeypatch.setattr(bound, "WORSE_RATIO", math.inf)
    assert largest_power(jump, n) > 10


@pytest.mark.parametrize("n", [1, N])
@pytest.mark.parametrize("level", [0.0, 1.0, 2.0])
def test_returns_that_no_longer_vary_give_no_advantages(level, n):
    """As group means do, while what was learned predicts other returns; and it is learned that nothing varies."""
    run, found = run_baseline.RunBaseline(BASELINES["value"]), []
    for seed in range(16):
        task = Task(seed, seen=True)
        step = run.advantages_of(task.batch(task.rewards if seed < 10 else task.rewards * 0 + level, n=n).x, learn=True)
        found.append((step.advantages.abs().max().item(), step.learned["value/kept"]))
    assert found[10][0] < 1e-6 and found[10][1] == 1
    assert max(size for size, _ in found[11:]) < 0.5 and not any(kept for _, kept in found[:10])


def test_two_batches_that_do_not_vary_and_are_predicted_otherwise_cause_a_reset(caplog):
    """Where no other prompts keep B0 for a prompt, as in asynchronous training."""
    value, task = learnt(seen=True), Task(100, seen=True)
    quiet = task.batch(torch.full_like(task.rewards, 2.0))
    theta, restarted = value.theta, []
    for _ in range(2):
        value.theta = theta  # it stays wrong
        assert quiet.power(value) > 2 * bound.VARIES_NOT_RATIO * value.usual_power * task.energy.sum()
        restarted.append(quiet.teach(value)["restarted"])
    assert restarted == [0, 1] and "it left power where no return varied" in caplog.text
    assert torch.equal(Task(101).batch().baseline(Value()), Task(101).batch().b0.expand(-1, T))


class Worse:
    """Its B leaves `ratio` times the power of any B0."""

    usual_power = 0.0
    keeps_b0 = Value.keeps_b0

    def __init__(self, ratio):
        self.ratio = ratio

    def __call__(self, x):
        return Value()(x)

    def adjust(self, local, b0):
        return local.returns - math.sqrt(self.ratio) * (local.returns - b0)


@pytest.mark.parametrize(("n", "ratio", "kept"), [(N, 1.4, 0), (N, 1.6, 1), (1, 1.4, 0), (1, 1.6, 1)])
def test_how_much_worse_the_other_prompts_must_be(n, ratio, kept):
    run = run_baseline.RunBaseline(replace(BASELINES["value"], estimator=Worse(ratio)))
    assert run.advantages_of(Task().batch(n=n).x, learn=True).learned["value/kept"] == kept


def test_the_order_of_prompts_does_not_decide():
    """For N = 1 one half of the batch judges for the other: here every second reward hardly varies."""
    run = run_baseline.RunBaseline(replace(BASELINES["value"], estimator=learnt(seen=True)))
    task = Task(100, seen=True)
    batch = task.batch(task.rewards.where(torch.arange(64) % 2 == 1, 0.5 + 1e-3 * task.rewards), n=1)
    step = run.advantages_of(batch.x, learn=True)
    assert step.learned["value/kept"] == 0 and batch.power(step.baselines) < 0.8 * batch.power(batch.b0)
    jumped = task.batch(task.rewards + 5, n=1).x
    assert run.advantages_of(jumped, learn=True).learned["value/kept"] == 1


def test_what_a_baseline_is_made_of():
    """Is told if asked for, and changes nothing; a prompt that keeps B0 has no later luck."""
    taught, task = learnt(seen=True), Task(100, seen=True)
    run = run_baseline.RunBaseline(replace(BASELINES["value"], estimator=taught))
    taught.luck_weight = 1.0  # whatever it has learned
    x = task.batch().x
    step, usual = run.advantages_of(x, parts=True), run.advantages_of(x)
    assert usual.later_luck is None and torch.equal(step.baselines, usual.baselines)
    state = taught.adjust(replace(x, draw_ratio=torch.zeros_like(x.mask)), step.b0)
    torch.testing.assert_close(step.later_luck, step.baselines - state)
    assert step.later_luck.abs().max() > 0
    jumped = run.advantages_of(task.batch(task.rewards + 5, n=1).x, parts=True, learn=True)
    assert jumped.learned["value/kept"] == 1 and not jumped.later_luck.any()


@pytest.mark.parametrize("n", [1, N])
@pytest.mark.parametrize("jump", [0.0, 5.0])
def test_own_return_does_not_decide_what_is_subtracted(jump, n):
    """Whether the batch jumps or not, and whatever the completion would add to what is left of its own prompt."""
    run = run_baseline.RunBaseline(replace(BASELINES["value"], estimator=learnt(seen=True)))
    task, found = Task(100, seen=True), []
    for own in (0.0, 1.0, 100.0):
        batch = task.batch(task.rewards + jump + own * (torch.arange(64) == 5), n=n)
        found.append(run.advantages_of(batch.x).baselines[5])
        assert (found[-1] != batch.b0[5]).any() == (jump == 0)
    torch.testing.assert_close(found[1:], [found[0]] * 2, atol=1e-4, rtol=0)


@pytest.mark.parametrize("n", [1, N])
def test_own_return_does_not_decide_where_no_other_varies(n):
    run = run_baseline.RunBaseline(replace(BASELINES["value"], estimator=learnt(seen=True)))
    task, found = Task(100, seen=True), []
    for own in (0.0, 1.0, 100.0):
        batch = task.batch(2.0 + own * (torch.arange(64) == 5), n=n)
        found.append(run.advantages_of(batch.x).baselines[5])
        torch.testing.assert_close(found[-1], batch.b0[5].expand(T), atol=1e-6, rtol=0)  # the others keep B0 for it
    torch.testing.assert_close(found[1:], [found[0]] * 2, atol=1e-5, rtol=0)


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
        b0 = Task(seed).batch(rewards.sum(1)).b0
        explained = Task(seed).batch(rewards, b0=b0).teach(value)["explained"]
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
    found = []
    for block in (prefix.READ_AT_ONCE, 3 * T):
        monkeypatch.setattr(prefix, "READ_AT_ONCE", block)
        value, batch = learnt(), Task(100).batch()
        before = batch.baseline(value)
        batch.teach(value)
        found.append(torch.stack([before, batch.baseline(value)]))
    torch.testing.assert_close(*found, atol=1e-4, rtol=0)


def in_two_processes(function):
    """What `function(process, gather)` returns in each of two."""
    meeting, given = threading.Barrier(2, timeout=60), {}

    def gather(process, values):
        given[process] = values
        meeting.wait()
        assert given[0].shape == given[1].shape
        of_all = torch.cat([given[0], given[1]])
        meeting.wait()
        return of_all

    with ThreadPoolExecutor() as threads:
        return [*threads.map(lambda process: function(process, partial(gather, process)), range(2))]


@pytest.mark.parametrize("n", [1, 2, N])
def test_a_process_whose_completions_have_one_token(n):
    """Beside another with rewards per token, which cuts a group for N = 4."""
    task, per_token = Task(100, seen=True, prompts=3), torch.rand(12, T, generator=torch.Generator().manual_seed(0))
    mask = task.mask * (torch.arange(T) < torch.tensor([T] * 6 + [1] * 6).unsqueeze(1))
    whole = {"rewards": per_token * mask, "mask": mask, "energy": task.energy, "logps": task.logps}

    def step(rows, length, **of_process):
        x = squeeze(**{name: of[rows, :length] for name, of in (whole | {"states": task.states}).items()},
                    num_generations=n, first_row=rows.start)  # fmt: skip
        run = run_baseline.RunBaseline(replace(BASELINES["value"], estimator=learnt(seen=True)))
        return run.advantages_of(x, learn=True, **of_process).advantages

    found = in_two_processes(
        lambda process, gather: step(slice(6 * process, 6 * process + 6), [T, 1][process], gather=gather,
                                     first_row=6 * process)
    )  # fmt: skip
    expected = step(slice(0, 12), T)
    torch.testing.assert_close(found[0], expected[:6], atol=1e-5, rtol=0)
    torch.testing.assert_close(found[1], expected[6:, :1], atol=1e-5, rtol=0)


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
    two.load_state_dict(state | {"_most_weight": 0.25, "_gains": (0.0, 0.0)})  # as of 0.8 to 0.9.2
    assert torch.equal(two.theta, learnt().theta) and two.state_dict().keys() == state.keys()


def test_features_of_another_release_are_fitted_anew(caplog):
    """V goes on, whose numbers are the same."""
    value, batch = learnt(), Task(100).batch()
    state = value.state_dict() | {"theta": torch.zeros(28), "_sums": torch.zeros(4, 43, 43)}  # as of 0.10
    del state["_names"], state["_value_names"]
    again = Value()
    again.load_state_dict(state)
    assert "features of another release: all but V is fitted anew" in caplog.text
    assert torch.equal(again.eta, value.eta) and torch.equal(batch.baseline(again), batch.b0.expand_as(batch.x.mask))
    assert learnt(range(8, 10), again).weight > 0.9 and of_batches([batch], again) < 0.7


def test_what_does_not_fit_is_named():
    x = RandomBatch()
    assert x.advantages(baseline="value").shape == x.mask.shape  # a new one looks at returns alone
    with pytest.raises(ValueError, match="reads `logps`, which is not there"):
        x.advantages(baseline=learnt())
    with pytest.raises(ValueError, match="of a release before 0.8: it holds .'theta'.. Without"):
        Value().load_state_dict({"theta": None})


@pytest.mark.parametrize("broken", [math.nan, math.inf])
def test_nonfinite_states_teach_nothing(broken, caplog, monkeypatch):
    """And predict nothing, which is said once."""
    monkeypatch.setattr(Value, "_warned", set())
    value, task, other = learnt(), Task(100), Task(100)
    task.states[0, 3, 1] = broken
    batch, least = task.batch(), int(task.mask[0].sum())
    found = batch.baseline(value)
    assert torch.equal(found[0, 3:least], batch.b0[0].expand(least - 3)) and found.isfinite().all()
    assert torch.equal(found[1:], other.batch().baseline(value)[1:])
    other.mask[0, 3:] = 0
    expected = learnt()
    other.batch().teach(expected)
    again = learnt()
    with caplog.at_level(logging.WARNING):
        for of in (again, value, value):
            batch.teach(of)
    torch.testing.assert_close(again.theta, expected.theta, atol=1e-6, rtol=1e-3)
    assert caplog.text.count(f"before {least - 3} tokens of a generation batch are not finite") == 1

    task.states[:] = broken  # in all batches, as of a model that overflows
    value, batch = Value(), task.batch()
    for _ in range(3):
        found = batch.teach(value)
        assert found["weight"] == 0.0 and found["luck_left_out"] == 1.0
    assert caplog.text.count("before all tokens of a generation batch are not finite") == 1
    assert torch.equal(batch.baseline(value), batch.b0.expand_as(batch.x.mask))


def test_unsolvable_sums_give_b0(monkeypatch, caplog):
    value, batch = learnt(), Task(101).batch()
    with monkeypatch.context() as broken, caplog.at_level(logging.WARNING):
        solution = least_squares.solution
        of_both = lambda sums, ridge: solution(sums, ridge) * (math.nan if "luck V" in sums.names else 1.0)  # noqa: E731
        broken.setattr("trl_otb.baselines.value.solution", of_both)
        Task(100).batch().teach(value)
    assert "discards what it has learned: its linear system has no finite solution" in caplog.text
    assert torch.equal(batch.baseline(value)[:, :1], batch.b0)
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


# Returns of 1000 are far outside of those seen, so that nothing is predicted from what was learned
@pytest.mark.parametrize(("rewards", "weight"), [(math.nan, 1), (0.1, 1), (1 / 3, 1), (1000.3, 0)])
def test_batches_without_advantages_do_no_harm(rewards, weight):
    value, task = learnt(), Task(100)
    before = value.theta
    for _ in range(8):
        batch = task.batch(torch.full_like(task.rewards, rewards))
        batch.b0 = batch.b0 * (1 + 6e-8)  # rounding
        assert math.isnan(batch.teach(value)["explained"])
        assert value.weight > 0.99 if weight else value.weight < 1e-3
    if math.isnan(rewards):  # no token has a reward: nothing changes
        assert value.theta is before and value.state_dict()["_tokens"] == learnt().state_dict()["_tokens"]


@pytest.mark.parametrize(("prompts", "slips"), [(2, 0.03), (16, 0.003)])
def test_near_certain_success_is_learned(prompts, slips):
    """In many batches all returns are equal, which is no evidence against it."""

    def batch(seed, prompts=16):
        task, g = Task(seed, prompts=prompts), torch.Generator().manual_seed(seed)
        mistakes = (torch.rand(task.mask.shape, generator=g) < slips * (torch.arange(T) < 3)).float() * task.mask
        task.energy = (0.2 + 0.2 * mistakes) * (0.5 + torch.rand(task.mask.shape, generator=g))
        task.states[..., 0] = (torch.nn.functional.pad(mistakes.cumsum(1), (1, 0))[:, :-1] > 0).float()
        return task.batch((mistakes.sum(1) == 0).float())

    unseen, left = [batch(10**6 + seed) for seed in range(20)], 0.0
    for draw in range(2):
        value = Value()
        for number in range(60):
            batch(1000 * draw + number, prompts).teach(value)
        left += of_batches(unseen, value) / 2
    assert left < 0.5
