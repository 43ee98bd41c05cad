"""Whether the luck that `value` subtracts has mean 0: false alarms, what is found, and what follows from it."""

import copy
import logging
import math
from types import SimpleNamespace

import jaxtyping
import pytest
import torch

from tests.maths.test_derivation import Enumeration
from tests.maths.test_value import NAMES, Task, learnt
from trl_otb.baselines import Completions, Value, squeeze
from trl_otb.baselines.luck import COLUMNS, DECAYS, TOO_FAR, decayed, deviations, measured


VOCABULARY = 8


@pytest.fixture(autouse=True)
def unchecked(monkeypatch):
    """Of thousands of batches, shapes are not checked. Other tests check those."""
    monkeypatch.setattr(jaxtyping.config, "jaxtyping_disable", True)


def logits_of(kind, shape, g):
    """Of policies that are at most so sure; "nearly certain": an improbable draw may not happen in many batches."""
    if kind == "nearly certain":
        rest = 10 ** (-4 * torch.rand(*shape, 1, generator=g))
        return torch.cat([(1 - rest / 2).log(), (rest / 14).log().expand(*shape, VOCABULARY - 1)], dim=-1)
    return kind * torch.rand(*shape, 1, generator=g) * torch.randn(*shape, VOCABULARY, generator=g)


def batches(number, rows, tokens, kind, noise=0.0, group=4, drawn=None, loss="token", seed=0):
    """
    Batches of completions as `measured` reads them, `group` to a prompt, drawn by the policy or by a sampler that has
    `noise` in its logits; `drawn` makes other probabilities of the policy's, which are not recorded.
    """
    g = torch.Generator().manual_seed(seed)
    at_once = max(1, 2**16 // (rows * tokens))
    for first in range(0, number, at_once):
        many = min(at_once, number - first)
        logits = logits_of(kind, (many, max(rows // group, 1), tokens), g)
        logits = logits.repeat_interleave(min(group, rows), dim=1)
        policy = logits.softmax(-1)
        sampler = (logits + noise * torch.randn(logits.shape, generator=g)).softmax(-1)
        by = sampler if drawn is None else drawn(policy, g)
        y = torch.multinomial(by.flatten(0, -2), 1, generator=g).view(*by.shape[:-1], 1)
        pi, mu = (of.gather(-1, y).squeeze(-1) for of in (policy, sampler))
        sure = policy.square().sum(-1)
        ratio, energy = pi / mu, 1 - 2 * pi + sure
        of_loss = ratio.square() if loss == "token" else ratio.prod(-1, keepdim=True).square()
        by_token = ratio if noise and loss == "token" else torch.ones_like(ratio)
        for i in range(many):
            ones = torch.ones(rows, tokens)
            x = Completions(
                ones, ones[:, :1], ones, ones[:, :1], tokens * ones[:, :1], group, torch.arange(rows) // group,
                energy[i], (of_loss * energy)[i], pi[i].log(),
                draw_ratio=ratio[i] if noise and loss == "token" else None,
            )  # fmt: skip
            yield SimpleNamespace(known=ones > 0, sure=sure[i], luck=((sure - pi) * by_token)[i]), x


def furthest(found):
    """The largest deviation after each batch."""
    sums, largest, result = torch.zeros(len(DECAYS), len(COLUMNS), dtype=torch.float64), [1.0] * len(DECAYS), []
    for of, x in found:
        new, ratio = measured(of, x)
        sums = decayed(sums, new.double())
        largest = [max(decay * of, ratio.item()) for decay, of in zip(DECAYS, largest, strict=True)]
        of_horizons = [deviations(*of) for of in zip(sums, largest, strict=True)]
        result.append(max(far for of in of_horizons for _, _, far in of.values()))
    return torch.tensor(result)


HONEST = {
    "nearly certain, single tokens": (8, 1, "nearly certain"),
    "nearly certain": (8, 12, "nearly certain"),
    "sure": (8, 8, 6.0),
    "ratios as of vLLM": (8, 20, 3.0, 0.05),
    "ratios, nearly certain": (4, 30, "nearly certain", 0.3),
    "heavy-tailed ratios": (8, 8, 3.0, 1.0),
    "heavy-tailed ratios of few": (2, 2, 6.0, 1.0, 2),
    "one prompt": (16, 4, 4.0, 0.3, 16),
}


@pytest.mark.parametrize("case", HONEST)
def test_no_false_alarm_in_10_000_batches(case):
    assert furthest(batches(10_000, *HONEST[case])).max() < 0.9 * TOO_FAR


def test_completions_with_ratios_of_their_own_cause_no_alarm():
    """Such a ratio depends on all tokens, so that luck within a completion is correlated."""
    assert furthest(batches(5000, 8, 6, 3.0, 0.3, loss="completion")).max() < TOO_FAR


def better_of_two(policy, g):
    """The more probable of two draws."""
    less_probable = (policy.unsqueeze(-2) < policy.unsqueeze(-1)).float() @ policy.unsqueeze(-1)
    return policy * (policy + 2 * less_probable.squeeze(-1))


OTHERS = {  # what tokens are drawn from, by the policy's probabilities
    "temperature": lambda policy, g: policy.sqrt() / policy.sqrt().sum(-1, keepdim=True),
    "top-k": lambda policy, g: policy * (policy >= policy.topk(3, -1).values[..., -1:]),
    "noise": lambda policy, g: (policy.log() + torch.randn(policy.shape, generator=g)).softmax(-1),
    "resampled": better_of_two,
}


@pytest.mark.parametrize("case", OTHERS)
def test_other_samplers_are_found_within_few_batches(case):
    found = furthest(batches(60, 32, 8, 3.0, drawn=OTHERS[case]))
    assert (found > TOO_FAR).nonzero()[0].item() < 30 and found[-1] > TOO_FAR


@pytest.mark.parametrize("wrong", ["zeros", "temperature"])
def test_wrong_log_probs_of_the_sampler_are_found(wrong):
    """Zeros; or those before a temperature of 0.7."""
    found = []
    for of, x in batches(20, 16, 8, 3.0):
        sampler = torch.zeros_like(x.logps) if wrong == "zeros" else 0.7 * x.logps - 0.1
        ratio = (x.logps - sampler).exp()
        x = Completions(**vars(x) | {"draw_ratio": ratio})
        found.append((SimpleNamespace(known=of.known, sure=of.sure, luck=of.luck * ratio), x))
    assert furthest(found)[-1] > TOO_FAR


@pytest.mark.parametrize("weighted", [None, "by token", "by completion"])
def test_measured_sums_have_the_means_that_are_expected(weighted):
    """Over all completions of a policy that are listed, by their probability under the sampler."""
    policy, sampler = Enumeration(), Enumeration(scale=1.0 if weighted is None else 0.5)
    ratio = (policy.logps - sampler.logps).exp()
    loss = ratio if weighted == "by token" else ratio.prod(1, keepdim=True)
    energy = policy.energy.float()
    x = squeeze(
        policy.rewards.float(), policy.mask, 1, energy=energy, loss_energy=energy * loss.square().float(),
        logps=policy.logps.float(), draw_ratio=ratio.float() if weighted == "by token" else None,
    )  # fmt: skip
    sure = (x.energy - 1 + 2 * x.logps.exp()) * x.mask
    luck = (sure - x.logps.exp()) * x.mask * (ratio.float() if weighted == "by token" else 1)
    sums = []
    for row in range(len(x)):
        of = SimpleNamespace(known=x.mask[row : row + 1] > 0, sure=sure[row : row + 1], luck=luck[row : row + 1])
        sums.append(measured(of, x.rows(slice(row, row + 1)))[0])
    mean = dict(zip(COLUMNS, (sampler.probability.double() @ torch.stack(sums).double()).tolist(), strict=True))
    assert mean["luck"] == pytest.approx(0, abs=1e-6) and mean["excess"] == pytest.approx(0, abs=1e-6)
    if weighted is None:  # what is said of the variance is at least what it is
        assert 0 < mean["luck_squares"] <= mean["luck_bound"] < 2 * mean["luck_squares"]


def unlucky(seed):
    """A batch whose tokens were drawn from another distribution than energies and log-probs say."""
    task = Task(seed, seen=True)
    task.energy, task.logps = task.energy - task.mask * 0.1, task.logps - 0.1
    return task.batch()


def test_luck_is_left_out_from_the_next_batch_on(caplog):
    value, other = learnt(seen=True), learnt(seen=True)
    assert value.luck_weight > 0.9 and not value.luck_check.luck_left_out
    batch, before = Task(100, seen=True).batch(), None
    with caplog.at_level(logging.WARNING):
        for seed in range(200, 230):
            before = unlucky(seed).baseline(value), value.luck_weight
            found = unlucky(seed).teach(value)
            if found["luck_left_out"]:
                break
    assert before[1] > 0 and value.luck_weight == 0 and seed < 215
    assert "Later luck is not subtracted from now on: luck per token has a mean of" in caplog.text
    assert "and 0 is expected" in caplog.text and abs(found["luck_mean"]) > 0.03
    off = torch.zeros(batch.x.mask.shape)
    without = Task(100, seen=True).batch(draw_ratio=off)
    assert torch.equal(batch.baseline(value), without.baseline(value))  # the prediction is all that is used
    assert (batch.baseline(other) - without.baseline(other)).abs().max() > 0.1
    assert of_power(batch, value) < 0.8  # and it is fitted by itself
    # A reset for the sake of rewards says nothing of draws
    value.reset("of a test")
    assert value.luck_check.luck_left_out and value.luck_check.draws.abs().sum() > 0
    # And back, where the cause has gone
    for seed in range(300, 900):
        if not Task(seed, seen=True).batch().teach(value)["luck_left_out"]:
            break
    assert "Later luck is subtracted again" in caplog.text and value.luck_weight > 0.5


def of_power(batch, value):
    return batch.power(value) / batch.power(batch.b0)


def test_checkpoints_hold_what_was_measured_of_luck():
    value = learnt(seen=True)
    for seed in range(200, 230):
        unlucky(seed).teach(value)
    state = value.state_dict()
    again = Value()
    again.load_state_dict(copy.deepcopy(state))
    assert again.luck_check.luck_left_out and torch.equal(again.luck_check.draws, value.luck_check.draws)
    batch = Task(100, seen=True).batch()
    assert torch.equal(batch.baseline(again), batch.baseline(value))
    older = {name: of for name, of in state.items() if name not in ("_draws", "_largest_ratios", "_luck_left_out")}
    of_before = Value()
    of_before.load_state_dict(older)  # of 0.9.5
    assert not of_before.luck_check.luck_left_out and of_before.luck_check.draws.sum() == 0
    assert torch.equal(of_before.theta, value.theta)
    of_before.load_state_dict(older | {"_largest_ratio": 7.0})  # of 0.11.1
    assert of_before.luck_check.largest_ratios.tolist() == [7.0, 7.0]


def test_unknown_draws_are_not_measured():
    value = Value()
    for seed in range(8):
        found = Task(seed, seen=True).batch(draw_ratio=torch.zeros(Task(seed).mask.shape)).teach(value)
    assert math.isnan(found["luck_mean"]) and found["luck_left_out"] == 1 and value.luck_check.draws.sum() == 0
    assert not value.luck_check.luck_left_out and set(found) == {*NAMES}


def test_broken_numbers_do_not_end_the_measuring():
    """Energies and states that are not finite, and ratios beyond float32's squares."""
    value = Value()
    for seed in range(6):
        task = Task(seed, seen=True)
        ratio = torch.ones(task.mask.shape)
        if seed < 2:
            task.energy[3, 2], task.states[5, 1], task.logps[7, 0] = math.nan, math.inf, -math.inf
            ratio[9, 1], ratio[11, 0], ratio[13, 0] = 1e30, math.inf, math.nan
        found = task.batch(draw_ratio=ratio if seed == 0 else None).teach(value)
    assert value.luck_check.draws.isfinite().all() and math.isfinite(found["luck_mean"]) and not found["luck_left_out"]
