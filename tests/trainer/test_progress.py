"""Progress functions in the trainer: what they are given, what `value` makes of it, and what goes wrong with them."""

import asyncio
import math
import random
import time
from itertools import pairwise

import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.helpers import tiny
from tests.helpers.agents import AGENT, CHAT, by_length
from tests.helpers.recording import Recording
from tests.helpers.scripted import TOOLS, script_turns
from tests.helpers.settings import assert_same_weights, logged
from trl_otb import OTBGRPOConfig, OTBGRPOTrainer, compare_baselines
from trl_otb.comparison import moments as moments_module
from trl_otb.progress import SURE, places_of, schedule


VALUE = {"baseline": "value", "max_steps": 3}


def even(completions, **kwargs):
    """The number of even characters, which the text tells alone."""
    return [float(sum(ord(letter) % 2 == 0 for letter in of)) for of in texts_of(completions)]


def texts_of(completions):
    return [of if isinstance(of, str) else "".join(m["content"] for m in of) for of in completions]


class Keeping(Recording):
    """Keeps the completions that the baseline gets."""

    def __init__(self, *args, **kwargs):
        self.seen = []
        super().__init__(*args, **kwargs)
        of = self.baseline.advantages_of
        self.baseline.advantages_of = lambda local, *args, **kw: (self.seen.append(local), of(local, *args, **kw))[1]


@pytest.fixture
def train_with(train):
    def run(*functions, **options):
        return train(**{"cls": Keeping, **VALUE, "progress_funcs": [*functions], **options})

    return run


@pytest.mark.parametrize("data", ["text", "conversation"])
def test_a_number_is_of_the_text_before_the_token(train_with, data):
    trainer = train_with(even, **({"train_dataset": CHAT} if data == "conversation" else {}))
    seen, rollout = trainer.seen[-1], trainer.rollouts["train"]
    decode = trainer.processing_class.decode
    for row, ids in enumerate(rollout.completion_ids.tolist()):
        for t in range(int(rollout.mask[row].sum())):
            (expected,) = even([decode(ids[:t], skip_special_tokens=True)])
            assert seen.progress[row, t, 0] == expected
    assert logged(trainer, "otb/value/r2_at_end")


def test_reward_functions_by_one_switch(train_with):
    trainer = train_with(reward_funcs=[tiny.even_bytes, even], progress_funcs="rewards")
    seen, rollout = trainer.seen[-1], trainer.rollouts["train"]
    assert trainer._trl_otb.progress.names == ["reward even_bytes", "reward even"]
    for row, ids in enumerate(rollout.completion_ids.tolist()):
        for t in range(1, int(rollout.mask[row].sum())):
            assert seen.progress[row, t, 0] == pytest.approx(tiny.even_bytes([ids[:t]])[0])


def test_a_config_names_functions(train, monkeypatch, tmp_path):
    (tmp_path / "my_progress.py").write_text(
        "def length(completions, **kwargs):\n    return [*map(len, completions)]\n"
    )
    monkeypatch.chdir(tmp_path)
    trainer = train(cls=Keeping, progress_funcs=["my_progress:length", "rewards"], **VALUE)
    assert trainer._trl_otb.progress.names == ["my_progress:length", "reward even_bytes"]
    assert torch.equal(trainer.seen[-1].progress[:, 3, 0] > 0, trainer.seen[-1].mask[:, 3] > 0)
    assert OTBGRPOConfig("out", progress_funcs="rewards", **tiny.SETTINGS | VALUE).progress_funcs == ["rewards"]


def test_functions_get_what_reward_functions_get(train_with):
    """Prompts, columns, ids of the text so far; what they do to it is not seen by rewards, nor by other functions."""
    calls = []

    def reward(prompts, completions, answer, completion_ids, trainer_state, **kwargs):
        calls.append((list(prompts), list(answer), trainer_state.global_step))
        return tiny.even_bytes(completion_ids)

    def greedy(prompts, completions, answer, completion_ids, trainer_state, log_extra, log_metric, **kwargs):
        assert len(prompts) == len(completions) == len(answer) == len(completion_ids)
        asked, answers, _ = calls[-1]
        known = [*zip(asked, answers, strict=True)]
        assert all(of in known for of in zip(prompts, answer, strict=True))
        log_metric("greedy", 1.0)
        log_extra("greedy", completions)
        result = [float(len(ids)) for ids in completion_ids]
        for lists in (prompts, completions, completion_ids, answer):
            for of in lists:
                if isinstance(of, list):
                    of.clear()
        trainer_state.global_step = 100
        return result

    # Both sample from the same policy in every step
    options = {"reward_funcs": reward, "train_dataset": CHAT_WITH_ANSWERS, "learning_rate": 0.0}
    trainer, plain = train_with(greedy, tiny_length, **options), train_with(**options)
    assert logged(trainer, "reward") == logged(plain, "reward") and trainer.state.global_step == 3
    assert not any("greedy" in key for entry in trainer.state.log_history for key in entry)
    # At each token as many ids as there are before it
    places = torch.arange(8).expand(8, 8)
    for seen in trainer.seen:
        assert torch.equal(seen.progress[..., 0], places[:, : seen.mask.size(1)] * seen.mask)
        assert torch.equal(seen.progress[..., 0], seen.progress[..., 1])


def tiny_length(completion_ids, **kwargs):
    return [len(ids) for ids in completion_ids]


CHAT_WITH_ANSWERS = CHAT.map(lambda row, i: {"answer": ["a", str(i)]}, with_indices=True)


def test_failures_on_unfinished_text_keep_the_number_before(train_with, caplog):
    def picky(completion_ids, **kwargs):
        if any(len(ids) in (0, 3) for ids in completion_ids):
            raise KeyError("boxed")
        return [None if len(ids) == 5 else math.nan if len(ids) == 6 else len(ids) for ids in completion_ids]

    trainer = train_with(picky)
    expected = torch.tensor([0.0, 1, 2, 2, 4, 4, 4, 7])
    for seen in trainer.seen:
        assert torch.equal(seen.progress[..., 0], expected[: seen.mask.size(1)] * seen.mask)
    (failed,) = [m for m in caplog.messages if "failed on" in m]
    assert "picky' failed on" in failed and "KeyError: 'boxed'" in failed and "return None" in failed
    (nan,) = [m for m in caplog.messages if "NaN or infinity" in m]
    assert "picky" in nan


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (lambda **kwargs: 1 / 0, "failed on all .* unfinished texts .*ZeroDivisionError.*like a reward function"),
        (lambda environments, **kwargs: [], "reads `environments`"),
        (lambda completions, **kwargs: [1.0], "returned 1 numbers for .* completions"),
        (lambda completions, **kwargs: 1.0, "returned 1.0: it must return a list"),
        (lambda completions, **kwargs: ["a" for _ in completions], "returned 'a': it must return a number or None"),
        (torch.nn.Linear(1, 1), "a reward model: called on the text so far it would run"),
        ("no_such_module:f", "cannot be imported: ModuleNotFoundError"),
        ("rewads", "holds 'rewads': a config holds text"),
    ],
)
def test_what_is_wrong_with_a_function_is_named(train_with, function, message):
    with pytest.raises(ValueError, match=message):
        train_with(function)


def test_conflicts_are_named(tmp_path):
    args = OTBGRPOConfig(str(tmp_path), **tiny.SETTINGS | VALUE, progress_funcs=["rewards"])
    with pytest.raises(ValueError, match="set in OTBGRPOConfig .*and given to the trainer"):
        OTBGRPOTrainer("not loaded", even, args, progress_funcs=[even])
    with pytest.raises(ValueError, match="`progress_places` is 0"):
        OTBGRPOConfig(str(tmp_path), **tiny.SETTINGS | VALUE, progress_places=0)
    with pytest.raises(ValueError, match="`progress_funcs` holds <function even"):
        OTBGRPOConfig(str(tmp_path), **tiny.SETTINGS | VALUE, progress_funcs=[even])


def test_only_baselines_that_read_progress_get_it(train, caplog):
    trainer = train(cls=Keeping, baseline="rloo", progress_funcs=[even])
    assert "has no effect: `baseline='rloo'`" in caplog.text and trainer.seen[-1].progress is None


@pytest.mark.parametrize("kind", ["random", "counting", "comparing"])
def test_functions_that_are_not_of_the_text_are_left_out(train_with, kind, caplog):
    """And the run samples and is rewarded as without them."""
    count = []

    def odd(completion_ids, **kwargs):
        count.append(None)
        longest = max(map(len, completion_ids))
        return {
            "random": lambda: [random.random() + torch.rand(()).item() for _ in completion_ids],
            "counting": lambda: [len(count) for _ in completion_ids],
            "comparing": lambda: [len(ids) / max(longest, 1) for ids in completion_ids],
        }[kind]()

    trainer, plain = train_with(odd, even), train_with(even)
    told = [m for m in caplog.messages if "for the same text" in m]
    assert len(told) == 1 and "is left out from now on: it is random, has a state, or compares" in told[0]
    for seen, other in zip(trainer.seen, plain.seen, strict=True):
        assert torch.equal(seen.progress[..., 1], other.progress[..., 0])
        assert torch.equal(seen.mask, other.mask) and torch.equal(seen.returns, other.returns)
    assert (trainer.seen[-1].progress[..., 0] == 0).all()


class Counts:
    """A reward with a state, which its own calls change."""

    def __init__(self):
        self.__name__, self.calls = "counts", 0

    def __call__(self, completion_ids, **kwargs):
        self.calls += 1
        return [float(len(ids)) for ids in completion_ids]


def test_objects_are_called_as_copies(train_with):
    reward = Counts()
    train_with(reward_funcs=reward, progress_funcs="rewards")
    assert reward.calls == 3


def test_asynchronous_functions_are_awaited_together(train_with):
    waiting = []

    async def one(completion_ids, **kwargs):
        waiting.append(None)
        for _ in range(1000):
            if len(waiting) > 1:
                return [len(ids) for ids in completion_ids]
            await asyncio.sleep(0.001)
        raise TimeoutError

    async def other(completion_ids, **kwargs):
        return await one(completion_ids)

    trainer = train_with(one, other, even)
    seen = trainer.seen[-1]
    assert torch.equal(seen.progress[..., 0], torch.arange(seen.mask.size(1)) * seen.mask)
    assert torch.equal(seen.progress[..., 0], seen.progress[..., 1])


def test_asynchronous_rewards_by_one_switch(train_with):
    """In the event loop in which TRL calls them."""
    loops = set()

    async def reward(completion_ids, **kwargs):
        loops.add(asyncio.get_running_loop())
        return [float(len(ids)) for ids in completion_ids]

    trainer = train_with(reward_funcs=reward, progress_funcs="rewards")
    assert len(loops) == 1 and trainer.seen[-1].progress[:, 1].any()


def test_a_slow_function_is_named(train_with, caplog):
    def slow(completion_ids, **kwargs):
        time.sleep(1.0)
        return tiny_length(completion_ids)

    trainer = train_with(slow, even, max_steps=5)
    (told,) = [m for m in caplog.messages if "of a step's time" in m]
    assert "slow" in told and "`progress_places` (64" in told
    assert 0.05 < logged(trainer, "otb/progress/time_share")[-1] < 1


def test_agents_have_whole_turns_and_an_unfinished_one(train, monkeypatch):
    """Tools' output and earlier turns are there as rewards get them, and the turn at hand as the text so far."""
    script_turns(monkeypatch)
    rewarded, seen = {}, []

    def reward(completions, completion_ids, **kwargs):
        rewarded.update({tuple(ids): of for ids, of in zip(completion_ids, completions, strict=True)})
        return by_length(completion_ids)

    def progress(prompts, completions, completion_ids, **kwargs):
        assert len(prompts) == len(completions)
        seen.extend(zip(completion_ids, completions, strict=True))
        return [float(sum(m["role"] == "tool" for m in of)) for of in completions]

    options = AGENT | {"progress_places": 400}
    trainer = train(cls=Keeping, reward_funcs=reward, tools=TOOLS, baseline="value", progress_funcs=progress, **options)
    tokenizer, turns = trainer.processing_class, 0
    for ids, completion in seen:
        (whole,) = [of for known, of in rewarded.items() if list(known[: len(ids)]) == ids][:1]
        *before, unfinished = completion
        assert before == whole[: len(before)] and unfinished["role"] == "assistant"
        assert tokenizer.decode(ids, skip_special_tokens=True).endswith(unfinished["content"])
        if len(before) > 0:
            assert before[-1]["role"] == "tool" and "@" not in unfinished["content"]
            turns += 1
    assert turns > 100
    # As many results as stand before the token
    results = trainer.seen[-1].progress[..., 0] * trainer.seen[-1].mask
    assert results.amax(1).tolist() == [2.0, 0.0, 0.0, 4.0, 0.0, 1.0, 1.0, 4.0]


@pytest.mark.parametrize("n", [1, 4])
def test_any_number_of_completions(train_with, n):
    trainer = train_with(even, num_generations=n, max_steps=4, learning_rate=0.0)
    assert trainer.baseline.entry.estimator.eta[-1] != 0
    assert all(of.progress.size(2) == 1 for of in trainer.seen)


def test_it_changes_what_value_subtracts_and_nothing_else(train_with):
    options = {"reward_funcs": tiny.even_bytes, "learning_rate": 0.0, "max_steps": 6, "per_device_train_batch_size": 32}
    options["train_dataset"] = tiny.prompts(32)
    told, silent = train_with("rewards", **options), train_with(**options)
    for a, b in zip(told.seen, silent.seen, strict=True):
        assert torch.equal(a.states, b.states) and torch.equal(a.returns, b.returns)
    powers = [logged(trainer, "otb/grad_power_ratio")[-3:] for trainer in (told, silent)]
    assert sum(powers[0]) < 0.9 * sum(powers[1])
    ends = [logged(trainer, "otb/value/r2_at_end")[-3:] for trainer in (told, silent)]
    assert min(ends[0]) > max(ends[1])


def test_a_comparison_reads_progress(train_with, monkeypatch):
    """In what it learns before it measures, for which one split into groups is enough."""
    monkeypatch.setattr(moments_module, "BATCH_PARTITIONS", 1)
    options = {"reward_funcs": tiny.even_bytes, "per_device_train_batch_size": 16}
    trainers = [train_with(*functions, train=False, **options) for functions in (["rewards"], [])]
    told, silent = (
        compare_baselines(trainer, ["value"], 4, 16, prompts_per_batch=4, group_sizes=4) for trainer in trainers
    )
    assert told.learned["value/r2_at_end"] > silent.learned["value/r2_at_end"] + 0.1


@pytest.mark.parametrize("same", [True, False])
def test_checkpoints_name_the_functions(train_with, tmp_path, caplog, same):
    options = {"max_steps": 4, "save_strategy": "steps", "save_steps": 2, "output_dir": str(tmp_path)}
    whole = train_with(even, tiny_length, **options)
    state = torch.load(tmp_path / "checkpoint-2" / "baseline.pt", weights_only=True)
    names = ["tests.trainer.test_progress:even", "tests.trainer.test_progress:tiny_length"]
    assert state["progress"] == names
    resumed = train_with(*((even, tiny_length) if same else (tiny_length, by_length)), train=False, **options)
    resumed.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    told = [m for m in caplog.messages if "fitted with the progress functions" in m]
    if same:
        assert_same_weights(whole, resumed)
        assert told == []
    else:
        assert len(told) == 1 and f"{names[0]!r}, {names[1]!r}, and the run has the progress" in told[0]
        assert resumed.baseline.entry.estimator.eta.numel() == whole.baseline.entry.estimator.eta.numel()


def test_a_checkpoint_without_functions_is_read(train_with, tmp_path, caplog):
    options = {"max_steps": 3, "save_strategy": "steps", "save_steps": 1, "output_dir": str(tmp_path)}
    train_with(**options, progress_funcs=None)
    resumed = train_with(even, train=False, **options)
    resumed.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    assert "was fitted with no progress functions, and the run has the progress functions" in caplog.text
    assert resumed.baseline.entry.estimator.eta[-1] != 0


# Where functions are called


@pytest.mark.parametrize("places", [1, 5, 16, 64])
@pytest.mark.parametrize(("usual", "longest"), [(1, 1), (8, 8), (64, 64), (100, 300), (300, 8192), (8192, 8192)])
def test_places_are_few_and_reach_the_end(places, usual, longest):
    starts = schedule(places, usual, longest)
    assert len(starts) <= places and starts[0] == 0 and starts == sorted({*starts}) and starts[-1] < longest
    if usual <= places - 8:
        assert starts[:usual] == [*range(usual)]  # every token of a usual completion
    steps = [b - a for a, b in pairwise([*(start for start in starts if start < usual), usual])]
    if places > 8:
        assert max(steps) <= math.ceil(usual / (places - 8))


def test_whether_it_is_a_place_depends_on_the_tokens_before():
    """Of texts that begin alike, the places up to where they part, and the next one at most, are the same."""
    g = random.Random(0)
    for _ in range(300):
        starts = schedule(g.choice([3, 8, 20]), g.choice([10, 40]), 60)
        one = [g.choice([0, 0, 0, 1]) for _ in range(g.randint(1, 60))]
        t = g.randint(0, len(one))
        other = one[:t] + [g.choice([0, 0, 0, 1]) for _ in range(g.randint(0, 60 - t))]
        places = [{p for p in places_of(starts, 60, of, bool) if p <= t} for of in (one, other)]
        shorter = min(len(one), len(other))
        assert {p for p in places[0] if p < shorter} == {p for p in places[1] if p < shorter}


def test_a_place_is_after_the_end_of_a_line():
    tokens = [0, 0, 1, 0, 0, 0, 0, 0, 0, 1, 0]
    assert places_of([0, 5], 11, tokens, bool) == [3, 10]
    assert places_of([0, 5], 11, [0] * 11, bool) == [4, 10]
    assert places_of([0, 5], 60, [0] * 11, bool) == [4]


# What the likeliest tokens would have brought


def vowels(completions, **kwargs):
    """Which some tokens change, and others do not."""
    return [sum(1.0 + (letter in "aeiouAEIOU") for letter in of) for of in texts_of(completions)]


@pytest.mark.parametrize("data", ["text", "conversation"])
def test_draws_compare_the_token_with_the_likeliest_ones(train_with, data, model_path):
    """D = f(y) − Σ π(v) f(v) over the three likeliest tokens, by the model's own softmax and the function's values."""
    chat = {"train_dataset": CHAT} if data == "conversation" else {}
    trainer = train_with(vowels, progress_draws=3, max_steps=1, learning_rate=0.0, **chat)
    seen, rollout, decode = trainer.seen[-1], trainer.rollouts["train"], trainer.processing_class.decode
    model = AutoModelForCausalLM.from_pretrained(model_path, dtype=torch.float32)
    ids = torch.cat([rollout.prompt_ids, rollout.completion_ids], dim=1)
    mask = torch.cat([rollout.prompt_mask, rollout.completion_mask], dim=1)
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    start = rollout.prompt_ids.size(1)
    with torch.no_grad():
        probs = model(ids, attention_mask=mask, position_ids=positions).logits[:, start - 1 : -1].softmax(-1)
    checked = 0
    for row, written in enumerate(rollout.completion_ids.tolist()):
        for t in range(int(rollout.mask[row].sum())):
            p, likely = probs[row, t].topk(3)
            found = seen.progress_draws[row, t, 0].item()
            if p[0] > SURE:
                assert found == 0
                continue
            texts = [decode([*written[:t], *more], skip_special_tokens=True) for more in ([], *likely.unsqueeze(1))]
            before, *after = vowels(texts)
            gains = [of - before for of in after]
            own = sum(gain for gain, v in zip(gains, likely.tolist(), strict=True) if v == written[t])
            expected = own - sum(q * gain for q, gain in zip(p.tolist(), gains, strict=True))
            assert found == pytest.approx(expected, abs=1e-4)
            checked += found != 0
    assert checked > 20


def test_draws_have_mean_zero(train_with):
    """Over many tokens that were sampled: within four standard errors."""
    options = {"per_device_train_batch_size": 64, "train_dataset": tiny.prompts(64), "learning_rate": 0.0}
    trainer = train_with(vowels, progress_draws=4, max_steps=6, **options)
    draws = torch.cat([of.progress_draws[of.mask > 0] for of in trainer.seen]).double()
    tried = draws[draws != 0]
    assert len(tried) > 1000 and abs(tried.sum()) < 4 * tried.square().sum().sqrt()
    assert tried.square().mean() > 0.01
    assert "draw_weight" in "".join(trainer.state.log_history[0])


def test_draws_need_forwards_that_sample(train_with, caplog):
    trainer = train_with(vowels, progress_draws=2, num_iterations=2)
    (told,) = [m for m in caplog.messages if "`progress_draws` has no effect: energies come from" in m]
    assert "the no-gradient forward that GRPOTrainer runs anyway" in told
    assert all((of.progress_draws == 0).all() for of in trainer.seen) and trainer.seen[-1].progress[:, 1].any()


def test_runs_with_draws_resume_exactly(train_with, tmp_path):
    options = {"max_steps": 4, "save_strategy": "steps", "save_steps": 2, "output_dir": str(tmp_path)}
    whole = train_with(vowels, progress_draws=3, **options)
    resumed = train_with(vowels, train=False, progress_draws=3, **options)
    resumed.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    assert_same_weights(whole, resumed)
    assert whole.baseline.entry.estimator.delta.numel() == 2
    with pytest.raises(ValueError, match="`progress_draws` is 65: give 0 to 64"):
        train_with(vowels, progress_draws=65)
