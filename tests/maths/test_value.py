"""The baseline of a state: what it looks at, what it learns, and when it stands back."""

import itertools
import logging
import math
from dataclasses import replace

import pytest
import torch

from tests.helpers.oracles import Rollouts
from tests.maths.test_derivation import Enumeration, V
from trl_otb import blocks
from trl_otb.baselines import BASELINES, Tokens, Value, assign_credit, compute_advantages


PROMPTS, N, T, K = 16, 4, 12, 3


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

    def tokens(self, rewards=None, **changes):
        inputs = {name: getattr(self, name) for name in ("energy", "mask", "logps", "states")} | changes
        rewards = self.rewards if rewards is None else rewards
        beside = {name: inputs.pop(name) for name in ("logps", "states")}
        base = base_of(rewards, inputs["energy"], inputs["mask"])
        return Tokens(rewards, base, prompt=torch.arange(len(rewards)) // N, beside=beside, **inputs)


def base_of(rewards, energy, mask):
    found = assign_credit(rewards, energy, mask, N, baseline="rloo_pooled")
    return found.returns - found.advantages


def learnt(seeds=range(8), **options):
    value = Value()
    for seed in seeds:
        value.update(Task(seed, **options).tokens())
    return value


def power(baseline, tokens):
    return (tokens.energy * (tokens.returns - baseline).square()).sum()


def test_it_predicts_what_the_state_tells():
    value, tokens = learnt(), Task(100).tokens()
    assert value.weight > 0.9
    assert power(value(tokens), tokens) < 0.6 * power(tokens.base, tokens)
    metrics = value.update(tokens)
    assert metrics["explained"] == pytest.approx(1 - (power(learnt()(tokens), tokens) / power(tokens.base, tokens)))
    assert metrics["weight"] == learnt().weight


def test_the_first_batch_has_the_base_alone_and_a_batch_tells_its_own_baselines_nothing():
    value, tokens = Value(), Task().tokens()
    assert torch.equal(value(tokens), tokens.base)
    assert value.update(tokens) == {"explained": 0.0, "weight": 0.0}
    before, other = value(Task(1).tokens()), Task(1)
    other.rewards = 1 - other.rewards
    # With the base held fixed, other rewards of the batch change nothing
    tokens = other.tokens()
    tokens.base = Task(1).tokens().base
    assert torch.equal(value(tokens), before)


@pytest.mark.parametrize("t", range(T))
def test_it_looks_at_nothing_from_the_token_on(t):
    value, task = learnt(), Task(100)
    expected = value(task.tokens())[:, t]
    energy, logps, states = task.energy.clone(), task.logps.clone(), task.states.clone()
    energy[:, t:], logps[:, t:] = 1.7, -9.0
    states[:, t + 1 :] = 5.0  # the state that predicts token t is of the tokens before it
    mask = task.mask.clone()
    mask[:, t + 1 :] = 0
    tokens = task.tokens()
    found = Tokens(task.rewards, tokens.base, energy, mask, tokens.prompt, {"logps": logps, "states": states})
    present = task.mask[:, t] > 0
    torch.testing.assert_close(value(found)[present, t], expected[present], atol=1e-6, rtol=0)
    assert t == 0 or (value(found)[:, t:] - value(tokens)[:, t:]).abs().max() > 1e-3 or t == T - 1


@pytest.mark.parametrize("sampler", [None, "other"])
@pytest.mark.parametrize("n", [2, 3])
def test_with_what_it_has_learnt_fixed_the_gradient_is_unbiased(n, sampler):
    """
    By all groups of a policy whose completions are all listed; on `rloo`, which compares no prompts. Another sampler's
    completions are weighted with a ratio of their own, that is with one that depends on all of their tokens.
    """
    policy = Enumeration()
    sampled = policy.probability if sampler is None else policy.probability.flip(0).sqrt()
    sampled = sampled / sampled.sum()
    ratio = (policy.probability / sampled).unsqueeze(1)
    value = Value()
    value.theta, value.weight = torch.randn(9 + 2 * V, generator=torch.Generator().manual_seed(0)), 0.7
    value._returns_seen = (-10.0, 10.0)
    rule = replace(BASELINES["value"], function=value, on_top_of="rloo")
    # A state that predicts token t: the tokens before it
    tokens = torch.tensor([[*history, 0, 0][:3] for history, _, _ in policy.completions])
    before = torch.nn.functional.one_hot(tokens, V).float() * policy.mask.unsqueeze(2)
    states = torch.nn.functional.pad(before.cumsum(1), (0, 0, 1, 0))[:, :-1]
    logps = -policy.energy.float()
    groups = torch.tensor(list(itertools.product(range(len(policy.mask)), repeat=n)))
    rows = groups.flatten()
    inputs = policy.rewards[rows].float(), policy.energy[rows].float(), policy.mask[rows]
    beside = {"logps": logps[rows], "states": states[rows]}
    weights = None if sampler is None else ratio[rows].float()
    advantages = compute_advantages(*inputs, n, baseline=rule, importance_weights=weights, **beside).double()
    estimates = ((ratio[rows] * advantages).unsqueeze(2) * policy.scores[rows]).sum(1).view(-1, n, V).mean(1)
    expected = torch.einsum("g,gv->v", sampled[groups].prod(1), estimates)
    assert (expected - policy.gradient).abs().max() < 1e-6
    plain = assign_credit(*inputs, n, baseline="rloo").advantages
    assert (advantages - plain).abs().max() > 0.1


def test_theta_is_the_weighted_least_squares_of_earlier_batches():
    """Feature by feature and token by token, with the ridge that was chosen as rows of a plain least squares."""
    value, tasks = learnt(range(3)), [Task(seed).tokens() for seed in range(3)]
    rows, targets, weights = [], [], []
    for age, tokens in enumerate(reversed(tasks)):
        for i in range(len(tokens)):
            energy = surprise = 0.0
            mean = torch.zeros(K)
            for t in range(int(tokens.mask[i].sum())):
                mean = (mean * t + tokens.states[i, t]) / (t + 1)
                sums = torch.tensor([energy, surprise, float(t)])
                row = torch.cat(
                    [torch.tensor([1.0, tokens.base[i, 0], 0.0]), sums, sums.sqrt(), tokens.states[i, t], mean]
                )
                rows.append(row)
                targets.append(tokens.returns[i, 0] - tokens.base[i, 0])
                weights.append(0.9**age * tokens.energy[i, t])
                energy += tokens.energy[i, t].item()
                surprise -= tokens.logps[i, t].item()
    x, y, w = torch.stack(rows).double(), torch.stack(targets).double(), torch.stack(weights).double()
    centred = x - (w[:, None] * x).sum(0) / w.sum()
    spread = (w[:, None] * centred.square()).sum(0)
    spread[2] = 1.0  # no rewards along the way
    solutions = []
    for ridge in Value.ridges:
        penalty = (ridge / (1 + 0.9 + 0.81) * spread).sqrt().diag()
        penalty[0] = 0
        solutions.append(
            torch.linalg.lstsq(
                torch.cat([x * w.sqrt()[:, None], penalty]),
                torch.cat([y * w.sqrt(), torch.zeros(len(penalty))]).unsqueeze(1),
            )[0]
        )
    predictions = torch.stack([x @ theta.squeeze(1) for theta in solutions])
    difference = (predictions - x @ value.theta).abs().amax(dim=1)
    assert difference.min() < 1e-3 < difference.sort().values[1]


def test_before_a_choice_of_two_the_best_baseline_is_the_chance_to_fail():
    """Then every sample's gradient is the exact one: (1 − p) (1 − B) after a success, −p (0 − B) after a failure."""
    value, g = Value(), torch.Generator().manual_seed(0)
    for _ in range(8):
        sure = (torch.arange(400) // N % 2 == 0).float()
        chance = 0.6 + 0.3 * sure
        won = (torch.rand(400, generator=g) < chance).float()
        energy = (2 * (won - chance).square()).unsqueeze(1)
        logps = (won * chance + (1 - won) * (1 - chance)).log().unsqueeze(1)
        beside = {"logps": logps, "states": torch.stack([sure, 1 - sure], dim=1).unsqueeze(1)}
        mask = torch.ones(400, 1).long()
        tokens = Tokens(won, base_of(won, energy, mask), energy, mask, torch.arange(400) // N, beside)
        baselines = value(tokens)[:, 0]
        value.update(tokens)
    torch.testing.assert_close(baselines, 1 - chance, atol=0.05, rtol=0)
    gradients = (won - chance) * (won - baselines)
    torch.testing.assert_close(gradients, chance * (1 - chance), atol=0.05, rtol=0)


def test_a_batch_in_which_the_others_returns_tell_ones_own_is_not_believed():
    """Within a batch, what the others earned and what a completion earned sum up to the same for all."""
    value, g = Value(), torch.Generator().manual_seed(0)
    tokens = Task().tokens((torch.rand(PROMPTS * N, generator=g) < 0.5).float())
    value.update(tokens)
    x, y = tokens.base.double(), tokens.returns.double()
    alone = ((x - x.mean()) * (y - x)).sum() / (x - x.mean()).square().sum()
    assert alone < -2  # what a regression on this batch says of B0
    assert -1 <= value.theta[1] <= 0


def test_how_far_it_is_believed_grows_with_success_and_shrinks_with_failure():
    value = Value()
    weights = [value.update(Task(seed).tokens())["weight"] for seed in range(5)]
    assert weights[:4] == [0.0, 0.25, 0.25, 0.5] and weights[4] > 0.9  # a single batch is no evidence
    for seed in range(5, 12):  # the opposite of all that it has learnt
        task = Task(seed)
        rewards = value(task.tokens()).mean(dim=1)
        task.rewards = (rewards < rewards.median()).float()
        value.update(task.tokens())
    assert value.weight < 0.2


@pytest.mark.parametrize("prompts", [4, 16])
def test_it_stands_back_where_states_tell_nothing(prompts):
    """Prompts of very unequal rates: what the state says of one says nothing of another."""
    of_value = of_base = 0.0
    for start in range(0, 100, 20):
        value = Value()
        for seed in range(start, start + 20):
            tokens = Task(seed, prompts=prompts, told=False).tokens()
            of_value += power(value(tokens), tokens).item()
            of_base += power(tokens.base, tokens).item()
            value.update(tokens)
    assert of_value < 1.05 * of_base


def test_on_few_prompts_no_draw_of_them_makes_it_believe_too_early():
    """In four prompts of unequal rates, states and returns agree by chance."""
    unseen = [Task(10**6 + seed, told=False).tokens() for seed in range(4)]
    of_base = sum(power(tokens.base, tokens).item() for tokens in unseen)
    for draw in range(60):
        value = Value()
        value.update(Task(1000 * draw, prompts=4, told=False).tokens())
        assert sum(power(value(tokens), tokens).item() for tokens in unseen) < 1.05 * of_base


def test_it_stays_within_the_returns_seen():
    value = learnt()
    value.theta = 100 * value.theta
    found = value(Task(100).tokens())
    assert found.min() >= 0 and found.max() <= 1
    tokens = Task(100).tokens(Task(100).rewards + 5)
    assert (value(tokens) >= 0).all() and (value(tokens) <= tokens.base).all()  # the base has left them, no further


def test_rewards_in_other_units():
    value, scaled = Value(), Value()
    for seed in range(4):
        task = Task(seed)
        value.update(task.tokens())
        scaled.update(task.tokens(100 * task.rewards))
    task = Task(100)
    torch.testing.assert_close(
        scaled(task.tokens(100 * task.rewards)), 100 * value(task.tokens()), rtol=1e-3, atol=0.05
    )


def test_rewards_along_the_way():
    """The same returns said as rewards of last tokens; and what was earned before a token is looked at."""
    task = Task(100)
    last = (task.mask.cumsum(1) == task.mask.sum(1, keepdim=True)) & (task.mask > 0)
    at_the_end = last * task.rewards.unsqueeze(1)
    beside = {"logps": task.logps, "states": task.states}
    value = learnt()
    plain = compute_advantages(task.rewards, task.energy, task.mask, N, baseline=value, **beside)
    by_token = compute_advantages(at_the_end, task.energy, task.mask, N, baseline=value, **beside)
    torch.testing.assert_close(by_token, plain, atol=1e-5, rtol=0)

    # A reward for every token that is not told by anything before, and that is known as soon as it is earned
    value, g = Value(), torch.Generator().manual_seed(0)
    for seed in range(6):
        task, rewards = Task(seed), 0.5 * torch.randn(PROMPTS * N, 1, generator=g).expand(-1, T)
        base = base_of(rewards.sum(1), task.energy, task.mask)
        beside = {"logps": task.logps, "states": task.states}
        tokens = Tokens(rewards, base.expand(-1, T), task.energy, task.mask, torch.arange(len(rewards)) // N, beside)
        explained = value.update(tokens)["explained"]
    assert explained > 0.2


def test_importance_ratios_weight_what_it_learns_and_are_not_looked_at():
    value, task = learnt(), Task(100)
    ratio = 0.5 + torch.rand(len(task.mask), 1, generator=torch.Generator().manual_seed(0))
    plain, weighted = task.tokens(), task.tokens(weights=ratio.square() * task.energy)
    assert torch.equal(value(weighted), value(plain))
    other = learnt()
    told = value.update(plain), other.update(weighted)
    assert not torch.equal(value.theta, other.theta)
    power_left = [(weighted.weights * (weighted.returns - b).square()).sum() for b in (learnt()(plain), plain.base)]
    assert told[1]["explained"] == pytest.approx((1 - power_left[0] / power_left[1]).item(), rel=1e-4)


@pytest.mark.parametrize("broken", [math.nan, -math.inf])
def test_completions_that_cannot_be_scored_and_tool_output_teach_nothing(broken):
    task, other = Task(3), Task(3)
    rewards = task.rewards.clone()
    rewards[5] = math.nan
    task.mask[7, 2:4] = other.mask[7, 2:4] = 0  # tool output
    task.states[7, 2:4] = task.logps[7, 2:4] = broken
    for name in ("energy", "logps", "states"):
        getattr(other, name)[5] = 0.3
        getattr(other, name)[7, 2:4] = 0.7
    one, two = Value(), Value()
    one.update(task.tokens(rewards))
    two.update(other.tokens(rewards))
    assert torch.equal(one.theta, two.theta) and one.theta.isfinite().all()
    assert torch.equal(learnt()(task.tokens())[7], learnt()(other.tokens())[7])
    found = compute_advantages(
        rewards, task.energy, task.mask, N, baseline=learnt(), logps=task.logps, states=task.states
    )
    assert (found[5] == 0).all() and found.isfinite().all()


def test_blocks_change_nothing_but_rounding(monkeypatch):
    value = learnt()
    monkeypatch.setattr(blocks, "LEAST", 2 * T * 16)
    found = learnt()
    tokens = Task(100).tokens()
    assert len(list(tokens.blocks())) > 5
    torch.testing.assert_close(found(tokens), value(tokens), atol=1e-4, rtol=0)


def test_what_it_has_learnt_goes_into_a_file_and_back(tmp_path):
    value, tokens = learnt(), Task(100).tokens()
    torch.save(value.state_dict(), tmp_path / "value.pt")
    again = Value()
    again.load_state_dict(torch.load(tmp_path / "value.pt", weights_only=True))
    assert torch.equal(again(tokens), value(tokens))
    assert again.update(tokens) == value.update(tokens)
    assert torch.equal(again.theta, value.theta)


@pytest.mark.parametrize("broken", [math.nan, math.inf])
def test_states_that_are_not_finite_predict_nothing_teach_nothing_and_are_said_once(broken, caplog):
    value, task, other = learnt(), Task(100), Task(100)
    task.states[0, 3, 1] = broken
    tokens = task.tokens()
    found, least = value(tokens), int(task.mask[0].sum())
    assert torch.equal(found[0, 3:least], tokens.base[0].expand(least - 3)) and found.isfinite().all()
    assert torch.equal(found[1:], value(other.tokens())[1:])
    other.energy[0, 3:] = 0.0
    expected = learnt()
    expected.update(other.tokens())
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            again = learnt()
            again.update(tokens)
            value.update(tokens)
    torch.testing.assert_close(again.theta, expected.theta, atol=1e-6, rtol=1e-3)
    assert caplog.text.count(f"before {least - 3} tokens of a generation batch are not finite") == 3

    task.states[:] = broken  # in all batches, as of a model that overflows
    value = Value()
    for _ in range(3):
        assert value.update(task.tokens())["weight"] == 0.0
    assert torch.equal(value(task.tokens()), task.tokens().base)


def test_sums_without_a_finite_solution_are_said_and_end_in_the_base(monkeypatch, caplog):
    value, tokens = learnt(), Task(101).tokens()
    with monkeypatch.context() as broken, caplog.at_level(logging.WARNING):
        broken.setattr(value, "_solution", lambda squares, products, ridge: torch.full_like(products, math.nan))
        value.update(Task(100).tokens())
    assert "discards what it has learned: its linear system has no finite solution" in caplog.text
    assert torch.equal(value(tokens), tokens.base) and value._gains == (0.0, 0.0)
    for seed in range(4):
        value.update(Task(seed).tokens())
    assert value.weight > 0.5  # and it learns again


@pytest.mark.parametrize("what", ["nothing generated", "no energy", "no reward", "one completion"])
def test_batches_that_teach_nothing(what):
    value = Value()
    task = Task(0)
    rewards = task.rewards
    if what == "nothing generated":
        task.mask = torch.zeros_like(task.mask)
    elif what == "no energy":
        task.energy = torch.zeros_like(task.energy)
    elif what == "no reward":
        rewards = torch.full_like(rewards, math.nan)
    else:
        rewards = rewards.where(torch.arange(len(rewards)) == 0, math.nan)
    value.update(task.tokens(rewards))
    tokens = Task(1).tokens()
    assert value(tokens).isfinite().all()
    for seed in range(2, 6):
        value.update(Task(seed).tokens())
    assert value.weight > 0.5 and value(tokens).isfinite().all()


@pytest.mark.parametrize("rewards", [math.nan, 0.1, 1 / 3, 1000.3])
def test_batches_without_advantages_say_nothing_about_how_far_it_is_to_be_believed(rewards):
    value, task = learnt(), Task(100)
    before = value._most_weight, value._gains, value.theta
    for _ in range(8):
        tokens = task.tokens(torch.full_like(task.rewards, rewards))
        tokens.base = tokens.base * (1 + 6e-8)  # rounding
        assert math.isnan(value.update(tokens)["explained"])
    assert (value._most_weight, value._gains) == before[:2]
    if math.isnan(rewards):  # no token has a reward: nothing else changes, either
        assert value.theta is before[2] and value._batches == learnt()._batches


def test_the_limit_goes_by_the_sum_of_gains_per_unit_of_c():
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


@pytest.mark.parametrize("level", [1e3, 1e5])
def test_returns_far_from_0_are_no_rounding(level):
    value = Value()
    for seed in range(6):
        explained = value.update(Task(seed).tokens(Task(seed).rewards + level))["explained"]
    assert explained > 0.3 and value.weight > 0.9


@pytest.mark.parametrize(("prompts", "slips"), [(2, 0.03), (4, 0.01), (16, 0.003)])
def test_where_nearly_all_succeed_it_is_believed_all_the_same(prompts, slips):
    """In many batches all returns are equal, which is no evidence against it."""

    def tokens(seed, prompts=16):
        task, g = Task(seed, prompts=prompts), torch.Generator().manual_seed(seed)
        mistakes = (torch.rand(task.mask.shape, generator=g) < slips * (torch.arange(T) < 3)).float() * task.mask
        task.energy = (0.2 + 0.2 * mistakes) * (0.5 + torch.rand(task.mask.shape, generator=g))
        task.states[..., 0] = (torch.nn.functional.pad(mistakes.cumsum(1), (1, 0))[:, :-1] > 0).float()
        return task.tokens((mistakes.sum(1) == 0).float())

    unseen = [tokens(10**6 + seed) for seed in range(20)]
    of_value = of_base = 0.0
    for draw in range(4):
        value = Value()
        for batch in range(60):
            value.update(tokens(1000 * draw + batch, prompts))
        of_value += sum(power(value(some), some).item() for some in unseen)
        of_base += sum(power(some.base, some).item() for some in unseen)
    assert of_value < 0.5 * of_base


def test_what_it_has_learnt_is_handed_out_and_taken_as_a_copy():
    value = learnt()
    state = value.state_dict()
    one, two = Value(), Value()
    one.load_state_dict(state)
    two.load_state_dict(state)
    one.update(Task(100).tokens())
    value.update(Task(101).tokens())
    assert torch.equal(two.theta, learnt().theta)
    two.update(Task(100).tokens())
    assert torch.equal(two.theta, one.theta)


def test_a_memory_of_another_model_is_named():
    value, task = learnt(), Task(100)
    task.states = torch.randn(*task.mask.shape, K + 1)
    with pytest.raises(ValueError, match="'value' has learned from 15 numbers per token, and here are 17: its state"):
        value(task.tokens())


def test_without_what_it_reads_it_says_what_is_missing():
    x = Rollouts()
    assert x.advantages(baseline="value").shape == x.mask.shape  # a new one looks at returns alone
    with pytest.raises(ValueError, match="reads `logps`, which is not available"):
        x.advantages(baseline=learnt())
    with pytest.raises(TypeError, match="unexpected keyword argument 'state'"):
        x.advantages(baseline=learnt(), state=x.energy)
