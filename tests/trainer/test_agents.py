"""Many turns, tools, environments, and rewards along the way."""

import pytest
import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM
from trl import GRPOTrainer

from tests.helpers import tiny
from tests.helpers.oracles import double_loop, energies_by_softmax, mask_of
from tests.helpers.recording import first_rollout
from tests.helpers.scripted import TOOLS, TURNS, script_turns
from tests.helpers.settings import logged
from trl_otb import TokenRewards
from trl_otb.baselines import ALIGNMENTS, BASELINES
from trl_otb.rewards import turn_ends


CHAT = Dataset.from_dict({"prompt": [[{"role": "user", "content": f"{i}+3?"}] for i in range(8)]})
AGENT = {
    "train_dataset": CHAT,
    "num_generations": 8,
    "max_completion_length": 400,
    "generation_kwargs": {"max_new_tokens": 2},  # what is sampled is replaced
    "learning_rate": 0.0,
    "max_steps": 1,
}


def by_length(completion_ids, **kwargs):
    return [len(ids) % 7 / 7 for ids in completion_ids]


class Keep:
    """A reward function that keeps what it was called with."""

    __name__ = "keep"

    def __call__(self, completions, completion_ids, **kwargs):
        self.completions, self.completion_ids = completions, completion_ids
        return by_length(completion_ids)


def rewards_of(batch):
    return [
        len(row) % 7 / 7
        for row in (ids[m] for ids, m in zip(batch["completion_ids"], batch["completion_mask"].bool(), strict=True))
    ]


def assert_is_double_loop(batch, rewards, model_path, **options):
    model = AutoModelForCausalLM.from_pretrained(model_path, dtype=torch.float32)
    energy = energies_by_softmax(model, batch)
    mask = mask_of(batch)
    expected = double_loop(rewards, energy.tolist(), mask.tolist(), 8, **options)
    actual = batch["advantages"]
    actual = actual.unsqueeze(1) * mask if actual.dim() == 1 else actual
    torch.testing.assert_close(actual.double(), expected.double(), atol=2e-5, rtol=0)
    assert actual.abs().max() > 0.01


def decoded(trainer, ids):
    return trainer.processing_class.decode(ids)


# Turns and masks


def generated_text(trainer, batch, row):
    return decoded(trainer, batch["completion_ids"][row][mask_of(batch)[row].bool()])


def test_the_mask_is_what_the_policy_said(train, monkeypatch):
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
    assert results[:5] == [
        ["5", "35"],
        [],
        [],
        ["{'error': 'out of order'}", "{'error': 'Tool unknown not found.'}", "2", "4"],
        [],
    ]
    assert turn_ends(mask_of(batch)).sum(1).tolist() == [3, 1, 1, 3, 1, 2, 2, 5]
    turns = [sum(m["role"] == "assistant" for m in c) for c in keep.completions]
    assert turns == [3, 1, 1, 3, 1, 2, 2, 5]  # a turn is an assistant message


@pytest.mark.parametrize("alignment", ALIGNMENTS)
@pytest.mark.parametrize("options", [{"zero_tail": True}, {"zero_tail": False}, {"baseline": "otb_shrunk"}], ids=str)
def test_tools(train, monkeypatch, model_path, alignment, options):
    script_turns(monkeypatch)
    trainer = train(reward_funcs=by_length, tools=TOOLS, alignment=alignment, **options, **AGENT)
    batch = first_rollout(trainer)
    assert (mask_of(batch).sum(1) < batch["completion_mask"].sum(1)).sum() == 5
    assert_is_double_loop(batch, rewards_of(batch), model_path, alignment=alignment, **options)


def test_the_default_alignment_counts_generated_tokens(train):
    assert train(train=False).args.alignment == "generated"


def test_a_result_that_leaves_no_room_for_a_turn(train, monkeypatch, model_path):
    """The completion then ends with tool output, and has one turn."""
    script_turns(
        monkeypatch,
        [["<tool_call>\n" + '{"name": "chatter", "arguments": {"length": 30}}\n</tool_call>', "x"], ["= 5"]],
    )
    options = {**AGENT, "max_completion_length": 400}
    trainer = train(reward_funcs=by_length, tools=TOOLS, **options)
    length = first_rollout(trainer)["completion_mask"].sum(1).max().item()
    trainer = train(reward_funcs=by_length, tools=TOOLS, **{**options, "max_completion_length": length - 2})
    batch = first_rollout(trainer)
    longest = batch["completion_mask"].sum(1).argmax()
    last = batch["completion_mask"][longest].sum() - 1
    assert last == length - 3 and mask_of(batch)[longest, last] == 0
    assert turn_ends(mask_of(batch)).sum(1).tolist() == [1] * 8
    assert_is_double_loop(batch, rewards_of(batch), model_path)


class Adder:
    def reset(self, **kwargs):
        self.added = 0

    def add(self, a: int, b: int) -> int:
        """Adds two integers.

        Args:
            a: First number.
            b: Second number.
        """
        self.added += 1
        return a + b

    def get_reward(self):
        return self.added / 4


class Repeater:
    def reset(self, **kwargs):
        self.rewards = [0.0]

    async def add(self, a: int, b: int) -> str:
        """Repeats itself.

        Args:
            a: First number.
            b: Second number.
        """
        self.rewards[-1] += 0.25
        self.rewards.append(0.0)
        return "again " * 3

    async def get_reward(self):
        return self.rewards  # one reward per turn


ADDING = [TURNS[7], TURNS[6], ["= 5"], TURNS[7][1:]]


def test_an_environment(train, monkeypatch, model_path):
    script_turns(monkeypatch, ADDING)
    trainer = train(reward_funcs=None, environment_factory=Adder, **AGENT)
    batch = first_rollout(trainer)
    assert_is_double_loop(batch, [1.0, 0.25, 0.0, 0.75] * 2, model_path)


def test_environments_mixed_in_a_batch(train, monkeypatch, model_path):
    """One gives a number, the other one per turn; a group has rows of one of them."""
    script_turns(monkeypatch, ADDING)
    mixed = CHAT.add_column("environment", ["adder", "repeater"] * 4)
    options = {
        **AGENT,
        "train_dataset": mixed,
        "per_device_train_batch_size": 16,
        "environment_factory": {"adder": Adder, "repeater": Repeater},
    }
    trainer = train(reward_funcs=None, **options)
    batch = {
        k: torch.cat([b[k] for b in trainer.micro_batches])
        for k in (
            "prompt_ids",
            "prompt_mask",
            "completion_ids",
            "completion_mask",
            "tool_mask",
            "advantages",
            "rows_of_rollout",
        )
    }
    batch = {k: v[batch["rows_of_rollout"].argsort()] for k, v in batch.items()}
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


def test_a_rollout_function_with_turns(train, model_path):
    def rollout(prompts, trainer):
        g = torch.Generator().manual_seed(0)
        ids, masks = [], []
        for row in range(len(prompts)):
            stretches = torch.randint(1, 6, (2 * (row % 3) + 1,), generator=g).tolist()
            masks.append([(k + 1) % 2 for k, length in enumerate(stretches) for _ in range(length)])
            ids.append(torch.randint(0, 256, (sum(stretches),), generator=g).tolist())
        prompt_ids = [
            trainer.processing_class.apply_chat_template(p, add_generation_prompt=True, return_dict=False)
            for p in prompts
        ]
        return {"prompt_ids": prompt_ids, "completion_ids": ids, "logprobs": None, "env_mask": masks}

    def progress(completion_ids, **kwargs):
        return [[1.0, -0.5, 0.25][: row % 3 + 1] for row in range(len(completion_ids))]

    trainer = train(reward_funcs=progress, rollout_func=rollout, **AGENT)
    batch = first_rollout(trainer)
    rewards = torch.zeros_like(mask_of(batch), dtype=torch.float32)
    for row, ends in enumerate(turn_ends(mask_of(batch))):
        rewards[row, ends] = torch.tensor([1.0, -0.5, 0.25][: row % 3 + 1])
    assert_is_double_loop(batch, rewards.tolist(), model_path)


@pytest.mark.parametrize(
    ("vllm", "counts", "idle"),
    [(True, [2, 5], 3), (True, [2, 0], 0), (True, [0, 4], 4), (False, [2, 5], 0), (False, [0, 5], 1)],
)
def test_processes_take_a_turn_together(train, monkeypatch, vllm, counts, idle):
    """
    vLLM deals completions out in slices of equal length, so that prompts are made up to the largest number of them.
    """
    asked = []

    def generate(self, prompt_ids, images, multimodal_fields, num_generations):
        assert num_generations == 1
        asked.append((prompt_ids, images))
        return [[i] for i in range(len(prompt_ids))], [[0.0]] * len(prompt_ids)

    monkeypatch.setattr(GRPOTrainer, "_generate_single_turn", generate)
    trainer = train(train=False)
    monkeypatch.setattr(trainer.accelerator, "gather", lambda own: torch.tensor(counts))
    trainer.use_vllm, stand_in = vllm, [trainer.processing_class.eos_token_id]
    own = [[1, 2], [3]][: counts[0]]
    ids, logps = trainer._generate_together(own, ["an image"] * len(own), {}, num_generations=1)
    assert asked == [(own + [stand_in] * idle, ["an image"] * len(own) + [None] * idle)]
    assert ids == [[0], [1]][: counts[0]] and len(logps) == counts[0]
    monkeypatch.setattr(trainer.accelerator, "gather", lambda own: torch.tensor([0, 0]))
    assert trainer._generate_together([], None, {}) is None and len(asked) == 1


# Rewards along the way

GROUPS = {"train_dataset": tiny.prompts(), "learning_rate": 1e-2, "max_steps": 2}


def once(reward_func, of_each):
    """The rewards of a function, each put through `of_each(reward, ids)`."""

    def function(completion_ids, **kwargs):
        rewards = reward_func(completion_ids)
        return [of_each(r, ids) for r, ids in zip(rewards, completion_ids, strict=True)]

    return function


SOURCES = {
    "extra forward": {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 4},
    "training forward": {},
    "GRPOTrainer's forward": {"num_iterations": 2, "max_steps": 4},
}
AT_THE_END = {
    "a turn": lambda r, ids: [r],
    "a tuple": lambda r, ids: (r,),
    "an array": lambda r, ids: torch.tensor([r]),
    "tokens": lambda r, ids: TokenRewards([0.0] * (len(ids) - 1) + [r]),
}


@pytest.mark.parametrize("form", AT_THE_END)
@pytest.mark.parametrize("source", SOURCES)
def test_a_reward_at_the_end_is_the_scalar_reward(train, form, source):
    plain = train(**{**GROUPS, **SOURCES[source]})
    credited = train(reward_funcs=once(tiny.even_bytes, AT_THE_END[form]), **{**GROUPS, **SOURCES[source]})
    for a, b in zip(plain.micro_batches, credited.micro_batches, strict=True):
        assert torch.equal(a["advantages"], b["advantages"])
    for key in ("reward", "otb/grad_power", "grad_norm"):
        assert logged(plain, key) == logged(credited, key)


def test_turns_of_one_conversation(train, monkeypatch, model_path):
    """Half a point for a call, in the turn that makes it, and one for an answer: G_t falls from turn to turn."""
    script_turns(monkeypatch)

    def progress(completions, **kwargs):
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


@pytest.mark.parametrize("baseline", [b for b in BASELINES if not BASELINES[b].per_token])
def test_baselines_of_completions_use_the_sum(train, baseline):
    def tokens(completion_ids, **kwargs):
        return [TokenRewards([0.1 * (i % 2 == 0) for i in ids]) for ids in completion_ids]

    def total(completion_ids, **kwargs):
        return [sum(t) for t in tokens(completion_ids)]

    a, b = (train(reward_funcs=f, baseline=baseline, **GROUPS) for f in (tokens, total))
    for x, y in zip(a.micro_batches, b.micro_batches, strict=True):
        torch.testing.assert_close(x["advantages"], y["advantages"], atol=1e-6, rtol=0)
    assert logged(a, "reward") == pytest.approx(logged(b, "reward"))


def test_shaping_that_telescopes_leaves_the_reward_to_go_right(train, model_path):
    """With a potential Φ, 0 at the end, F_t = Φ_{t+1} − Φ_t: then G_t = R − Φ_t, and the sum is R − Φ_0."""

    def potential(ids):
        return [0.3 + 0.1 * (i % 5) for i in ids] + [0.0]

    def shaping(completion_ids, **kwargs):
        return [
            TokenRewards([b - a for a, b in zip(potential(ids)[:-1], potential(ids)[1:], strict=True)])
            for ids in completion_ids
        ]

    trainer = train(reward_funcs=[tiny.even_bytes, shaping], **{**GROUPS, "max_steps": 1})
    batch = first_rollout(trainer)
    mask = mask_of(batch).bool()
    completions = [ids[m].tolist() for ids, m in zip(batch["completion_ids"], mask, strict=True)]
    ends = tiny.even_bytes(completions)
    energy = energies_by_softmax(AutoModelForCausalLM.from_pretrained(model_path, dtype=torch.float32), batch)
    # The definition with G_t = R − Φ_t written down, no reward-to-go formed
    realized = energy.cumsum(1)
    to_go = torch.zeros_like(realized)
    for row, ids in enumerate(completions):
        to_go[row, : len(ids)] = ends[row] - torch.tensor(potential(ids)[:-1])
    for first in (0, 4):
        rows = slice(first, first + 4)
        present = mask[rows]
        b = (realized * to_go * mask)[rows].sum(0) / (realized * mask)[rows].sum(0)
        alone = present.sum(0) == 1
        expected = torch.where(present & ~alone, to_go[rows] - b, 0.0)
        actual = torch.where(alone, 0.0, batch["advantages"][rows].double())
        torch.testing.assert_close(actual, expected, atol=2e-5, rtol=0)


def test_none_and_numbers_and_turns_mix(train):
    def mixed(completion_ids, **kwargs):
        forms = [None, 0.5, [1.0], TokenRewards([0.0] * (len(completion_ids[3]) - 1) + [0.25])]
        return [*forms[:3], forms[3], *[0.0] * (len(completion_ids) - 4)]

    trainer = train(reward_funcs=mixed, learning_rate=0.0, max_steps=1)
    batch = first_rollout(trainer)
    assert (batch["advantages"][0] == 0).all() and batch["advantages"][1:4].abs().max() > 0
    assert logged(trainer, "rewards/mixed/mean") == [pytest.approx(1.75 / 7)]


@pytest.mark.parametrize("scale", ["group", "batch"])
@pytest.mark.parametrize("aggregation", ["sum_then_normalize", "normalize_then_sum"])
def test_scaling_and_aggregation_reach_the_tokens(train, aggregation, scale):
    """Each way of GRPOTrainer's, applied to turns; with the reward at the end it is the scalar path's."""
    options = {"multi_objective_aggregation": aggregation, "scale_rewards": scale, "reward_weights": [1.0, 0.3]}
    plain = train(reward_funcs=[tiny.even_bytes, by_length], **GROUPS, **options)
    first = once(tiny.even_bytes, AT_THE_END["tokens"])
    credited = train(reward_funcs=[first, by_length], **GROUPS, **options)
    for a, b in zip(plain.micro_batches, credited.micro_batches, strict=True):
        torch.testing.assert_close(a["advantages"], b["advantages"], atol=2e-6, rtol=0)


async def slowly(completion_ids, **kwargs):
    return [[r] for r in tiny.even_bytes(completion_ids)]


def test_async_reward_functions_credit_turns(train):
    plain, credited = train(**GROUPS), train(reward_funcs=slowly, **GROUPS)
    assert torch.equal(plain.micro_batches[-1]["advantages"], credited.micro_batches[-1]["advantages"])


def test_masked_completions_need_no_reward_per_turn(train):
    def turns(completion_ids, **kwargs):
        return [[1.0] for _ in completion_ids]

    trainer = train(reward_funcs=turns, mask_truncated_completions=True, **GROUPS)
    assert logged(trainer, "reward") == [1.0, 1.0]
