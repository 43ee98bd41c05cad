"""Many turns, tools, environments, and rewards along the way."""

import pytest
import torch

from tests.helpers.agents import AGENT, CHAT, assert_is_double_loop, by_length, rewards_of
from tests.helpers.oracles import mask_of
from tests.helpers.recording import first_rollout
from tests.helpers.scripted import TOOLS, TURNS, add, script_turns
from tests.helpers.settings import logged
from trl_otb.seam.token_rewards import turn_ends
from trl_otb.seam.tool_turns import together


class Keep:
    """A reward function that keeps what it was called with."""

    __name__ = "keep"

    def __call__(self, completions, completion_ids, **kwargs):
        self.completions, self.completion_ids = completions, completion_ids
        return by_length(completion_ids)


def decoded(trainer, ids):
    return trainer.processing_class.decode(ids)


def generated_text(trainer, batch, row):
    return decoded(trainer, batch["completion_ids"][row][mask_of(batch)[row].bool()])


@pytest.mark.slow
def test_mask_is_what_policy_generated(train, monkeypatch):
    """Of sync and async, malformed, failing and unknown calls, a result that is rolled back and turns that are cut."""
    script_turns(monkeypatch)
    keep = Keep()
    trainer = train(reward_funcs=keep, tools=TOOLS, **AGENT)
    batch = first_rollout(trainer)
    said = [generated_text(trainer, batch, row) for row in range(8)]
    expected = [f"@{i} " + "<|im_end|>".join(turns) + "<|im_end|>" for i, turns in enumerate(TURNS)]
    expected[4] = f"@4 {TURNS[4][0]}<|im_end|>"
    for row in (0, 1, 2, 3, 4, 6, 7):
        assert said[row] == expected[row], row
    assert expected[5].startswith(said[5]) and len(TURNS[5][0]) < len(said[5]) < len(expected[5])  # cut in a turn
    results = [[m["content"] for m in c if m["role"] == "tool"] for c in keep.completions]
    errors = ["{'error': 'out of order'}", "{'error': 'Tool unknown not found.'}"]
    assert results[:5] == [["5", "35"], [], [], [*errors, "2", "4"], []]
    assert turn_ends(mask_of(batch)).sum(1).tolist() == [3, 1, 1, 3, 1, 2, 2, 5]
    turns = [sum(m["role"] == "assistant" for m in c) for c in keep.completions]
    assert turns == [3, 1, 1, 3, 1, 2, 2, 5]  # a turn is an assistant message


@pytest.mark.parametrize("baseline", ["otb", "ogb"])
def test_tools(train, monkeypatch, model_path, baseline):
    script_turns(monkeypatch)
    trainer = train(reward_funcs=by_length, tools=TOOLS, baseline=baseline, **AGENT)
    batch = first_rollout(trainer)
    assert (mask_of(batch).sum(1) < batch["completion_mask"].sum(1)).sum() == 5
    assert_is_double_loop(batch, rewards_of(batch), model_path, baseline=baseline)


class Adder:
    def reset(self, **kwargs):
        self.added = 0

    def add(self, a: int, b: int) -> int:
        self.added += 1
        return a + b

    def get_reward(self):
        return self.added / 4


class Repeater:
    def reset(self, **kwargs):
        self.rewards = [0.0]

    async def add(self, a: int, b: int) -> str:
        self.rewards[-1] += 0.25
        self.rewards.append(0.0)
        return "again " * 3

    async def get_reward(self):
        return self.rewards  # one reward per turn


Adder.add.__doc__ = Repeater.add.__doc__ = add.__doc__  # of which TRL makes a schema
ADDING = [TURNS[7], TURNS[6], ["= 5"], TURNS[7][1:]]


def test_environments_mixed_in_a_batch(train, monkeypatch, model_path):
    """One gives a number, the other one per turn; a group has rows of one of them."""
    script_turns(monkeypatch, ADDING)
    mixed = CHAT.add_column("environment", ["adder", "repeater"] * 4)
    environments = {"environment_factory": {"adder": Adder, "repeater": Repeater}, "train_dataset": mixed}
    trainer = train(reward_funcs=None, **AGENT | environments, per_device_train_batch_size=16)
    batch = first_rollout(trainer)
    mask = mask_of(batch)
    rewards = torch.zeros(16, mask.size(1))
    ends = turn_ends(mask)
    repeats = ["again" in decoded(trainer, ids) for ids in batch["completion_ids"]]
    assert [any(repeats[:8]), any(repeats[8:])].count(True) == 1
    repeater_first = any(repeats[:8])
    for row, calls in enumerate([4, 1, 0, 3] * 4):
        at = ends[row].nonzero().squeeze(1)
        if repeater_first == (row < 8):
            rewards[row, at[:calls]] = 0.25
        else:
            rewards[row, at[-1]] = calls / 4
    assert_is_double_loop(batch, rewards.tolist(), model_path)
    assert logged(trainer, "reward") == [pytest.approx(0.5)]


@pytest.mark.parametrize(
    ("vllm", "counts", "idle"),
    [(True, [2, 5], 3), (True, [2, 0], 0), (True, [0, 4], 4), (False, [2, 5], 0), (False, [0, 5], 1)],
)
def test_processes_take_a_turn_together(train, monkeypatch, vllm, counts, idle):
    """
    vLLM deals completions out in slices of equal length, so that prompts are made up to the largest number of them.
    """
    asked = []

    def generate(prompt_ids, images, multimodal_fields):
        asked.append((prompt_ids, images))
        return [[i] for i in range(len(prompt_ids))], [[0.0]] * len(prompt_ids)

    trainer = train(train=False)
    monkeypatch.setattr(trainer.accelerator, "gather", lambda own: torch.tensor(counts))
    trainer.use_vllm, stand_in = vllm, [trainer.processing_class.eos_token_id]
    own = [[1, 2], [3]][: counts[0]]
    ids, logps = together(trainer, generate, own, ["an image"] * len(own), {})
    assert asked == [(own + [stand_in] * idle, ["an image"] * len(own) + [None] * idle)]
    assert ids == [[0], [1]][: counts[0]] and len(logps) == counts[0]
    monkeypatch.setattr(trainer.accelerator, "gather", lambda own: torch.tensor([0, 0]))
    assert together(trainer, generate, [], None, {}) is None and len(asked) == 1
