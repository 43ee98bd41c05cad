"""The group mean is GRPOTrainer, to the bit."""

import pytest
import torch
from trl import GRPOConfig, GRPOTrainer

from tests.helpers import tiny
from tests.helpers.settings import SETTINGS, assert_same_weights, weights
from trl_otb import OTBGRPOConfig, OTBGRPOTrainer


@pytest.mark.parametrize("setting", SETTINGS)
def test_group_mean_equals_grpo_trainer(train, setting):
    options = {"scale_rewards": "none", **SETTINGS[setting]}
    grpo = train(GRPOTrainer, GRPOConfig, **options)
    otb = train(OTBGRPOTrainer, OTBGRPOConfig, baseline="group_mean", **options)
    assert_same_weights(grpo, otb)
    timings = ("step_time", "train_runtime", "train_samples_per_second", "train_steps_per_second")
    for of_grpo, of_otb in zip(grpo.state.log_history, otb.state.log_history, strict=True):
        shared = {k: v for k, v in of_otb.items() if not k.startswith("otb/") and k not in timings}
        assert shared == {k: v for k, v in of_grpo.items() if k not in timings}
    untrained = weights(train(train=False, baseline="group_mean", **options))
    assert any(not torch.equal(p, untrained[name]) for name, p in weights(otb).items()), "nothing was trained"


def test_several_rewards_are_normalised_first(train):
    options = {
        "reward_funcs": [tiny.even_bytes, lambda completion_ids, **kwargs: [-len(ids) / 8 for ids in completion_ids]],
        "reward_weights": [1.0, 0.3],
        "multi_objective_aggregation": "normalize_then_sum",
        "max_steps": 4,
    }
    grpo = train(GRPOTrainer, GRPOConfig, **options)
    assert_same_weights(grpo, train(baseline="group_mean", **options))


def test_one_scorable_completion_has_no_signal(train):
    def reward(completion_ids, **kwargs):
        return [r if i in (0, 5, 6, 7) else None for i, r in enumerate(tiny.even_bytes(completion_ids))]

    for scale in ("none", "group"):
        grpo = train(GRPOTrainer, GRPOConfig, scale_rewards=scale, reward_funcs=reward)
        assert_same_weights(grpo, train(baseline="group_mean", scale_rewards=scale, reward_funcs=reward))
