"""Rewards that cannot be trained on are named: function, row, value."""

import math

import numpy as np
import pandas as pd
import pytest
import torch

from tests.helpers.recording import first_rollout
from tests.helpers.settings import logged, scripted_rollout
from trl_otb import TokenRewards
from trl_otb.seam.token_rewards import RewardRecorder


def with_first(value):
    """A reward function whose reward of completion 1 is `value`."""

    def function(completion_ids, **kwargs):
        return [0.0, value] + [1.0] * (len(completion_ids) - 2)

    return function


async def infinite_later(completion_ids, **kwargs):
    return [math.inf] * len(completion_ids)


def tokens_of(form):
    def function(completion_ids, **kwargs):
        return [TokenRewards(form(len(ids))) for ids in completion_ids]

    return function


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (with_first([1.0, 2.0]), "'function' returned 2 rewards for completion 1, which has 1 turns.*each assistant"),
        (with_first(TokenRewards([1.0] * 7)), "7 rewards for completion 1, which has 8 tokens.*`completion_ids`"),
        (with_first([math.nan]), "'function' returned nan as reward 0 of completion 1.*must be finite"),
        (with_first(-math.inf), "'function' returned -inf for completion 1: a reward must be a finite .*, or None"),
        (with_first(torch.tensor(math.inf)), r"'function' returned tensor\(inf\) for completion 1"),
        (with_first("1.0"), "'function' returned '1.0' for completion 1"),
        (with_first({"reward": 1}), "'function' returned {'reward': 1} for completion 1"),
        (with_first([1.0, "2"]), "'function' returned '2' as reward 1 of completion 1"),
        (lambda completion_ids, **kwargs: 1.0, "returned 1.0: it must return a list with one reward per completion"),
        (lambda completion_ids, **kwargs: TokenRewards([1.0] * len(completion_ids)), r"returned TokenRewards\(\[1.0"),
        (infinite_later, "'infinite_later' returned inf for completion 0"),
        (with_first([1e39]), r"'function' returned 1e\+39 as reward 0 of completion 1"),
        (with_first(10**400), "'function' returned 1000+.* for completion 1"),
        (tokens_of(lambda n: [2e38] * n), r"'function' returned rewards that sum to 1.6e\+39 of completion 0"),
        (tokens_of(lambda n: torch.zeros(n, 1)), r"returned \[0.0\] as reward 0 of completion 0"),
        (with_first([None]), "returned None as reward 0 of completion 1: rewards of turns .* Return None for"),
    ],
)
def test_wrong_rewards_are_named(train, function, message):
    with pytest.raises(ValueError, match=message):
        train(reward_funcs=function, generation_kwargs={"min_new_tokens": 8, "max_new_tokens": 8})


@pytest.mark.parametrize("nan", [None, math.nan, torch.tensor(math.nan), torch.tensor([math.nan])], ids=str)
def test_unscorable_is_as_in_grpo_trainer(train, nan):
    batch = first_rollout(train(reward_funcs=with_first(nan), max_steps=1))
    assert (batch["advantages"][1] == 0).all() and (batch["advantages"][[0, 2, 3], 0] != 0).all()


LARGE = r"Completion . of all processes has a .* that is not finite in float32"


@pytest.mark.parametrize(
    ("rewards", "options", "message"),
    [
        ([1e20, 2e20], {"reward_weights": [1e38, 1.0]}, LARGE),
        ([1e20, 2e20], {"scale_rewards": "group"}, LARGE),
        ([3.4e38, *[-3.4e38] * 3], {"reward_weights": [1.0, 0.0]}, r"rewards of up to 3.4e\+38 overflow.*Scale the"),
        ([*[3.4e38] * 3, 0.0], {"reward_weights": [1.0, 0.0], "baseline": "value"}, r"3.4e\+38 overflow float32"),
    ],
)
def test_sums_beyond_float32_are_named_before_a_step(train, rewards, options, message):
    """Each reward is finite; a sum, square or advantage is not, and GRPOTrainer's weights are NaN from then on."""

    def large(completion_ids, **kwargs):
        return [rewards[i % len(rewards)] for i in range(len(completion_ids))]

    options = {"baseline": "group_mean", "scale_rewards": "none", **options}
    trainer = train(reward_funcs=[large, large], train=False, **options)
    with pytest.raises(ValueError, match=message):
        trainer.train()
    assert trainer.state.global_step == 0 and all(p.isfinite().all() for p in trainer.model.parameters())


def test_reward_function_may_change_its_lists(train):
    def first(completion_ids, **kwargs):
        return [float(ids[0]) for ids in completion_ids]

    def pops(completions, completion_ids, **kwargs):
        completions.clear()
        return [float(ids.pop(0)) for ids in completion_ids]

    assert logged(train(reward_funcs=pops), "reward") == logged(train(reward_funcs=first), "reward")


def numbers_of_tokens(form, ids=((1, 2, 3), (4, 5))):
    """What is made of `form` of a few numbers, in each row."""
    recorder = RewardRecorder([list(row) for row in ids], [1.0])
    rewards = [TokenRewards(form([0.5 * i for i in range(len(row))])) for row in ids]
    sums = recorder.wrap(0, "function", lambda: rewards, False)()
    mask = torch.tensor([[1, 1, 1], [1, 1, 0]])
    return sums, recorder.token_rewards(mask, torch.tensor(sums), torch.ones(2, 1))


@pytest.mark.parametrize(
    "form",
    [
        tuple,
        np.array,
        torch.tensor,
        lambda x: torch.tensor(x, dtype=torch.bfloat16, requires_grad=True),
        lambda x: [torch.tensor(number) for number in x],
        lambda x: (number for number in x),
    ],
    ids="tuple numpy torch bfloat16 tensors generator".split(),
)
def test_token_rewards_may_be_any_numbers(form):
    sums, rewards = numbers_of_tokens(form)
    assert sums == [1.5, 0.5] == numbers_of_tokens(list)[0]
    assert rewards.tolist() == [[0.0, 0.5, 1.0], [0.0, 0.5, 0.0]]


class OneByOne(np.ndarray):
    def __iter__(self):
        raise AssertionError("looked at one by one, which takes seconds for a million")


def test_long_token_rewards_are_read_once():
    sums, rewards = numbers_of_tokens(lambda x: np.array(x).view(OneByOne))
    assert sums == [1.5, 0.5] and rewards.sum() == 2


FORMS = {  # of rewards, (B,)
    "tensor": lambda rewards: rewards,
    "generator": lambda rewards: (reward for reward in rewards.tolist()),
    "tensors of one": lambda rewards: [reward.view(1) for reward in rewards],
    "logits": lambda rewards: rewards.unsqueeze(1),
    "arrays of one": lambda rewards: list(rewards.unsqueeze(1).numpy()),
    "series of one": lambda rewards: [pd.Series([reward], index=[5]) for reward in rewards.numpy()],
}


@pytest.mark.parametrize("form", FORMS)
def test_rewards_may_come_in_any_form(train, form):
    """Where completions have several turns, too: a list of one is a reward per turn, an array of one is not."""

    def run(form):
        def reward(completion_ids, **kwargs):
            return form(torch.tensor([float(len(ids)) for ids in completion_ids]))

        options = {"rollout_func": scripted_rollout, "learning_rate": 0.0, "max_steps": 1}
        return train(reward_funcs=reward, **options).rollouts["train"]

    expected, found = run(torch.Tensor.tolist), run(FORMS[form])
    assert (expected.mask.sum(1) < expected.completion_mask.sum(1)).any()  # several turns
    assert torch.equal(found.advantages, expected.advantages) and found.rewards.dim() == 1
