"""Configuration: accepted, converted, or rejected with value, reason and remedy."""

import json
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM
from trl import GRPOConfig

from tests.helpers import tiny
from trl_otb import OTBGRPOConfig, OTBGRPOTrainer


def test_plain_grpo_config_is_enough(train, caplog):
    args = GRPOConfig(**tiny.SETTINGS, output_dir="unused")
    trainer = train(OTBGRPOTrainer, GRPOConfig, max_steps=1)
    assert isinstance(trainer.args, OTBGRPOConfig) and trainer.args.baseline == "otb"
    assert trainer.args.scale_rewards == "group"
    assert "scale_rewards='group'" in caplog.text
    assert type(args) is GRPOConfig and not hasattr(args, "baseline")


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


def test_wrong_kind_of_args(model_path):
    with pytest.raises(TypeError, match="`args` is a dict"):
        OTBGRPOTrainer(model_path, tiny.even_bytes, args={"output_dir": "x"}, train_dataset=tiny.prompts())


@pytest.mark.parametrize(
    ("option", "message"),
    [
        ({"baseline": "mean"}, "`baseline` is 'mean'.*'otb', 'otb_shrunk', 'ogb', 'opo', 'rloo', 'group_mean'"),
        ({"alignment": "turn"}, "`alignment` is 'turn'.*'generated', 'position'"),
        ({"scale_rewards": "std"}, "`scale_rewards` is 'std'.*'none', 'group'"),
        ({"loss_type": "ppo"}, "`loss_type` is 'ppo'.*'dapo'"),
        ({"baseline": "otb_shrunk", "zero_tail": False}, "`zero_tail` is False and `baseline` is 'otb_shrunk'"),
        ({"baseline": "ogb", "alignment": "position"}, "`alignment` is 'position' and `baseline` is 'ogb'.*'otb'"),
        (
            {"baseline": "rloo_pooled", "scale_rewards": "group"},
            "`scale_rewards` is 'group' and `baseline` is 'rloo_pooled', which compares prompts.*'none'` or 'batch'",
        ),
        ({"baseline": len}, "`baseline` is <built-in function len>: a config holds text. Register the function"),
        ({"baseline": "nowhere:mine"}, "`baseline` is 'nowhere:mine', which cannot be imported"),
    ],
)
def test_what_cannot_be_honoured_is_rejected(option, message, tmp_path):
    with pytest.raises(ValueError, match=message):
        OTBGRPOConfig(output_dir=str(tmp_path), **option)
    plain = GRPOConfig(output_dir=str(tmp_path), use_cpu=True, bf16=False)
    for key, value in option.items():
        setattr(plain, key, value)
    with pytest.raises(ValueError, match=message):
        OTBGRPOConfig.from_grpo_config(plain)


def test_command_line_and_yaml(tmp_path):
    from trl import TrlParser

    (tmp_path / "config.yaml").write_text("baseline: ogb\nleave_one_out: true\nlearning_rate: 1.0e-5\n")
    parser = TrlParser(OTBGRPOConfig)
    common = ["--config", str(tmp_path / "config.yaml"), "--output_dir", str(tmp_path), "--use_cpu", "--bf16", "false"]
    (args,) = parser.parse_args_and_config(common)
    assert (args.baseline, args.leave_one_out, args.zero_tail, args.scale_rewards) == ("ogb", True, True, "none")
    (args,) = parser.parse_args_and_config(
        [*common, "--baseline", "otb", "--zero_tail", "false", "--alignment", "position"]
    )
    assert (args.baseline, args.zero_tail, args.alignment) == ("otb", False, "position")
    assert json.loads(args.to_json_string())["baseline"] == "otb"
