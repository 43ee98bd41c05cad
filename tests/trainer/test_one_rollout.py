"""One completion per prompt, compared with those of the other prompts."""

import math

import pytest
import torch
from trl import GRPOConfig, TrlParser

from tests.helpers import tiny, tiny_vision
from tests.helpers.agents import AGENT, by_length
from tests.helpers.recording import first_rollout
from tests.helpers.scripted import TOOLS, script_turns
from tests.helpers.settings import LORA, SETTINGS, SOURCES, assert_same_weights, logged, weights
from trl_otb import GradientNoiseCallback, OTBGRPOConfig, TokenRewards


CONFIG = {"num_generations": 1, "baseline": "value"}
ONE = {**CONFIG, "train_dataset": tiny.prompts(21)}
POOLED = ["value", "rloo_pooled", "ogb_pooled"]


@pytest.mark.parametrize("source", SOURCES)
@pytest.mark.parametrize("baseline", POOLED)
def test_a_completion_is_compared_with_the_others_of_the_batch(train, baseline, source):
    trainer = train(**ONE | SOURCES[source] | {"baseline": baseline, "per_device_train_batch_size": 7, "max_steps": 2})
    batch, rollout = first_rollout(trainer), trainer.rollouts["train"]
    ids = [i[m].tolist() for i, m in zip(batch["completion_ids"], batch["completion_mask"].bool(), strict=True)]
    rewards = torch.tensor(tiny.even_bytes(ids)).unsqueeze(1)
    expected = rewards - (rewards.sum() - rewards) / 6
    found = batch["advantages"] if baseline == "value" else batch["advantages"].unsqueeze(1)
    torch.testing.assert_close(found, expected.expand(found.shape) * (found != 0), atol=1e-6, rtol=0)
    # What TRL says of a group is left out; power is compared with that of the others' mean
    first = next(entry for entry in trainer.state.log_history if "reward" in entry)
    assert first["reward_std"] == pytest.approx(rewards.std().item()) and "frac_reward_zero_std" not in first
    if "otb/grad_power_ratio" in first and baseline != "value":
        assert first["otb/grad_power_ratio"] == pytest.approx(1.0)
    assert rollout.group_mean_advantages is None and len(rollout) == 7


@pytest.mark.parametrize("setting", [name for name in SETTINGS if "scale" not in name])
def test_it_trains_under_every_setting(train, setting):
    trainer = train(**ONE | {"max_steps": 4} | SETTINGS[setting])
    assert all(p.isfinite().all() for p in weights(trainer).values())
    assert trainer._baseline.rule._batches > 0 and len(logged(trainer, "otb/value/weight")) > 1


def test_evaluation_with_more_and_the_pages_of_a_rollout(train, tmp_path):
    trainer = train(**ONE, eval_dataset=tiny.prompts(4), num_generations_eval=4, per_device_eval_batch_size=4)
    metrics = trainer.evaluate()
    trainer.log_metrics("eval", metrics)
    assert "eval_frac_reward_zero_std" in metrics and trainer.rollouts["eval"].group_mean_advantages is not None
    trainer.rollouts["train"].show()
    assert len(trainer.rollouts["train"].plot(tmp_path / "one.png").axes) == 4  # two panels and their scales


def test_resuming_is_exact(train, tmp_path):
    run = {**ONE, "max_steps": 2, "output_dir": str(tmp_path / "run"), "per_device_train_batch_size": 7}
    whole = train(save_strategy="steps", save_steps=1, **run)
    resumed = train(train=False, **run)
    resumed.train(resume_from_checkpoint=str(tmp_path / "run" / "checkpoint-1"))
    assert_same_weights(whole, resumed)


@pytest.mark.parametrize("kind", ["pictures", "tools", "rewards of tokens", "a meter, LoRA"])
def test_whatever_grpo_trainer_takes(train, kind, tmp_path, monkeypatch):
    options = dict(ONE)
    if kind == "pictures":
        options |= {"train_dataset": tiny_vision.prompts(), "per_device_train_batch_size": 2}
        options["model"] = tiny_vision.save_model(tmp_path / "vision", "patches")
        options["processing_class"] = tiny_vision.processor("patches")
    elif kind == "tools":
        script_turns(monkeypatch)
        options |= AGENT | {"tools": TOOLS, "reward_funcs": by_length, "num_generations": 1}
    elif kind == "rewards of tokens":
        options["reward_funcs"] = lambda completion_ids, **_: [
            TokenRewards([0.1 * (i % 3) for i in ids]) for ids in completion_ids
        ]
    else:
        options |= {"peft_config": LORA, "keep_groups_together": True, "callbacks": [GradientNoiseCallback()]}
        options |= {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 2}
    trainer = train(**options)
    batch = first_rollout(trainer)
    assert batch["advantages"].isfinite().all() and (batch["advantages"].abs().amax(1) > 0).sum() > 1
    assert kind != "a meter, LoRA" or trainer.state.log_history


def test_by_flags_and_yaml(tmp_path):
    (tmp_path / "one.yaml").write_text("num_generations: 1\nbaseline: value\nper_device_train_batch_size: 3\n")
    common = ["--output_dir", str(tmp_path), "--use_cpu", "--bf16", "false"]
    for flags in (["--config", str(tmp_path / "one.yaml")], ["--num_generations", "1", "--baseline", "rloo_pooled"]):
        (args,) = TrlParser(OTBGRPOConfig).parse_args_and_config([*flags, *common])
        assert args.num_generations == 1 and type(args.num_generations) is int
    with pytest.raises(ValueError, match="at least 2 generations"):
        GRPOConfig(**tiny.SETTINGS | {"num_generations": 1}, output_dir=str(tmp_path))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        *[
            ({"baseline": name}, f"is 1, and `baseline` is '{name}'.*Choose 'value'")
            for name in ("otb", "rloo", "group_mean")
        ],
        ({"per_device_train_batch_size": 1}, "is 1, and a generation batch is a single completion.*Raise"),
        ({"multi_objective_aggregation": "normalize_then_sum"}, "is 1, and `multi_objective.*Set 'sum_then_normalize'"),
    ],
)
def test_what_cannot_be_compared_is_named(options, message, tmp_path):
    with pytest.raises(ValueError, match=message):
        OTBGRPOConfig(**tiny.SETTINGS | CONFIG | options, output_dir=str(tmp_path))


def test_nothing_subtracted_needs_nothing_to_compare(train):
    trainer = train(**ONE | {"baseline": "none", "per_device_train_batch_size": 1})
    assert len(logged(trainer, "otb/baseline/mean")) == 2 and not math.isnan(logged(trainer, "loss")[0])
