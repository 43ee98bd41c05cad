"""What `value` makes of progress: numbers of the text so far."""

import math
from dataclasses import replace

import pytest
import torch

from tests.helpers.coefficients import give_coefficients
from tests.maths.test_derivation import Enumeration, V
from tests.maths.test_value import PROMPTS, Batch, N, OnRloo, T
from trl_otb.baselines import BASELINES, Value, compute_advantages, joined, squeeze
from trl_otb.baselines.prefix import read
from trl_otb.baselines.transport import only_compared
from trl_otb.progress import Progress, Sampled


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
    state = value.centred_v(*_read(batch), value.eta) + sum(value.returns_seen) / 2
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
    value.weight, value.luck_weight, value.returns_seen = 0.7, 0.9, (-10.0, 10.0)
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
    give_coefficients(value, squeeze(inputs[0], inputs[2], n, energy=inputs[1], **more), generator=g)
    plain = compute_advantages(*inputs, n, baseline="rloo" if n > 1 else "none")
    advantages = compute_advantages(*inputs, n, baseline=rule, **more)
    torch.testing.assert_close(policy.expectation(groups, advantages), policy.gradient, atol=1e-5, rtol=0)
    silent = compute_advantages(*inputs, n, baseline=rule, **(more | {"progress": torch.zeros_like(more["progress"])}))
    assert (advantages - silent).abs().max() > 0.1 and (advantages - plain).abs().max() > 0.1
    # A number that knows the token to come, as of the text with it, is found by the same sum
    ahead = torch.cat([more["progress"][:, 1:], more["progress"][:, :1]], dim=1)
    biased = compute_advantages(*inputs, n, baseline=rule, **(more | {"progress": ahead}))
    assert (policy.expectation(groups, biased) - policy.gradient).abs().max() > 1e-3


class Functions:
    """Of letters: whatever they look at, and whatever they keep."""

    def __init__(self):
        self.kept = ["ab", "c"]  # of earlier batches

    def stateless(self, completions, **kwargs):
        return [text.count("a") - 0.7 * text.endswith("b") for text in completions]

    def comparing(self, completions, **kwargs):
        ranks = [sum(other <= text for other in completions) + 0.3 * text.count("b") for text in completions]
        return [rank / (1 + completions.count(text)) for rank, text in zip(ranks, completions, strict=True)]

    def keeping(self, completions, **kwargs):
        self.kept += completions
        return [float(sum(text in known for known in self.kept)) for text in completions]

    def failing(self, completions, **kwargs):
        return [1.0 / (text.count("a") - 2) for text in completions]


@pytest.mark.parametrize("kind", ["stateless", "comparing", "keeping", "failing"])
@pytest.mark.parametrize("n", [1, 2])
def test_what_functions_tell_is_unbiased(n, kind):
    """By all groups of a policy whose completions are all listed, some of which end early, and real calls."""
    policy = Enumeration()
    value, g = OnRloo(), torch.Generator().manual_seed(0)
    value.weight, value.luck_weight, value.returns_seen = 0.7, 0.9, (-10.0, 10.0)
    groups, inputs = policy.groups(n)
    rows, size = groups.flatten(), policy.mask.size(1)
    texts = ["".join("abc"[y] for y in history) for history, _, _ in policy.completions]

    def numbers(group, ahead=False):
        of = [texts[i] for i in group]
        at = lambda turns: [of[row][start : end + ahead] for row, start, end in turns]  # noqa: E731
        ids = [[*map(ord, text)] for text in of]
        generated = [[*range(len(text))] for text in of]
        progress = Progress({kind: getattr(Functions(), kind)}, {}, places=3, longest=3)
        found = progress.measure(Sampled(["?"] * n, {}, of, ids, generated, at))
        return torch.nn.functional.pad(found, (0, 0, 0, size - found.size(1)))

    more = {"logps": policy.logps[rows].float(), "states": torch.zeros(len(rows), size, V)}
    more["progress"] = torch.cat([numbers(group) for group in groups.tolist()])
    give_coefficients(value, squeeze(inputs[0], inputs[2], n, energy=inputs[1], **more), generator=g)
    rule = replace(BASELINES["value"], estimator=value)
    advantages = compute_advantages(*inputs, n, baseline=rule, **more)
    torch.testing.assert_close(policy.expectation(groups, advantages), policy.gradient, atol=1e-5, rtol=0)
    silent = compute_advantages(*inputs, n, baseline=rule, **(more | {"progress": torch.zeros_like(more["progress"])}))
    assert (advantages - silent).abs().max() > 0.1
    more["progress"] = torch.cat([numbers(group, ahead=True) for group in groups.tolist()])
    biased = compute_advantages(*inputs, n, baseline=rule, **more)
    assert (policy.expectation(groups, biased) - policy.gradient).abs().max() > 1e-3


def test_the_slope_at_start_is_that_of_its_definition():
    """Of A on G within prompts, at first tokens; 1 or more unless what is subtracted knows the return."""
    value, batch = learnt(), Counted(100).batch()
    left = (batch.x.returns - value.baseline_parts(*_read(batch))[0])[:, 0].view(-1, N).double()
    returns = batch.x.returns.view(-1, N).double()
    a, g = (of - of.mean(1, keepdim=True) for of in (left, returns))
    expected = ((a * g).sum() / g.square().sum()).item()
    assert batch.teach(value)["slope_at_start"] == pytest.approx(expected, abs=1e-6) and expected >= 1
    of = Counted(101)
    of.more["progress"] = of.rewards[:, None, None].expand_as(of.more["progress"]).clone()
    leaking = Value()
    for seed in range(8):
        given = Counted(seed)
        given.more["progress"] = given.rewards[:, None, None].expand_as(given.more["progress"]).clone()
        given.batch().teach(leaking)
    assert of.batch().teach(leaking)["slope_at_start"] < 0.2
    constant = Batch(torch.ones(PROMPTS * N), Counted(0).mask, **Counted(0).more)
    assert math.isnan(constant.teach(Value())["slope_at_start"])


def test_other_functions_keep_what_is_known_of_the_same_ones():
    """Of a run's functions (a, b), and then (b, c): V keeps what it knows of b and of all else."""
    value = Value()
    for seed in range(8):
        of = Counted(seed, functions=2)
        of.more["progress"] = of.more["progress"].flip(2)  # noise, then what tells
        of.batch(progress_names=("a", "b")).teach(value)
    of = Counted(100, functions=2)
    batch = of.batch(progress_names=("b", "c"))  # what tells, then noise that V knows nothing of
    power = batch.power(value) / batch.power(batch.b0.expand_as(batch.x.mask))
    assert power < 0.75 and coefficients(value, "c") == [0, 0] != coefficients(value, "b")
    batch.teach(value)
    assert all(coefficients(value, "c"))
    of.batch(progress_names=("b",), progress=of.more["progress"][..., :1]).teach(value)
    assert all(coefficients(value, "b")) and not coefficients(value, "c")
    alone = of.batch(progress=None)
    assert alone.power(value) / batch.power(batch.b0.expand_as(batch.x.mask)) > 0.85
    alone.teach(value)


def coefficients(value, function):
    """Of V, for the numbers of a function."""
    names = value.state_dict()["_value_names"][:-1]
    return [of for name, of in zip(names, value.eta.tolist(), strict=True) if name.startswith(f"progress {function}")]


def test_a_checkpoint_of_before_names_is_read():
    """Its columns have places: those of V, of functions that the checkpoint names, and of draws, which are dropped."""
    value = learnt(functions=2)
    state = value.state_dict()
    assert state["_value_names"][-4:] == ["progress 1", "progress 0 √n", "progress 1 √n", "target"]
    sums, places = state["_sums"], [*range(37), 39]
    with_draws = torch.randn(4, 40, 40, dtype=torch.float64)
    with_draws[:, torch.tensor(places).unsqueeze(1), torch.tensor(places)] = sums
    older = {name: of for name, of in state.items() if name not in ("_names", "_value_names")}
    older |= {"_sums": with_draws, "_draw_columns": 2, "delta": torch.zeros(2), "progress": ["0", "1"]}
    again, batch = Value(), Counted(100, functions=2).batch()
    again.load_state_dict(older)
    assert torch.equal(batch.baseline(again), batch.baseline(value)) and batch.teach(again) == batch.teach(value)
    assert again.state_dict().keys() == state.keys() and torch.equal(again.theta, value.theta)


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
