"""One completion per prompt, compared with those of the other prompts."""

import math

import pytest
import torch

from tests.helpers import tiny
from tests.helpers.recording import first_rollout
from tests.helpers.settings import SOURCES, logged
from trl_otb import OTBGRPOConfig


CONFIG = {"num_generations": 1, "baseline": "value"}
ONE = {**CONFIG, "train_dataset": tiny.prompts(21)}
POOLED = ["value", "rloo_pooled", "ogb_pooled"]


@pytest.mark.parametrize("source", SOURCES)
@pytest.mark.parametrize("baseline", POOLED)
def test_completion_is_compared_across_batch(train, baseline, source):
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


def test_evaluation_may_use_larger_n(train, tmp_path):
    trainer = train(**ONE, eval_dataset=tiny.prompts(4), num_generations_eval=4, per_device_eval_batch_size=4)
    metrics = trainer.evaluate()
    trainer.log_metrics("eval", metrics)
    assert "eval_frac_reward_zero_std" in metrics and trainer.rollouts["eval"].group_mean_advantages is not None
    trainer.rollouts["train"].show()
    assert len(trainer.rollouts["train"].plot(tmp_path / "one.png").axes) == 4  # two panels and their scales


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
    assert type(trainer.args.num_generations) is int
    assert len(logged(trainer, "otb/baseline/mean")) == 2 and not math.isnan(logged(trainer, "loss")[0])
