"""Configuration: accepted, converted, or rejected with value, reason and remedy."""

import copy
import json
import pickle
from dataclasses import dataclass
from pathlib import Path

import accelerate.logging
import pytest
import torch
from peft import LoraConfig
from transformers import AutoModelForCausalLM, TrainerCallback
from trl import GRPOConfig, GRPOTrainer
from trl.experimental.gmpo import GMPOConfig

from tests.helpers import tiny
from trl_otb import OTBGRPOConfig, OTBGRPOTrainer, config, register_baseline


@pytest.mark.parametrize("config", [GRPOConfig, GMPOConfig])
def test_a_config_of_trls_stays_unchanged(train, config):
    trainer = train(OTBGRPOTrainer, config, scale_rewards="none", max_steps=1, save_strategy="steps", save_steps=1)
    assert type(trainer.args) is config and not hasattr(trainer.args, "baseline")
    assert trainer.args.epsilon == (0.2 if config is GRPOConfig else 0.4)
    assert trainer.rollouts["train"].advantages.size(1) > 1  # the default baseline's, per token
    with pytest.raises(
        ValueError, match=rf"`args` is a {config.__name__}, which has no `baseline`.*is 'group'.*Use OTBGRPOConfig"
    ):
        train(OTBGRPOTrainer, config, train=False)


ON_CPU = {"output_dir": "unused", "use_cpu": True, "bf16": False}


@dataclass
class OnCPU(OTBGRPOConfig):
    use_cpu: bool = True
    bf16: bool | None = False


def test_without_args(model_path, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("trl_otb.trainer.OTBGRPOConfig", OnCPU)  # TRL's own default, bf16, needs a GPU
    for model in (model_path, AutoModelForCausalLM.from_pretrained(model_path, dtype=torch.float32)):
        trainer = OTBGRPOTrainer(model, tiny.even_bytes, train_dataset=tiny.prompts())
        assert trainer.args.output_dir == f"{Path(model_path).name}-OTB"
        assert (trainer.args.baseline, trainer.args.scale_rewards) == ("otb", "none")


SCALED = "under which advantages are not 0 where all returns of a group are nearly equal"
WRONG = [
    ({"baseline": ""}, "`baseline` is ''.*'otb', 'otb_loo'"),
    ({"baseline": "mean"}, "`baseline` is 'mean'.*'otb', 'otb_loo', 'ogb', 'ogb_loo', 'rloo', 'group_mean'"),
    ({"scale_rewards": "std"}, "`scale_rewards` is 'std'.*'none', 'running', 'group'"),
    ({"baseline": "rloo_pooled", "scale_rewards": "group"}, f"'group' and `baseline` is 'rloo_pooled', {SCALED}"),
    ({"baseline": "otb", "scale_rewards": "batch"}, f"'batch' and `baseline` is 'otb', {SCALED}.*'ogb', 'ogb_loo'"),
    ({"baseline": len}, "`baseline` is <built-in function len>: a config holds text. Register the function"),
]
LATER = [  # by the trainer, whose loss it may be, and which imports
    ({"loss_type": "ppo"}, "`loss_type` is 'ppo'.*'dapo'"),
    ({"baseline": "nowhere:mine"}, "`baseline` is 'nowhere:mine', which cannot be imported"),
]


@pytest.mark.parametrize(("option", "message"), WRONG)
def test_what_cannot_be_honoured_is_rejected(option, message):
    with pytest.raises(ValueError, match=message):
        OTBGRPOConfig(**ON_CPU, **option)


def test_command_line_and_yaml(tmp_path):
    from trl import TrlParser

    (tmp_path / "config.yaml").write_text("baseline: ogb\ncredit_whole_return: true\nlearning_rate: 1.0e-5\n")
    parser = TrlParser(OTBGRPOConfig)
    common = ["--config", str(tmp_path / "config.yaml"), "--output_dir", str(tmp_path), "--use_cpu", "--bf16", "false"]
    (args,) = parser.parse_args_and_config(common)
    assert (args.baseline, args.credit_whole_return, args.scale_rewards) == ("ogb", True, "none")
    (args,) = parser.parse_args_and_config([*common, "--baseline", "otb", "--credit_whole_return", "false"])
    assert (args.baseline, args.credit_whole_return) == ("otb", False)
    assert json.loads(args.to_json_string())["baseline"] == "otb"


@pytest.mark.parametrize(("option", "message"), [*WRONG[2:4], *LATER])
def test_options_set_later_are_checked(train, option, message):
    args = OTBGRPOConfig(**tiny.SETTINGS, output_dir="unused")
    vars(args).update(option)
    with pytest.raises(ValueError, match=message):
        train(OTBGRPOTrainer, config=lambda **kwargs: args)
    trainer = train(train=False)
    trainer.args.baseline = "ogb"
    with pytest.raises(ValueError, match="`args.baseline` was set to 'ogb' after the trainer was made with 'otb'"):
        trainer.train()


def test_trainer_keeps_its_registered_function(train, registry):
    def constant(value):
        return lambda x: x.returns * 0 + value

    trainers = []
    for value in (0.25, 0.75):
        register_baseline("mine", needs=())(constant(value))
        trainers.append(train(OTBGRPOTrainer, baseline="mine", train=False, max_steps=1))
    for trainer, value in zip(trainers, (0.25, 0.75), strict=True):
        trainer.train()
        rollout = trainer.rollouts["train"]
        assert (rollout.baselines[rollout.mask.bool()] == value).all()


@dataclass
class Theirs(GMPOConfig):
    alpha: float = 0.25


@dataclass
class OursFirst(OTBGRPOConfig, Theirs):
    credit_whole_return: bool = True


@dataclass
class TheirsFirst(Theirs, OTBGRPOConfig):
    beta: float = 0.5


def test_merged_config_keeps_both_defaults():
    for cls in (OursFirst, TheirsFirst):
        args = cls(**ON_CPU)
        assert (args.alpha, args.epsilon, args.scale_rewards, args.baseline) == (0.25, 0.4, "none", "otb")
        assert cls(**ON_CPU, epsilon=0.3, scale_rewards="none").epsilon == 0.3
    assert OursFirst(**ON_CPU).credit_whole_return and TheirsFirst(**ON_CPU).beta == 0.5
    assert OnCPU(output_dir="unused").epsilon == OTBGRPOConfig(**ON_CPU).epsilon == 0.2


@pytest.mark.parametrize("bases", [(OTBGRPOConfig,), (OTBGRPOConfig, Theirs)])
@pytest.mark.parametrize("own", [{"baseline": "ogb"}, {"__annotations__": {"gamma": float}, "gamma": 0.5}, {}])
@pytest.mark.parametrize("decorate", [dataclass, lambda cls: cls])
def test_unread_options_are_an_error(bases, own, decorate):
    cls = decorate(type("Forgotten", bases, dict(own)))
    without_type, decorated = "baseline" in own, decorate is dataclass
    if without_type or (not decorated and (own or len(bases) > 1)):
        with pytest.raises(TypeError, match="`Forgotten` is a config class .* decorate it with `@dataclass`"):
            cls(**ON_CPU)
    else:
        assert cls(**ON_CPU).baseline == "otb"


class Named(OTBGRPOTrainer):
    default_baseline = "value"


@pytest.mark.parametrize(
    ("cls", "options", "expected"),
    [
        (OTBGRPOTrainer, {"baseline": "ogb", "scale_rewards": "none"}, []),
        (OTBGRPOTrainer, {"baseline": "ogb", "scale_rewards": "group"}, []),
        (OTBGRPOTrainer, {}, ["baseline", "scale_rewards"]),
        (OTBGRPOTrainer, {"scale_rewards": None, "baseline": "value"}, ["scale_rewards"]),
        (Named, {"scale_rewards": "running"}, []),
        (Named, {}, ["scale_rewards"]),
    ],
)
def test_defaults_that_are_not_advised_are_said_once(train, caplog, cls, options, expected):
    type(config.logger).warning_once.cache_clear()
    for _ in range(2):
        trainer = train(cls, train=False, **options)
    assert trainer.args.scale_rewards == (options.get("scale_rewards") or "none")
    said = [r.getMessage() for r in caplog.records if "to silence this" in r.getMessage()]
    assert len(said) == bool(expected)
    for name, text in config.UNSET.items():
        assert all((text in line) == (name in expected) for line in said)


def test_a_file_imports_nothing(tmp_path, monkeypatch):
    """A baseline of one's own is imported when the trainer is made."""
    (tmp_path / "own_baseline.py").write_text("raise SystemExit")
    monkeypatch.syspath_prepend(tmp_path)
    assert OTBGRPOConfig(**ON_CPU, baseline="own_baseline:mine").baseline == "own_baseline:mine"


def test_another_trainer_says_that_it_ignores_the_baseline(train, caplog):
    train(GRPOTrainer, baseline="value", scale_rewards="none", max_steps=1)
    assert "used by another trainer than OTBGRPOTrainer: `baseline='value'` has no effect" in caplog.text
    caplog.clear()
    train(OTBGRPOTrainer, baseline="value", scale_rewards="none", max_steps=1)
    OTBGRPOConfig(**ON_CPU, baseline="value", scale_rewards="none").get_warmup_steps(10)  # by a user
    assert "another trainer" not in caplog.text


def test_a_config_that_was_ours_is_of_no_use_to_another_trainer(train, caplog, model_path, tmp_path):
    """Also after an OTBGRPOTrainer has trained with the same arguments."""
    type(config.logger).warning_once.cache_clear()
    ours = train(OTBGRPOTrainer, baseline="value", scale_rewards="none", max_steps=1)
    caplog.clear()
    GRPOTrainer(model_path, tiny.even_bytes, args=ours.args, train_dataset=tiny.prompts()).train()
    assert "used by another trainer than OTBGRPOTrainer: `baseline='value'` has no effect" in caplog.text


@pytest.mark.parametrize("cls", [OTBGRPOConfig, "AsyncOTBGRPOConfig", OnCPU])
def test_a_misspelt_option_is_named(cls):
    if isinstance(cls, str):  # of TRL from 1.16 on
        cls = getattr(pytest.importorskip("trl_otb.experimental.async_grpo.config", exc_type=ImportError), cls)
    with pytest.raises(TypeError, match=f"{cls.__name__} has no option 'basline'. Did you mean 'baseline'?"):
        cls(output_dir="unused", basline="value")
    args = copy.deepcopy(OnCPU(output_dir="unused", baseline="value"))
    assert pickle.loads(pickle.dumps(args)).baseline == "value"


def test_a_config_with_an_init_of_its_own_takes_what_it_takes():
    class Own(OTBGRPOConfig):
        def __init__(self, *, name, **kwargs):
            super().__init__(output_dir=name, **kwargs)

    assert Own(name="unused", **{k: v for k, v in ON_CPU.items() if k != "output_dir"}).output_dir == "unused"


class Switch(TrainerCallback):
    def on_step_end(self, args, state, control, **kwargs):
        args.baseline = "rloo"


def test_a_callback_that_changes_the_baseline_is_refused(train):
    with pytest.raises(ValueError, match="`args.baseline` was set to 'rloo' after the trainer was made with 'value'"):
        train(baseline="value", callbacks=[Switch()])


@pytest.mark.parametrize("rate", [0.0, 0.1])
def test_dropout_is_told_at_the_start(train, caplog, rate):
    accelerate.logging.MultiProcessAdapter.warning_once.cache_clear()
    train(baseline="value", max_steps=1, peft_config=LoraConfig(r=2, target_modules="all-linear", lora_dropout=rate))
    said = "The policy has dropout: model.layers.0.self_attn.q_proj.lora_dropout.default (p=0.1)"
    assert (said in caplog.text) == (rate > 0) and ("dropout" in caplog.text) == (rate > 0)
