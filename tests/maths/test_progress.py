"""What `value` makes of progress: numbers of the text so far."""

import math
from dataclasses import replace

import pytest
import torch

from tests.maths.test_derivation import Enumeration, V
from tests.maths.test_value import PROMPTS, Batch, N, OnRloo, T
from trl_otb.baselines import BASELINES, Value, compute_advantages, joined, squeeze
from trl_otb.baselines import value as module
from trl_otb.baselines.least_squares import solution
from trl_otb.baselines.prefix import read
from trl_otb.baselines.transport import only_compared


class Counted:
    """Completions of random tokens, of which the return counts the good ones; states and log-probs tell nothing."""

    def __init__(self, seed, prompts=PROMPTS, functions=1, told=True):
        g = torch.Generator().manual_seed(seed)
        rows = prompts * N
        self.mask = torch.ones(rows, T)
        for row, length in enumerate(torch.randint(T // 2, T + 1, (rows,), generator=g)):
            self.mask[row, length:] = 0
        good = torch.randint(2, (rows, T), generator=g).float() * self.mask
        self.rewards = good.sum(1) / T
        before = torch.nn.functional.pad(good.cumsum(1), (1, 0))[:, :-1]
        noise = torch.randn(rows, T, functions, generator=g)
        noise[..., 0] = before if told else 0.0
        self.more = {
            "energy": torch.full((rows, T), 0.5),
            "logps": torch.full((rows, T), math.log(0.5)),
            "states": torch.randn(rows, T, 3, generator=g),
            "progress": noise,
        }

    def batch(self, **changes):
        given = {key: value for key, value in (self.more | changes).items() if value is not None}
        return Batch(self.rewards, self.mask, **given)


def learnt(seeds=range(8), **kind):
    value = Value()
    for seed in seeds:
        Counted(seed, **kind).batch().teach(value)
    return value


def test_value_predicts_what_progress_tells():
    """
    The return counts the good ones of 6 to 12 fair coins. On average half of them are before a token, and progress
    counts these: half of the power is left, and what is not known of the length.
    """
    told, silent = (learnt(told=told) for told in (True, False))
    powers = []
    for value, is_told in ((told, True), (silent, False)):
        batch = Counted(100, told=is_told).batch()
        powers.append(batch.power(value) / batch.power(batch.b0.expand_as(batch.x.mask)))
    assert powers[0] < 0.75 and powers[1] > 0.85


def test_r2_at_the_end_is_that_of_v_before_the_last_token():
    value, batch = learnt(), Counted(100).batch()
    last = (batch.x.mask.cumsum(1) * batch.x.mask).argmax(1)
    state = value._centred_v(*_read(batch), value.eta) + sum(value._returns_seen) / 2
    predicted, returns = state.gather(1, last.unsqueeze(1))[:, 0].double(), batch.x.returns[:, 0].double()
    expected = 1 - (returns - predicted).square().sum() / (returns - returns.mean()).square().sum()
    found = batch.teach(value)["r2_at_end"]
    assert found == pytest.approx(expected.item(), abs=1e-4) and found > 0.5
    assert math.isnan(batch.teach(Value())["r2_at_end"])  # before V is fitted
    constant = Batch(torch.ones(PROMPTS * N), Counted(0).mask, **Counted(0).more)
    assert math.isnan(constant.teach(learnt())["r2_at_end"])


def _read(batch):
    return read(batch.x), batch.b0


def test_progress_after_a_token_does_not_matter_to_it():
    """The baseline of token t depends on numbers up to its own, which are of the text before it."""
    value, batch = learnt(), Counted(100)
    before = batch.batch().baseline(value)
    changed = batch.more["progress"].clone()
    changed[:, 7:] += 1.0
    after = batch.batch(progress=changed).baseline(value)
    assert torch.equal(before[:, :7], after[:, :7])
    later = (batch.mask[:, 7:] > 0) & (before[:, 7:] != after[:, 7:])
    assert later.any()


@pytest.mark.parametrize("n", [1, 2, 3])
def test_what_it_subtracts_is_unbiased_with_progress(n):
    """By all groups of a policy whose completions are all listed; progress is a function of the tokens so far."""
    policy = Enumeration()
    value, g = OnRloo(), torch.Generator().manual_seed(0)
    value.eta, value.theta, value.gamma = (torch.randn(k, generator=g) for k in (9 + 2 * V + 2 + 4, 23, 14))
    value.weight, value.luck_weight, value._returns_seen = 0.7, 0.9, (-10.0, 10.0)
    rule = replace(BASELINES["value"], estimator=value)
    number = {}  # of each text, two random ones

    def of_text(text):
        return number.setdefault(text, torch.randn(2, generator=g))

    size = policy.mask.size(1)
    progress = torch.stack(
        [
            torch.stack([of_text(history[:t]) if t < len(history) else torch.zeros(2) for t in range(size)])
            for history, _, _ in policy.completions
        ]
    )
    groups, inputs = policy.groups(n)
    rows = groups.flatten()
    states = torch.zeros(len(rows), size, V)
    more = {"logps": policy.logps[rows].float(), "states": states, "progress": progress[rows]}
    plain = compute_advantages(*inputs, n, baseline="rloo" if n > 1 else "none")
    advantages = compute_advantages(*inputs, n, baseline=rule, **more)
    torch.testing.assert_close(policy.expectation(groups, advantages), policy.gradient, atol=1e-5, rtol=0)
    silent = compute_advantages(*inputs, n, baseline=rule, **(more | {"progress": torch.zeros_like(more["progress"])}))
    assert (advantages - silent).abs().max() > 0.1 and (advantages - plain).abs().max() > 0.1
    # A number that knows the token to come, as of the text with it, is found by the same sum
    ahead = torch.cat([more["progress"][:, 1:], more["progress"][:, :1]], dim=1)
    biased = compute_advantages(*inputs, n, baseline=rule, **(more | {"progress": ahead}))
    assert (policy.expectation(groups, biased) - policy.gradient).abs().max() > 1e-3


def test_other_functions_keep_what_is_known_of_the_same_ones():
    """Of a checkpoint's functions (a, b) and the run's (b, c): V keeps what it knows of b and of all else."""
    value = Value()
    for seed in range(8):
        of = Counted(seed, functions=2)
        of.more["progress"] = of.more["progress"].flip(2)  # noise, then what tells
        of.batch().teach(value)
    value.use_progress(["a", "b"], ["b", "c"])
    of = Counted(100, functions=2)
    batch = of.batch()  # what tells, then noise that V knows nothing of
    power = batch.power(value) / batch.power(batch.b0.expand_as(batch.x.mask))
    assert power < 0.75 and value.eta[-1] == 0
    batch.teach(value)
    assert value.eta[-1] != 0
    value.use_progress(["b", "c"], ["b"])
    ridge = torch.full((len(value.eta),), value.ridge_of_v, dtype=torch.float64)
    ridge[11:-2] *= 4  # of states, as in training
    assert torch.equal(value.eta, solution(value._value_sums, ridge))
    value.use_progress(["b"], [])
    assert torch.equal(value.eta, solution(value._value_sums, value.ridge_of_v))
    value.use_progress([], ["d"])  # which has told nothing
    assert torch.equal(value.eta, solution(value._value_sums, value.ridge_of_v))
    value.use_progress(["d"], [])
    alone = of.batch(progress=None)
    assert alone.power(value) / batch.power(batch.b0.expand_as(batch.x.mask)) > 0.85
    alone.teach(value)
    Value().use_progress(["a"], ["b"])  # nothing to keep


def test_completions_carry_progress_row_by_row():
    of = Counted(0, prompts=2)
    x = of.batch().x
    tools = of.mask.clone()
    tools[:, 2] = 0
    squeezed = squeeze(of.rewards, tools, N, **of.more)
    assert torch.equal(squeezed.progress[:, 2, 0], of.more["progress"][:, 3, 0] * tools[:, 3])
    both = joined([x, squeezed])
    assert both.progress.shape == (len(x) * 2, T, 1)
    assert joined([x, of.batch(progress=None).x]).progress is None
    assert only_compared(x, tokens=True).progress is None and x.totals().progress is None
    assert BASELINES["value"].needs >= {"progress"}


class WithDraws(Counted):
    """Fair coins, of each of which the draw is known: by how much it is better than a coin is on average."""

    def __init__(self, *args, **kind):
        super().__init__(*args, **kind)
        before = self.more["progress"][..., 0]
        good = torch.diff(before, dim=1, append=(self.rewards * T).unsqueeze(1)) * self.mask
        self.more["progress_draws"] = ((good - 0.5) * self.mask).unsqueeze(2)


def test_the_luck_of_draws_is_subtracted_from_earlier_tokens():
    """Before a token progress tells the coins that fell, after it their draws: what is left is its own, and length."""
    powers = []
    for kind in (Counted, WithDraws):
        value = Value()
        for seed in range(8):
            found = kind(seed).batch().teach(value)
        batch = kind(100).batch()
        powers.append(batch.power(value) / batch.power(batch.b0.expand_as(batch.x.mask)))
    assert powers[1] < 0.5 * powers[0]
    assert found["draw_weight"] > 0.5 and value.delta.numel() == 2
    # Of the last token nothing comes later
    whole, last = batch.baseline(value), (batch.x.mask.cumsum(1) == batch.x.lengths) * batch.x.mask > 0
    value.draw_weight = 0.0
    without = batch.baseline(value)
    assert torch.equal(whole[last], without[last]) and not torch.equal(whole, without)
    # The part that a page shows
    value.draw_weight = 1.0
    torch.testing.assert_close(value.later_luck(batch.x, batch.b0), batch.baseline(value) - _state(value, batch))


def _state(value, batch):
    return value._baseline(*_read(batch))[0]


def test_draws_come_and_go():
    """A run may begin or end to have draws: what is known of all else is kept."""
    value = learnt()
    assert value.delta is None and value._draw_columns == 0
    theta = value.theta.clone()
    of = WithDraws(8).batch()
    assert torch.equal(of.baseline(value), Counted(8).batch().baseline(value))
    found = of.teach(value)
    assert found["draw_weight"] == 0.0 and value.delta.numel() == 2 and value.theta.shape == theta.shape
    state = value.state_dict()
    other = Value()
    other.load_state_dict({name: of for name, of in state.items() if name not in module.OF_0_11})  # of before 0.11
    assert other.delta is None and torch.equal(other.theta, value.theta)
    value.use_progress(["a"], ["b"])
    assert value.delta is None and value.draw_weight == 0.0
    Counted(9).batch().teach(value)
    assert value._sums.size(-1) == 23 + 14 + 1


@pytest.mark.parametrize("weighted", [None, "by token"])
@pytest.mark.parametrize("n", [1, 2])
def test_draws_of_progress_are_unbiased(n, weighted):
    """
    By all groups of a policy whose completions are all listed: D = f(y) − Σ_v π(v) f(v), with f 0 for the least likely
    token. By token another policy samples, of which D is, too, ρ times; without ρ it would be biased.
    """
    policy, sampler = Enumeration(), Enumeration(scale=1.0 if weighted is None else 0.5)
    ratio = (policy.logps - sampler.logps).exp()
    value, g = OnRloo(), torch.Generator().manual_seed(0)
    value.eta, value.theta, value.gamma, value.delta = (
        torch.randn(k, generator=g) for k in (9 + 2 * V + 2 + 2, 23, 14, 2)
    )
    value.weight, value.luck_weight, value.draw_weight, value._returns_seen = 0.7, 0.9, 1.0, (-10.0, 10.0)
    rule = replace(BASELINES["value"], estimator=value)
    gains, number = {}, {}
    size, count = policy.mask.size(1), len(policy.completions)
    progress, draws = torch.zeros(count, size, 1), torch.zeros(count, size, 1)
    for i, (history, _, scores) in enumerate(policy.completions):
        for t, (y, score) in enumerate(zip(history, scores, strict=True)):
            pi = torch.nn.functional.one_hot(torch.tensor(y), V) - score
            f = gains.setdefault(history[:t], torch.randn(V, generator=g, dtype=torch.float64)).clone()
            f[pi.argmin()] = 0.0
            progress[i, t] = number.setdefault(history[:t], torch.randn(1, generator=g))
            draws[i, t] = f[y] - pi @ f
    groups, inputs = policy.groups(n)
    rows = groups.flatten()

    def expected(**changes):
        weights = None if weighted is None else ratio[rows].float()
        more = {"logps": policy.logps[rows].float(), "states": torch.zeros(len(rows), size, V)}
        more |= {"progress": progress[rows], "progress_draws": draws[rows]} | changes
        if weighted is not None:
            more.setdefault("draw_ratio", ratio[rows].float())
        advantages = compute_advantages(*inputs, n, baseline=rule, importance_weights=weights, **more)
        return advantages, sampler.expectation(groups, ratio[rows] * advantages, policy.scores)

    advantages, found = expected()
    rules = "rloo" if n > 1 else "none"
    plain = compute_advantages(*inputs, n, baseline=rules)
    gradient = sampler.expectation(groups, ratio[rows] * plain, policy.scores)
    torch.testing.assert_close(found, gradient, atol=1e-5, rtol=0)
    assert (expected(progress_draws=torch.zeros(len(rows), size, 1))[0] - advantages).abs().max() > 0.1
    off_centre = draws[rows] + 0.01
    assert (expected(progress_draws=off_centre)[1] - gradient).abs().max() > 1e-3
    if weighted == "by token":
        assert (expected(draw_ratio=torch.ones(len(rows), size))[1] - gradient).abs().max() > 1e-3
