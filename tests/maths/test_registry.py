"""The registry of baselines, and baselines of a user's own."""

import sys

import numpy as np
import pytest
import torch

import trl_otb
from tests.helpers.oracles import DEFINITIONS, ESTIMATORS, RandomBatch
from trl_otb.baselines import BASELINES, Value, find_baseline, gathered, subtract
from trl_otb.baselines.completions import MIN_WEIGHT
from trl_otb.run.baseline import RunBaseline


pytestmark = pytest.mark.usefixtures("registry")


def own_otb(x):
    """The paper's, written as a user would."""
    return x.mean(x.energy.cumsum(-1) * x.mask)


def plain_mean(x):
    return x.mean(x.mask)


def test_baselines_have_docstring_and_oracle():
    assert {*ESTIMATORS} <= {*DEFINITIONS}
    for entry in map(find_baseline, BASELINES):
        docstring = entry.estimator.__doc__
        assert "B" in docstring and "ω" not in entry.summary and entry.summary.startswith("Per ")
        assert "biased" in docstring.lower(), f"{entry.name} does not say whether it is biased"


@pytest.mark.parametrize("dense", [False, True], ids=["terminal", "dense"])
def test_registered_imported_given_are_same(dense, tmp_path, monkeypatch):
    (tmp_path / "mine.py").write_text("def weighted(x):\n    return x.mean(x.energy.cumsum(-1) * x.mask)\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    assert trl_otb.register_baseline("mine")(own_otb) is own_otb
    x = RandomBatch()
    rewards = torch.randn_like(x.energy) * x.mask if dense else x.rewards
    expected = x.advantages(rewards, baseline="otb_no_zero_tail")
    for baseline in ("mine", own_otb, "mine:weighted", find_baseline("mine")):
        torch.testing.assert_close(x.advantages(rewards, baseline=baseline), expected, atol=1e-6, rtol=0)


def test_flags_say_what_a_baseline_sees():
    seen = {}

    @trl_otb.register_baseline("mine", needs="logps", per_token=False, scope="batch", scalable=True)
    def mine(x):
        seen["rows"] = len(x)
        return x.returns.view(-1, x.num_generations).mean(1).repeat_interleave(x.num_generations).unsqueeze(1)

    entry, x = find_baseline(mine), RandomBatch()
    assert entry is BASELINES["mine"] and (entry.needs, entry.scalable, entry.unbiased) == ({"logps"}, True, False)
    found = subtract(entry, x.completions())
    assert found.advantages.shape == (12, 1) and seen == {"rows": 12}
    torch.testing.assert_close(x.advantages(baseline="mine"), x.advantages(baseline="group_mean"))


@pytest.mark.parametrize("result", [0.0, torch.zeros(12), torch.zeros(1, 1), torch.zeros(12, 1), "NaN without tokens"])
def test_whatever_fits_is_broadcast(result):
    x = RandomBatch()
    x.mask[:, 8:] = 0

    def mine(c):
        return 0.0 / c.mask.double() if isinstance(result, str) else result

    torch.testing.assert_close(x.advantages(baseline=mine), x.rewards.unsqueeze(1) * x.mask)
    assert (subtract(find_baseline(mine), x.completions()).baselines == 0).all()


@pytest.mark.parametrize(
    ("baseline", "message"),
    [
        (lambda x: x.returns[:2], r"'.*lambda.*' returned a result of shape \(2, 1\).*\(B, T\) = \(12, 12\)"),
        (lambda x: None, "returned a result of type NoneType"),
        (lambda x: x.energy * torch.nan, "returned nan for completion 0, token 0: it must be finite"),
        ("totals", r"'totals' returned a result of shape \(12, 12\).*\(B, 1\) = \(12, 1\)"),
        ("vlaue", "'vlaue': it must be one of 'otb', .*, a name registered with .* Did you mean 'value'"),
        ("unfinished:baseline", "cannot be imported: NameError: name 'undefined'.*Write 'module:function'"),
        ("math:absent", "'math:absent', which cannot be imported: AttributeError"),
        ("math:pi", "'math:pi'.* is a float: it must be a function"),
        (3, "`baseline` is 3"),
    ],
)
def test_wrong_baselines_and_results_are_named(baseline, message, tmp_path, monkeypatch):
    (tmp_path / "unfinished.py").write_text("baseline = undefined\n")
    monkeypatch.syspath_prepend(tmp_path)
    trl_otb.register_baseline("totals", per_token=False)(lambda x: torch.zeros(12, 12))
    with pytest.raises((TypeError, ValueError), match=message):
        RandomBatch(tools=False).advantages(baseline=baseline)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ({"name": "a:b"}, "must be nonempty text without a colon"),
        ({"needs": ("logps", "state")}, "`needs.*'state'.*: .* must be some of 'energy'"),
        ({"scope": "prompt"}, "`scope='prompt'`: .*'group' or 'batch'"),
        ({"name": "otb"}, r"'otb' is already registered by trl_otb\.baselines\.means\.otb"),
        ({}, r"'mine' is already registered by tests\.maths\.test_registry\.own_otb"),
    ],
)
def test_names_and_flags_are_checked(flags, message):
    for _ in range(2):  # a notebook's cell, run again
        trl_otb.register_baseline("mine")(own_otb)
    with pytest.raises(ValueError, match=message):
        trl_otb.register_baseline(**{"name": "mine", **flags})(plain_mean)


@pytest.mark.parametrize("name", ["energy", "loss_energy", "logps", "states", "prompt_key"])
def test_undeclared_needs_cannot_be_read(name):
    trl_otb.register_baseline("mine", needs=())(lambda x: x.mean(x.need(name)))
    with pytest.raises(ValueError, match=f"reads `{name}`, which is not there"):
        RandomBatch().advantages(baseline="mine")


class Learns:
    """Per completion: nothing."""

    def __init__(self, told=None, state=None):
        self.told, self.state = told, {} if state is None else state

    def __call__(self, x):
        return 0.0

    def update(self, local, b0, gather):
        return self.told

    def state_dict(self):
        return self.state

    def load_state_dict(self, state):
        self.state = state


SHARED = Learns()


@pytest.mark.parametrize(
    ("entry", "message"),
    [
        (3, "'mine' is a int: "),
        (type("Forgets", (), {"__call__": own_otb}), "'mine' is a class: it lacks methods .* see `help"),
        (SHARED, "'mine' is a Learns: all trainers would share what this instance learns. Give the class"),
    ],
)
def test_uncallable_or_shared_baselines_are_errors(entry, message):
    with pytest.raises(TypeError, match=message):
        trl_otb.register_baseline("mine")(entry)
    with pytest.raises(TypeError, match="'tests.maths.test_registry:SHARED' is a Learns: all trainers would"):
        find_baseline("tests.maths.test_registry:SHARED")


def test_trainers_get_instances_with_class_flags():
    trl_otb.register_baseline("mine", needs=(), scope="batch", unbiased=True)(Learns)
    entry = find_baseline("mine")
    one, two = entry.instance(), entry.instance()
    assert isinstance(one.estimator, Learns) and one.estimator is not two.estimator and one.learns and not one.adjusts
    of_instance = find_baseline(one.estimator)
    assert of_instance.estimator is one.estimator and (of_instance.scope, of_instance.unbiased) == ("batch", True)
    assert of_instance.instance().estimator is one.estimator
    assert find_baseline("value").adjusts and find_baseline("value").instance().adjusts


def test_base_may_be_per_token():
    """Of other processes a class with `adjust` sees returns and lengths alone."""
    trl_otb.register_baseline("mine", scope="batch")(type("Mine", (Value,), {}))
    x = RandomBatch()
    x.rewards = torch.randn_like(x.energy) * x.mask

    def twice(own, tokens):
        return gathered(own, lambda values: torch.cat([values, values]), tokens)

    found = subtract(find_baseline("mine").instance(), x.completions(), twice, slice(12, 24))
    assert found.b0.shape == found.advantages.shape == (12, 12)


def test_what_an_update_returns_is_numbers():
    x = RandomBatch().completions()
    learnt = RunBaseline(find_baseline(Learns({"a": torch.tensor(2.0), 3: True}))).learn(x, x.returns)
    assert learnt == {"Learns/a": 2.0, "Learns/3": 1.0}
    assert RunBaseline(find_baseline(Learns())).learn(x, x.returns) == {}


@pytest.mark.parametrize("state", [[1], {"a": Learns}, {"a": np.ones(2)}], ids=["list", "class", "array"])
def test_state_returns_from_checkpoint(state):
    with pytest.raises(ValueError, match="'Learns' returned a .* from `state_dict`.*: it must return a `dict` of"):
        RunBaseline(find_baseline(Learns(state=state))).state_dict()
    kept = {"a": torch.ones(2), "b": {7: (0.5, "text")}}
    assert str(RunBaseline(find_baseline(Learns(state=kept))).state_dict()["state"]) == str(kept)


@pytest.mark.parametrize("baseline", ESTIMATORS)
def test_no_baseline_needs_subnormal_numbers(baseline):
    """GPUs flush them to zero, and so does this test where the CPU can."""
    assert MIN_WEIGHT > torch.finfo(torch.float32).tiny
    lone = RandomBatch(groups=1, n=2, tools=False)
    lone.mask[:] = 0
    lone.mask[0] = lone.mask[1, 0] = 1  # one goes on alone, and left out of its own baseline it leaves nobody
    try:
        torch.set_flush_denormal(True)
        for energy in (lone.energy, torch.zeros_like(lone.energy)):
            assert lone.advantages(energy=energy, baseline=baseline).isfinite().all()
    finally:
        torch.set_flush_denormal(False)


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_nonfinite_energy_is_named(value):
    x = RandomBatch(tools=False)
    x.mask[5, :4] = 1
    x.energy[5, 3] = value
    with pytest.raises(ValueError, match=f"The energy of completion 5, token 3, is {value}"):
        x.advantages(baseline="ogb")
    assert x.advantages(baseline="group_mean").isfinite().all()  # which reads none
    x.mask[5, 3] = 0
    assert x.advantages(baseline="ogb").isfinite().all()
