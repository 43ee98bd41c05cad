"""Rewards that cannot be trained on are named: function, row, value."""

import math

import pytest
import torch

from tests.helpers.recording import first_rollout
from tests.helpers.settings import logged
from trl_otb import TokenRewards


def with_first(value):
    """A reward function whose reward of completion 1 is `value`."""

    def function(completion_ids, **kwargs):
        return [0.0, value] + [1.0] * (len(completion_ids) - 2)

    return function


def too_many(completion_ids, **kwargs):
    return [0.0, 0.0, [1.0, 2.0]] + [0.0] * (len(completion_ids) - 3)


def too_few_tokens(completion_ids, **kwargs):
    return [0.0, TokenRewards([1.0] * (len(completion_ids[1]) - 1))] + [0.0] * (len(completion_ids) - 2)


def not_finite(completion_ids, **kwargs):
    return [[float("nan")]] + [0.0] * (len(completion_ids) - 1)


def nothing_in_a_turn(completion_ids, **kwargs):
    return [0.0] * (len(completion_ids) - 1) + [[None]]


async def infinite_later(completion_ids, **kwargs):
    return [math.inf] * len(completion_ids)


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (too_many, "'too_many' returned 2 rewards for completion 2, which has 1 turns.*one number for each assistant"),
        (too_few_tokens, "'too_few_tokens' returned 7 rewards for completion 1, which has 8 tokens.*`completion_ids`"),
        (not_finite, "'not_finite' returned nan as reward 0 of completion 0.*must be finite"),
        (with_first(math.inf), "'function' returned inf for completion 1: a reward must be a finite number, or None"),
        (with_first(-math.inf), "'function' returned -inf for completion 1"),
        (with_first(torch.tensor(math.inf)), r"'function' returned tensor\(inf\) for completion 1"),
        (with_first("1.0"), "'function' returned '1.0' for completion 1"),
        (with_first({"reward": 1}), "'function' returned {'reward': 1} for completion 1"),
        (with_first([1.0, "2"]), "'function' returned '2' as reward 1 of completion 1"),
        (lambda completion_ids, **kwargs: None, "returned None: it must return a list with one reward per completion"),
        (lambda completion_ids, **kwargs: 1.0, "returned 1.0: it must return a list"),
        (lambda completion_ids, **kwargs: "1" * len(completion_ids), "returned '1+': it must return a list"),
        (infinite_later, "'infinite_later' returned inf for completion 0"),
        (nothing_in_a_turn, "'nothing_in_a_turn' returned None as reward 0 of completion 7.*gets None as a whole"),
    ],
)
def test_wrong_rewards_are_named(train, function, message):
    with pytest.raises(ValueError, match=message):
        train(reward_funcs=function, generation_kwargs={"min_new_tokens": 8, "max_new_tokens": 8})


@pytest.mark.parametrize("nan", [None, math.nan, torch.tensor(math.nan), torch.tensor([math.nan])], ids=str)
def test_what_grpo_trainer_takes_for_unscorable_is_unscorable(train, nan):
    batch = first_rollout(train(reward_funcs=with_first(nan), max_steps=1))
    assert (batch["advantages"][1] == 0).all() and batch["advantages"][0].abs().max() > 0


def test_rewards_may_be_any_iterable_of_numbers(train):
    whole = train(reward_funcs=lambda completion_ids, **kwargs: [float(i) for i in range(len(completion_ids))])
    for form in (
        lambda completion_ids, **kwargs: torch.arange(len(completion_ids)),
        lambda completion_ids, **kwargs: (i for i in range(len(completion_ids))),
        lambda completion_ids, **kwargs: [torch.tensor([float(i)]) for i in range(len(completion_ids))],
    ):
        assert logged(train(reward_funcs=form), "reward") == logged(whole, "reward")
