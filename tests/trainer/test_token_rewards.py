"""Rewards per turn and per token, along the way."""

import pytest
import torch

from tests.helpers import tiny
from tests.helpers.agents import AGENT, assert_is_double_loop, by_length, rewards_of
from tests.helpers.oracles import mask_of
from tests.helpers.recording import first_rollout
from tests.helpers.scripted import TOOLS, TURNS, script_turns
from tests.helpers.settings import SOURCES, assert_same_weights, in_turn, logged
from trl_otb import TokenRewards
from trl_otb.seam.token_rewards import turn_ends


GROUPS = {"train_dataset": tiny.prompts(), "learning_rate": 1e-2, "max_steps": 2}


def once(reward_func, of_each):
    """The rewards of a function, each put through `of_each(reward, ids)`."""

    def function(completion_ids, **kwargs):
        rewards = reward_func(completion_ids)
        return [of_each(r, ids) for r, ids in zip(rewards, completion_ids, strict=True)]

    return function


AT_THE_END = {
    "a turn": lambda r, ids: [r],
    "a tuple": lambda r, ids: (r,),
    "an array": lambda r, ids: torch.tensor([r]),
    "tokens": lambda r, ids: TokenRewards([0.0] * (len(ids) - 1) + [r]),
}


AGGREGATION = "multi_objective_aggregation"
OPTIONS = [
    *[(form, SOURCES[source]) for form, source in in_turn(AT_THE_END, SOURCES)],
    ("tokens", {"baseline": "ogb", "scale_rewards": "group"}),
    ("tokens", {"baseline": "ogb", "scale_rewards": "batch"}),
    ("tokens", {"baseline": "ogb", "scale_rewards": "group", AGGREGATION: "normalize_then_sum"}),
    ("tokens", {AGGREGATION: "normalize_then_sum"}),
]


@pytest.mark.parametrize(("form", "options"), OPTIONS)
def test_end_reward_equals_scalar_reward(train, form, options):
    """To the bit for one function; with two, each way of GRPOTrainer's to scale and add them, applied to turns."""
    functions = [tiny.even_bytes, once(tiny.even_bytes, AT_THE_END[form])]
    several = {"baseline", AGGREGATION} & {*options}
    plain, credited = (train(reward_funcs=[f, by_length] if several else f, **GROUPS, **options) for f in functions)
    for a, b in zip(plain.micro_batches, credited.micro_batches, strict=True):
        torch.testing.assert_close(a["advantages"], b["advantages"], atol=2e-6 if several else 0, rtol=0)
    for key in () if several else ("reward", "otb/grad_power", "grad_norm"):
        assert logged(plain, key) == logged(credited, key)


def test_turns_of_one_conversation(train, monkeypatch, model_path):
    """Half a point for a call, in the turn that makes it, and one for an answer: G_t falls from turn to turn."""
    script_turns(monkeypatch)

    async def progress(completions, **kwargs):
        return [[0.5 if "tool_calls" in m else 1.0 for m in c if m["role"] == "assistant"] for c in completions]

    trainer = train(reward_funcs=[progress, by_length], reward_weights=[2.0, 0.5], tools=TOOLS, **AGENT)
    batch = first_rollout(trainer)
    mask = mask_of(batch)
    rewards, sums = torch.zeros_like(mask, dtype=torch.float32), []
    for row, (ends, turns) in enumerate(zip(turn_ends(mask), TURNS, strict=True)):
        at = ends.nonzero().squeeze(1)
        made = torch.tensor([0.5 if "</tool_call>" in turn else 1.0 for turn in turns][: len(at)])
        rewards[row, at] = 2.0 * made
        rewards[row, at[-1]] += 0.5 * rewards_of(batch)[row]
        sums.append(made.sum().item())
    assert_is_double_loop(batch, rewards.tolist(), model_path)
    assert logged(trainer, "rewards/progress/mean") == [pytest.approx(sum(sums) / 8)]
    assert logged(trainer, "reward") == [pytest.approx(rewards.sum(1).mean().item())]


def test_none_and_numbers_and_turns_mix(train):
    def mixed(completion_ids, **kwargs):
        forms = [None, 0.5, [1.0], TokenRewards([0.0] * (len(completion_ids[3]) - 1) + [0.25])]
        return [*forms[:3], forms[3], *[0.0] * (len(completion_ids) - 4)]

    trainer = train(reward_funcs=mixed, learning_rate=0.0, max_steps=1)
    batch = first_rollout(trainer)
    assert (batch["advantages"][0] == 0).all() and batch["advantages"][1:4].abs().max() > 0
    assert logged(trainer, "rewards/mixed/mean") == [pytest.approx(1.75 / 7)]


def test_masked_completions_need_no_turn_rewards(train):
    def turns(completion_ids, **kwargs):
        return [[1.0] for _ in completion_ids]

    trainer = train(reward_funcs=turns, mask_truncated_completions=True, **GROUPS)
    assert logged(trainer, "reward") == [1.0, 1.0]


def test_whole_return_credits_every_token(train):
    judged = once(tiny.even_bytes, lambda r, ids: TokenRewards([r] + [0.0] * (len(ids) - 1)))
    whole = train(reward_funcs=judged, credit_whole_return=True)
    assert_same_weights(whole, train())
    assert whole.rollouts["train"].rewards.dim() == 1
    with pytest.raises(ValueError, match="returned 2 rewards for completion 0, which has 1 turns"):
        train(reward_funcs=lambda prompts, **_: [[1.0, 2.0]] * len(prompts), credit_whole_return=True)
