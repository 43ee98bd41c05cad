"""Programs that build the config: Axolotl, by its plugin."""

import importlib
import sys
import types
from dataclasses import dataclass, fields
from pathlib import Path

import pytest
import yaml
from trl import GRPOConfig, GRPOTrainer

from tests.helpers.settings import assert_same_weights
from trl_otb import OTBGRPOConfig, OTBGRPOTrainer


@dataclass
class AxolotlsConfig(GRPOConfig):
    """A config in which no baseline can be named."""

    sequence_len: int = 128


class Plain(OTBGRPOTrainer):
    pass


class Named(OTBGRPOTrainer):
    default_baseline = "value"


def said(capsys):
    return [line for line in capsys.readouterr().out.splitlines() if line.startswith("Training with")]


@pytest.mark.parametrize(
    ("cls", "config", "options", "expected"),
    [
        (Plain, AxolotlsConfig, {}, "'otb' (the default: AxolotlsConfig names none)"),
        (Plain, OTBGRPOConfig, {}, "'otb' (the default: OTBGRPOConfig names none)"),
        (Named, AxolotlsConfig, {}, "'value' (`default_baseline` of Named)"),
        (Named, OTBGRPOConfig, {}, "'value' (`default_baseline` of Named)"),
        (Named, OTBGRPOConfig, {"baseline": "ogb"}, "'ogb' (set in OTBGRPOConfig)"),
        (Named, OTBGRPOConfig, {"baseline": "otb"}, "'otb' (set in OTBGRPOConfig)"),
    ],
)
def test_the_config_names_the_baseline_or_the_class(train, capsys, cls, config, options, expected):
    trainer = train(cls, config, max_steps=1, scale_rewards="none", **options)
    assert said(capsys) == [f"Training with baseline {expected} and scale_rewards 'none'."]
    assert expected.startswith(repr(trainer.baseline.entry.name))


def test_a_class_may_name_any_baseline_that_goes_with_the_config(train):
    with pytest.raises(ValueError, match="`scale_rewards` is 'group'.*name a baseline as `default_baseline`"):
        train(Named, AxolotlsConfig, train=False)
    with pytest.raises(ValueError, match="`baseline` is 'valeu'.*Did you mean 'value'"):
        train(type("Wrong", (Plain,), {"default_baseline": "valeu"}), AxolotlsConfig, scale_rewards="none", train=False)


@pytest.fixture
def axolotl(monkeypatch):
    """The plugin, with Axolotl's own base class or, where Axolotl is not installed, one without anything."""
    try:
        import axolotl.integrations.base  # noqa: F401
    except ImportError:
        for name in ("axolotl", "axolotl.integrations", "axolotl.integrations.base"):
            monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
        sys.modules["axolotl.integrations.base"].BasePlugin = object
    monkeypatch.delitem(sys.modules, "trl_otb.axolotl", raising=False)
    yield importlib.import_module("trl_otb.axolotl")
    sys.modules.pop("trl_otb.axolotl", None)


RUN = yaml.safe_load((Path(__file__).parents[2] / "recipes/axolotl/run.yaml").read_text())


class Cfg(dict):
    """As Axolotl's: options are attributes, and None if they are not there."""

    __getattr__ = dict.get


def test_the_plugin_adds_every_option_of_ours(axolotl):
    own = {of.name for of in fields(OTBGRPOConfig)} - {of.name for of in fields(GRPOConfig)}
    assert {of.name for of in fields(axolotl.TrainingOptions)} == own
    assert {*axolotl.OPTIONS} == own | {"scale_rewards"}
    defaults = {of.name: of.default for of in fields(axolotl.TrainingOptions)}
    assert defaults == {of.name: of.default for of in fields(OTBGRPOConfig) if of.name in own}


@pytest.mark.parametrize("options", [RUN["otb"], {"baseline": "otb", "credit_whole_return": True}, None])
def test_a_yaml_file_trains_as_our_config_does(axolotl, train, options):
    plugin, cfg = axolotl.Plugin(), Cfg(RUN | {"otb": options})
    plugin.register(cfg)
    assert cfg["trainer_cls"] == "trl_otb.axolotl.trainer.OTBTrainer"
    assert plugin.get_input_args() == f"trl_otb.axolotl.{axolotl.InputArgs.__name__}"
    assert plugin.get_training_args_mixin() == f"trl_otb.axolotl.{axolotl.TrainingOptions.__name__}"

    @dataclass
    class Built(axolotl.TrainingOptions, GRPOConfig):
        """As Axolotl merges them."""

    scaled = {"scale_rewards": "group"}  # Axolotl's default
    built = train(config=Built, **scaled | plugin.get_training_args(cfg))
    assert_same_weights(built, train(config=OTBGRPOConfig, **options or {}))
    plugin.post_trainer_create(cfg, built)


@pytest.mark.parametrize(("asked", "expected"), [({}, "none"), ({"scale_rewards": False}, False)])
def test_the_plugin_honours_an_explicit_scale(axolotl, asked, expected):
    """Not Axolotl's default, which stands in its place later."""
    plugin, cfg = axolotl.Plugin(), Cfg(RUN | {"trl": RUN["trl"] | asked, "otb": {"baseline": "value"}})
    plugin.register(cfg)
    cfg["trl"] = {"scale_rewards": True} | cfg["trl"]
    assert plugin.get_training_args(cfg)["scale_rewards"] == expected


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"rl": "dpo"}, "`rl` is 'dpo'"),
        ({"trl": {"use_data_producer": True}}, "`trl.use_data_producer` is set: `AxolotlAsyncGRPOTrainer._compute_lo"),
        ({"trl": {"async_prefetch": True}}, "`trl.async_prefetch` is set"),
        ({"context_parallel_size": 2}, "`context_parallel_size` is above 1"),
        ({"otb": {"baseline": "valeu"}}, "Did you mean 'value'"),
        ({"otb": {"basline": "value"}}, "`otb` has no option 'basline'. Did you mean 'baseline'"),
        ({"otb": "value"}, "`otb` is 'value': it is a section of options. Write `otb: {baseline: value}`"),
        ({"baseline": "value"}, "`baseline` stands at top level, where Axolotl drops it. Put it under `otb`"),
        ({"trl": {"progress_funcs": ["rewards"]}}, "`progress_funcs` stands under `trl`"),
    ],
)
def test_the_plugin_refuses_what_it_cannot_honour(axolotl, changes, message):
    with pytest.raises(ValueError, match=message):
        axolotl.Plugin().register(Cfg(RUN | changes))


def test_one_progress_function_may_be_text(axolotl):
    options = axolotl.Plugin().get_training_args(Cfg(RUN | {"otb": {"progress_funcs": "rewards"}}))
    assert options["progress_funcs"] == ["rewards"]


def test_a_trainer_class_of_ones_own_stays(axolotl):
    cfg = Cfg(RUN | {"trainer_cls": "mine.Mine"})
    axolotl.Plugin().register(cfg)
    assert cfg["trainer_cls"] == "mine.Mine"


def test_axolotls_asynchronous_trainer_is_refused_by_its_method(train):
    theirs = {"__module__": "axolotl.core.trainers.grpo.async_trainer", "_prepare_inputs": GRPOTrainer._prepare_inputs}
    cls = type("Mine", (OTBGRPOTrainer, type("AsyncGRPOTrainer", (GRPOTrainer,), theirs)), {})
    with pytest.raises(TypeError, match="`AsyncGRPOTrainer._prepare_inputs` of Axolotl makes rollouts"):
        train(cls, train=False)
