"""The register of baselines, and baselines of a user's own."""

import sys

import numpy as np
import pytest
import torch

import trl_otb
from tests.helpers.oracles import WEIGHTS, Rollouts
from trl_otb.baselines import BASELINES, Completions, assign_credit, check_options, find_baseline


pytestmark = pytest.mark.usefixtures("registry")
GROUP = Completions(*torch.zeros(3, 4), num_generations=2)


def own_otb(group):
    """The paper's, written as a user would."""
    return group.mean(group.energy.cumsum(-1) * group.present)


def test_every_baseline_has_a_specification_and_an_oracle():
    assert set(WEIGHTS) == set(BASELINES)
    for entry in BASELINES.values():
        docstring = entry.function.__doc__
        assert "B" in docstring and "ω" not in entry.summary and entry.summary.startswith("Per ")
        assert "biased" in docstring.lower(), f"{entry.name} does not say whether it is biased"


@pytest.mark.parametrize("leave_one_out", [False, True])
@pytest.mark.parametrize("dense", [False, True], ids=["terminal", "dense"])
def test_a_function_registered_imported_or_given_is_the_same_baseline(dense, leave_one_out, tmp_path, monkeypatch):
    (tmp_path / "mine.py").write_text(
        "def weighted(group):\n    return group.mean(group.energy.cumsum(-1) * group.present)\n"
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    trl_otb.register_baseline("mine")(own_otb)
    x = Rollouts()
    rewards = torch.randn_like(x.energy) * x.mask if dense else x.rewards
    expected = x.advantages(rewards, baseline="otb", zero_tail=leave_one_out, leave_one_out=leave_one_out)
    for baseline in ("mine", own_otb, "mine:weighted"):
        actual = x.advantages(rewards, baseline=baseline, leave_one_out=leave_one_out)
        torch.testing.assert_close(actual, expected, atol=1e-6, rtol=0)


def test_the_decorator_returns_the_function_and_takes_flags():
    @trl_otb.register_baseline("mean", per_token=False, uses_energy=False)
    def mean(group):
        return group.returns.mean(1, keepdim=True)

    assert mean.__name__ == "mean" and not find_baseline("mean").uses_energy
    x = Rollouts()
    credit = assign_credit(x.rewards, x.energy, x.mask, x.n, baseline="mean")
    assert credit.advantages.shape == (12, 1)
    torch.testing.assert_close(x.advantages(baseline="mean"), x.advantages(baseline="group_mean"))


@pytest.mark.parametrize(
    "baseline",
    [
        lambda g: 0.0,
        lambda g: torch.zeros(()),
        lambda g: torch.zeros(12),
        lambda g: torch.zeros(3, 1, 1),
        lambda g: torch.zeros(3, 4, 12, dtype=torch.float64),
    ],
    ids=["number", "scalar", "(T,)", "(G, 1, 1)", "(G, N, T)"],
)
def test_whatever_fits_is_broadcast(baseline):
    x = Rollouts()
    expected = x.rewards.unsqueeze(1) * x.mask
    torch.testing.assert_close(x.advantages(baseline=baseline), expected)


def nan_at_the_end(group):
    return torch.where(group.present.sum(1, keepdim=True) == 0, torch.nan, group.mean(group.present))


def test_values_that_no_token_is_compared_with_may_be_nan():
    x = Rollouts()
    x.mask[:, 8:] = 0
    assert x.advantages(baseline=nan_at_the_end).isfinite().all()


@pytest.mark.parametrize(
    ("baseline", "message"),
    [
        (lambda g: g.returns[:2], r"'.*lambda.*' returned a tensor of shape \(2, 4, 1\).*\(G, N, T\) = \(3, 4, 12\)"),
        (lambda g: torch.zeros(3, 4, 13), r"of shape \(3, 4, 13\)"),
        (lambda g: None, "returned a NoneType"),
        (lambda g: "0", "returned a str"),
        (lambda g: g.returns * torch.inf, r"returned -?inf for prompt 0, completion 0, token 0: it must be finite"),
        (lambda g: g.energy.sum(1, keepdim=True) * torch.nan, "returned nan for prompt 0, completion 0, token 0"),
        (lambda g: g.energy * 1j, "returned a tensor of torch.complex64.*: it must be one of real numbers, and dense"),
        (lambda g: g.energy.to_sparse(), "with layout torch.sparse_coo: it must be one of real numbers, and dense"),
    ],
)
def test_what_a_function_returns_is_checked(baseline, message):
    with pytest.raises(ValueError, match=message):
        Rollouts(tools=False).advantages(baseline=baseline)


def test_one_number_per_completion_must_be_one():
    trl_otb.register_baseline("mine", per_token=False)(lambda group: group.energy)
    with pytest.raises(ValueError, match=r"'mine' returned a tensor of shape \(3, 4, 12\).*\(G, N, 1\) = \(3, 4, 1\)"):
        Rollouts().advantages(baseline="mine")


@pytest.mark.parametrize(
    ("baseline", "message"),
    [
        ("vlaue", "'vlaue': it must be one of .* Did you mean 'value'"),
        (
            "absent",
            "'absent': it must be one of 'otb', .*'group_mean'.*, a name registered with .* or 'module:function'",
        ),
        ("nowhere:f", "'nowhere:f', which cannot be imported: ModuleNotFoundError: No module named 'nowhere'"),
        ("math:absent", "'math:absent', which cannot be imported"),
        ("math:pi", "'math:pi', which is a float: it must be a function"),
        (":f", "':f', which cannot be imported"),
        (3, "`baseline` is 3"),
    ],
)
def test_a_baseline_that_is_not_there(baseline, message):
    with pytest.raises(ValueError, match=message):
        Rollouts().advantages(baseline=baseline)


def test_a_module_that_fails_when_it_is_imported(tmp_path, monkeypatch):
    (tmp_path / "unfinished.py").write_text("baseline = undefined\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ValueError, match="cannot be imported: NameError: name 'undefined'.*Write 'module:function'"):
        Rollouts().advantages(baseline="unfinished:baseline")


@pytest.mark.parametrize("name", ["", "a:b", None])
def test_names_that_cannot_be(name):
    with pytest.raises(ValueError, match="must be nonempty text without a colon"):
        trl_otb.register_baseline(name)


class Remembers:
    """Per completion: nothing."""

    def __init__(self, told=None, state=None):
        self.told, self.state = told, {} if state is None else state

    def __call__(self, group):
        return 0.0

    def update(self, group):
        return self.told

    def state_dict(self):
        return self.state

    def load_state_dict(self, state):
        self.state = state


class NeedsMore(Remembers):
    def __init__(self, decay):
        super().__init__()


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (lambda group, other: 0.0, r"'mine' takes \(group, other\): it is called with one argument, the group"),
        (lambda: 0.0, r"'mine' takes \(\): it is called with one argument"),
        (NeedsMore, r"'mine' takes \(decay\): it is called with no arguments"),
        (
            Remembers(),
            "'mine' is an instance of Remembers, and all trainers would share what it remembers. Give the cl",
        ),
    ],
)
def test_what_cannot_be_called_or_would_be_shared_is_not_registered(function, message):
    with pytest.raises(TypeError, match=message):
        trl_otb.register_baseline("mine")(function)


def test_an_instance_in_a_module_would_be_shared_too(tmp_path, monkeypatch):
    (tmp_path / "shared.py").write_text("from tests.maths.test_registry import Remembers\n\nmine = Remembers()\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(TypeError, match="'shared:mine' is an instance of Remembers"):
        find_baseline("shared:mine")


@pytest.mark.parametrize("told", [[1, 2], 3.0, {"a": "text"}, {"a": None}, {"a": torch.ones(2)}], ids=str)
def test_what_a_baseline_tells_is_numbers(told):
    with pytest.raises(ValueError, match=r"'Remembers' returned .* from `update`: it must return a `dict` of numbers"):
        find_baseline(Remembers(told)).learn(GROUP)


def test_numbers_of_any_kind_may_be_told():
    told = {"a": torch.tensor(2.0), "b": True, 3: 4}
    assert find_baseline(Remembers(told)).learn(GROUP) == {"a": 2.0, "b": 1.0, "3": 4.0}
    assert find_baseline(Remembers()).learn(GROUP) == {}


@pytest.mark.parametrize(
    "state",
    [[1], "text", {"a": Remembers}, {"a": lambda: 0}, {"a": np.ones(2)}],
    ids=["list", "text", "class", "function", "array"],
)
def test_what_a_baseline_keeps_comes_back_from_a_checkpoint(state):
    with pytest.raises(ValueError, match="'Remembers' returned a .* from `state_dict`.*: it must return a `dict` of"):
        find_baseline(Remembers(state=state)).state()
    kept = {"a": torch.ones(2), "b": {7: (0.5, "text")}}
    assert str(find_baseline(Remembers(state=kept)).state()) == str(kept)


def test_a_name_is_given_once():
    with pytest.raises(ValueError, match=r"'otb' is already registered by trl_otb\.baselines\.group_means\.otb"):
        trl_otb.register_baseline("otb")(own_otb)
    with pytest.raises(TypeError, match="'mine' is a int: it must be a function"):
        trl_otb.register_baseline("mine")(3)
    trl_otb.register_baseline("mine")(own_otb)
    trl_otb.register_baseline("mine")(own_otb)  # a notebook's cell, run again
    with pytest.raises(ValueError, match=r"'mine' is already registered by tests\.maths\.test_registry\.own_otb"):
        trl_otb.register_baseline("mine")(nan_at_the_end)


@pytest.mark.parametrize("baseline", BASELINES)
def test_options_that_a_baseline_does_not_look_at_are_rejected(baseline):
    entry = BASELINES[baseline]
    for option, value, looked_at in (
        ("alignment", "position", entry.per_token),
        ("zero_tail", False, entry.zero_tail),
        ("leave_one_out", True, not entry.leaves_one_out),
    ):
        if looked_at:
            check_options(baseline, **{option: value})
            continue
        message = f"`{option}` is {value!r} and `baseline` is {baseline!r}"
        with pytest.raises(ValueError, match=message):
            check_options(baseline, **{option: value})
        with pytest.raises(ValueError, match=message):
            Rollouts().advantages(baseline=baseline, **{option: value})


# What a baseline is given stays as it is


def shifted(name):
    def baseline(group):
        getattr(group, name).add_(1)
        return group.mean(group.present) if hasattr(group, "present") else group.base

    return baseline


def assigned(group):
    group.returns = group.returns * 0
    return 0.0


@pytest.mark.parametrize("alignment", ["generated", "position"])
@pytest.mark.parametrize("dense", [False, True], ids=["terminal", "dense"])
@pytest.mark.parametrize("inference", [False, True], ids=["", "inference mode"])
@pytest.mark.parametrize(
    ("baseline", "changed"), [*((shifted(n), n) for n in ("returns", "present", "energy")), (assigned, "returns")]
)
def test_a_baseline_that_changes_its_group_is_named(baseline, changed, inference, dense, alignment):
    x = Rollouts()
    rewards = torch.randn_like(x.energy) * x.mask if dense else x.rewards
    with torch.inference_mode(inference), pytest.raises(ValueError, match=f"modified `{changed}` in place"):
        x.advantages(rewards, baseline=baseline, alignment=alignment)


@pytest.mark.parametrize(
    ("flags", "function", "changed"),
    [
        ({"per_token": False, "totals_only": True}, lambda g: g.returns.mul_(0), "returns"),
        (
            {"per_token": False, "totals_only": True, "reads": "prompt_key"},
            lambda g: g.prompt_key.add_(1) * 0.0,
            "prompt_key",
        ),
        ({"reads": ("completion_ids",), "on_top_of": "rloo"}, lambda t: t.completion_ids.mul_(0), "completion_ids"),
        ({"on_top_of": "rloo"}, lambda t: t.base.mul_(0), "base"),
        ({"on_top_of": "rloo"}, lambda t: t.returns.mul_(0), "returns"),
    ],
)
def test_totals_and_tokens_stay_as_they_are_too(flags, function, changed):
    trl_otb.register_baseline("mine", **flags)(function)
    x = Rollouts()
    beside = {"prompt_key": torch.arange(12) // 4, "completion_ids": torch.ones(12, 12, dtype=torch.long)}
    with pytest.raises(ValueError, match=f"'mine' modified `{changed}` in place"):
        x.advantages(baseline="mine", **beside)


@pytest.mark.parametrize(
    ("flags", "function"),
    [
        ({}, lambda g: g.mean(g.energy)),
        ({"per_token": False}, lambda g: g.mean(g.total_energy)),
        ({"per_token": False, "totals_only": True}, lambda g: g.mean(g.total_energy)),
        ({"on_top_of": "rloo"}, lambda t: t.energy),
    ],
)
def test_energies_that_were_not_declared_cannot_be_read(flags, function):
    trl_otb.register_baseline("mine", uses_energy=False, **flags)(function)
    with pytest.raises(ValueError, match="reads energies but was registered with `uses_energy=False`"):
        Rollouts().advantages(baseline="mine")


@pytest.mark.parametrize("option", ["leave_one_out", "zero_tail"])
@pytest.mark.parametrize("value", ["False", 0, 1, None, torch.tensor(True)], ids=str)
def test_options_of_another_type(option, value):
    with pytest.raises(ValueError, match=f"`{option}` is .*: it must be True or False"):
        Rollouts().advantages(baseline="otb", **{option: value})


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ({"uses_energy": "False"}, "`uses_energy='False'`: it must be True or False"),
        ({"per_token": 0}, "`per_token=0`: it must be True or False"),
        ({"reads": "energy"}, "`reads` with 'energy'"),
    ],
)
def test_flags_of_another_type(flags, message):
    with pytest.raises(ValueError, match=message):
        trl_otb.register_baseline("mine", **flags)


def test_what_an_instance_stands_on_is_not_changed_by_its_name_later():
    def below(value):
        return lambda group: group.returns * 0 + value

    flags = {"per_token": False, "uses_energy": False, "totals_only": True}
    trl_otb.register_baseline("below", **flags)(below(1.0))
    trl_otb.register_baseline("mine", on_top_of="below")(lambda tokens: tokens.base)
    rule, x = find_baseline("mine").instance(), Rollouts()
    before = x.advantages(baseline=rule)
    trl_otb.register_baseline("below", **flags)(below(2.0))
    assert torch.equal(x.advantages(baseline=rule), before)
    torch.testing.assert_close(x.advantages(baseline="mine"), before - 1.0 * x.mask)


def test_only_baselines_that_cancel_equal_returns_may_be_scaled_by_a_group():
    flags = {name: entry.cancels_equal_returns for name, entry in BASELINES.items()}
    refused = {name for name, cancels in flags.items() if not cancels}
    assert refused == {"none", "ogb_pooled", "ogb_pooled_damped", "rloo_pooled", "value"}
    trl_otb.register_baseline("mine", on_top_of="rloo")(lambda tokens: tokens.base)
    assert not find_baseline("mine").cancels_equal_returns
    x = Rollouts(groups=1, tools=False)
    x.mask[:] = 1
    for name in set(BASELINES) - refused - {"mine"}:
        assert x.advantages(torch.full((4,), 3.0), baseline=name).abs().max() < 1e-6, name


# Numbers at the end of their range


def test_no_baseline_needs_subnormal_numbers():
    """GPUs flush them to zero, and so does this test where the CPU can."""
    from trl_otb.baselines.groups import LEAST_WEIGHT

    assert LEAST_WEIGHT > torch.finfo(torch.float32).tiny
    lone = Rollouts(groups=1, n=2, tools=False)
    lone.mask[:] = 0
    lone.mask[0] = lone.mask[1, 0] = 1  # one goes on alone, and left out of its own baseline it leaves nobody
    try:
        torch.set_flush_denormal(True)
        for name, entry in BASELINES.items():
            beside = {"logps": torch.zeros(2, 12), "states": torch.zeros(2, 12, 4)} if entry.reads else {}
            for left_out in {False, not entry.leaves_one_out}:
                for energy in (lone.energy, torch.zeros_like(lone.energy)):
                    found = lone.advantages(baseline=name, leave_one_out=left_out, energy=energy, **beside)
                    assert found.isfinite().all(), name
    finally:
        torch.set_flush_denormal(False)


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_an_energy_that_is_not_finite_is_named(value):
    x = Rollouts(tools=False)
    x.mask[5, :4] = 1
    x.energy[5, 3] = value
    with pytest.raises(ValueError, match=f"The energy of completion 5, token 3, is {value}"):
        x.advantages(baseline="ogb")
    assert x.advantages(baseline="group_mean").isfinite().all()  # which reads none
    x.mask[5, 3] = 0
    assert x.advantages(baseline="ogb").isfinite().all()
