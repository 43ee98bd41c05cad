"""The group mean is GRPOTrainer, to the bit."""

import copy
import math

import pytest
import torch
from transformers import AutoModelForCausalLM
from trl import GRPOConfig, GRPOTrainer

from tests.helpers import tiny
from tests.helpers.settings import SETTINGS, assert_same_weights, logged
from trl_otb import OTBGRPOConfig, OTBGRPOTrainer, TokenRewards


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
    assert max(logged(otb, "grad_norm")) > 0, "nothing was trained"


def shorter(completion_ids, **kwargs):
    return [-len(ids) / 8 for ids in completion_ids]


async def shorter_later(completion_ids, **kwargs):
    return shorter(completion_ids)


def of_some(completion_ids, **kwargs):
    """Of one completion of the first group and three of the second."""
    return [r if i in (0, 5, 6, 7) else None for i, r in enumerate(tiny.even_bytes(completion_ids))]


def of_even_rows(completion_ids, **kwargs):
    return [None if i % 2 else 1.0 for i in range(len(completion_ids))]


def infinite(completion_ids, **kwargs):
    return [math.inf if i % 2 else 1.0 for i in range(len(completion_ids))]


def tokens_of_the_first(completion_ids, **kwargs):
    """The other rows' factor is 0 for it, as in GRPOTrainer, if rewards are normalised first."""
    return [TokenRewards([1.0] * len(ids)) if i % 4 == 0 else None for i, ids in enumerate(completion_ids)]


def their_sums(completion_ids, **kwargs):
    return [rewards and sum(rewards) for rewards in tokens_of_the_first(completion_ids)]


NORMALISED = {"multi_objective_aggregation": "normalize_then_sum"}
REWARDS = {  # functions, their weights, and options
    "several": ([tiny.even_bytes, shorter_later, of_even_rows], [1.0, 0.1, 0.5], {"scale_rewards": "none"}),
    "normalised": ([tiny.even_bytes, shorter], [1.0, 0.3], NORMALISED),
    "normalised, for some": ([tokens_of_the_first, tiny.even_bytes], None, NORMALISED),
    "for one of a group": ([of_some], None, {"scale_rewards": "none"}),
    "for one of a group, scaled": ([of_some], None, {"scale_rewards": "group"}),
    "infinite, of no weight": ([tiny.even_bytes, infinite], [1.0, 0.0], {"scale_rewards": "none"}),
}


@pytest.mark.parametrize("kind", REWARDS)
def test_group_mean_of_rewards_equals_grpo_trainer(train, kind):
    functions, weights, options = REWARDS[kind]
    theirs = [their_sums if function is tokens_of_the_first else function for function in functions]
    options = {"reward_weights": weights, "scale_rewards": "group", "max_steps": 3, **options}
    grpo = train(GRPOTrainer, GRPOConfig, reward_funcs=theirs, **options)
    ours = train(baseline="group_mean", reward_funcs=functions, **options)
    assert_same_weights(grpo, ours)
    assert logged(grpo, "reward") == logged(ours, "reward")
    assert not any(map(math.isnan, logged(ours, "otb/baseline/mean")))
    if kind == "normalised, for some":  # the other function's rewards are there to train on
        rewards = ours.rollouts["train"].rewards
        assert rewards.isfinite().all() and rewards.dim() == 2 and rewards[0].abs().max() > 0


def test_normalised_rewards_are_divided_once(train):
    """By the running deviation alone, so that the size of weights does not matter."""
    options = {"scale_rewards": "running", "baseline": "group_mean", **NORMALISED, "learning_rate": 0.0, "max_steps": 1}
    found = []
    for factor in (1.0, 100.0):
        trainer = train(reward_funcs=[tiny.even_bytes, shorter], reward_weights=[0.01 * factor, factor], **options)
        rollout = trainer.rollouts["train"]
        deviation = rollout.returns_of_all.view(-1, 4).var(dim=1).mean().sqrt()
        torch.testing.assert_close(rollout.scale, deviation.expand(8, 1))
        found.append(rollout.advantages)
    torch.testing.assert_close(*found, rtol=1e-4, atol=1e-5)


def both(train, change=lambda trainer: None, **options):
    """GRPOTrainer, and ours under the group mean, after the same change, trained: equal to the bit."""
    trainers = []
    for cls, config in ((GRPOTrainer, GRPOConfig), (OTBGRPOTrainer, OTBGRPOConfig)):
        more = {"baseline": "group_mean"} if config is OTBGRPOConfig else {}
        trainers.append(train(cls, config, train=False, scale_rewards="none", **more, **options))
        change(trainers[-1])
        trainers[-1].train()
    assert_same_weights(*trainers)
    assert logged(trainers[0], "reward") == logged(trainers[1], "reward")
    return trainers


def test_copied_policy_uses_own_forward(train):
    def freeze(trainer):
        trainer.ref_model = copy.deepcopy(trainer.model).requires_grad_(False)

    grpo, ours = both(train, freeze, beta=0.1, max_steps=3)
    assert logged(ours, "kl") == logged(grpo, "kl") and logged(ours, "kl")[-1] > 0


def leaves_eval(completion_ids, **kwargs):
    """A reward that leaves the policy in eval mode."""
    leaves_eval.trainer.model.eval()
    return tiny.even_bytes(completion_ids)


@pytest.mark.parametrize("options", [{}, SETTINGS["accumulation"]])
def test_rollout_keeps_its_initial_mode(train, options):
    def know(trainer):
        leaves_eval.trainer = trainer

    both(train, know, reward_funcs=leaves_eval, **options)
    trainer = train(OTBGRPOTrainer, baseline="value", reward_funcs=leaves_eval, train=False, **options)
    know(trainer)
    trainer.train()
    prompts = trainer.args.generation_batch_size // trainer.num_generations
    assert [*trainer.rollouts] == ["train"] and trainer.baseline.entry.estimator.prompts > prompts


def test_two_trainers_of_one_model_alive(train, model_path):
    def of_one_model(cls, config, **options):
        model = AutoModelForCausalLM.from_pretrained(model_path, dtype=torch.float32)
        options |= {"model": model, "processing_class": tiny.tokenizer(), "num_iterations": 2, "train": False}
        first, second = (train(cls, config, scale_rewards="none", **options) for _ in range(2))
        second.train()
        first.train()
        return first

    ours = of_one_model(OTBGRPOTrainer, OTBGRPOConfig, baseline="group_mean")
    assert_same_weights(of_one_model(GRPOTrainer, GRPOConfig), ours)
