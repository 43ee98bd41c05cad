"""A user's subclass of GRPOTrainer becomes one of OTBGRPOTrainer by another base class."""

import pytest
import torch
from trl import GRPOConfig, GRPOTrainer

from tests.helpers.settings import SOURCES, assert_same_weights, in_turn
from trl_otb import OTBGRPOConfig, OTBGRPOTrainer, TokenRewards


class Shaped:
    """Rewards and the loss of the base class, changed."""

    def _calculate_rewards(self, *args, **kwargs):
        return 2 * super()._calculate_rewards(*args, **kwargs) + 1

    def compute_loss(self, *args, **kwargs):
        return 0.5 * super().compute_loss(*args, **kwargs)


class Named:
    """Rewards by the names of the functions."""

    def _calculate_rewards(self, *args, **kwargs):
        names = [function.__name__ for function in self.reward_funcs]
        return super()._calculate_rewards(*args, **kwargs) * torch.tensor([3.0 if "even" in n else 1.0 for n in names])


class Replaced:
    """Rewards that no reward function has seen."""

    def _calculate_rewards(self, inputs, prompts, completions, completion_ids_list):
        lengths = [[float(sum(ids) % 7)] for ids in completion_ids_list]
        return self.accelerator.gather(torch.tensor(lengths))


@pytest.mark.parametrize(("change", "source"), in_turn([Shaped, Named, Replaced], SOURCES))
def test_group_mean_gives_the_weights_of_the_same_subclass_of_grpo_trainer(train, change, source):
    options = SOURCES[source]
    grpo = train(type("OfGRPO", (change, GRPOTrainer), {}), GRPOConfig, scale_rewards="none", **options)
    otb = train(type("OfOTB", (change, OTBGRPOTrainer), {}), OTBGRPOConfig, baseline="group_mean", **options)
    assert_same_weights(grpo, otb)


@pytest.mark.parametrize("source", SOURCES)
def test_advantages_are_formed_from_the_rewards_that_a_subclass_returns(train, source):
    plain = train(OTBGRPOTrainer, max_steps=1, **SOURCES[source])
    shaped = train(type("OfOTB", (Shaped, OTBGRPOTrainer), {}), max_steps=1, **SOURCES[source])
    assert shaped.energy_source == source
    plain, shaped = plain.rollouts["train"], shaped.rollouts["train"]
    torch.testing.assert_close(shaped.rewards, 2 * plain.rewards + 1)
    torch.testing.assert_close(shaped.advantages, 2 * plain.advantages, atol=1e-6, rtol=0)
    assert plain.advantages.abs().max() > 0.01


def test_what_a_subclass_adds_to_rewards_of_tokens_is_earned_at_the_last_one(train):
    def brevity(completion_ids, **kwargs):
        return [TokenRewards([-0.1] * len(ids)) for ids in completion_ids]

    trainer = train(type("OfOTB", (Shaped, OTBGRPOTrainer), {}), reward_funcs=brevity, max_steps=1)
    rollout = trainer.rollouts["train"]
    lengths = rollout.mask.sum(dim=1)
    last = torch.nn.functional.one_hot(lengths - 1, rollout.mask.size(1))
    # -0.2 a token and 1 in all, of which -0.1 a token was earned where the function says
    expected = -0.1 * rollout.mask + last * (1 - 0.1 * lengths).unsqueeze(1)
    torch.testing.assert_close(rollout.rewards, expected)


@pytest.mark.parametrize("cls", [GRPOTrainer, OTBGRPOTrainer])
def test_a_method_that_one_trainer_was_given_stays(train, cls):
    trainer = train(cls, GRPOConfig if cls is GRPOTrainer else OTBGRPOConfig, train=False, max_steps=1)
    given = trainer._calculate_rewards = lambda inputs, *args: torch.arange(float(len(inputs))).unsqueeze(1)
    trainer.train()
    assert trainer._calculate_rewards is given
    assert trainer.state.log_history[0]["reward"] == 3.5
