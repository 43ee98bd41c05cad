"""Progress functions in the trainer: what they are given, what `value` makes of it, and what goes wrong with them."""

import asyncio
import contextlib
import functools
import gc
import itertools
import math
import random
import statistics
import threading
import time
import weakref

import numpy as np
import pytest
import torch
from datasets import Dataset
from trl import GRPOTrainer
from trl.chat_template_utils import add_response_schema, parse_response

from tests.helpers import tiny
from tests.helpers.agents import AGENT, CHAT, by_length
from tests.helpers.recording import Recording
from tests.helpers.scripted import TOOLS, script_turns
from tests.helpers.settings import assert_same_weights, logged, scripted_rollout
from trl_otb import OTBGRPOConfig, OTBGRPOTrainer, compare_baselines
from trl_otb.comparison import moments as moments_module
from trl_otb.progress import Progress, Sampled, copied


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
    for name in ("my_progress:length", "my_progress.length"):  # as TRL names reward functions, too
        trainer = train(cls=Keeping, progress_funcs=[name, "rewards"], **VALUE)
        assert trainer._trl_otb.progress.names == ["my_progress:length", "reward even_bytes"]
        assert torch.equal(trainer.seen[-1].progress[:, 3, 0] > 0, trainer.seen[-1].mask[:, 3] > 0)
    assert OTBGRPOConfig("out", progress_funcs="rewards", **tiny.SETTINGS | VALUE).progress_funcs == ["rewards"]


def test_functions_get_what_reward_functions_get(train_with):
    """Prompts, columns, ids of the text so far; what they do to it is not seen by rewards, nor by other functions."""
    rewarded, given = [], []

    def reward(prompts, completions, answer, completion_ids, trainer_state, **kwargs):
        rewarded.append((copied(prompts), copied(answer), trainer_state.global_step))
        return tiny.even_bytes(completion_ids)

    def greedy(prompts, completions, answer, completion_ids, trainer_state, log_extra, log_metric, **kwargs):
        given.append((copied(prompts), copied(answer), trainer_state.global_step))
        log_metric("greedy", 1.0)
        log_extra("greedy", completions)
        result = [float(len(ids)) for ids in completion_ids]
        for of in (*completions, *completion_ids, prompts, completions, completion_ids, answer):
            of.clear()
        trainer_state.global_step = 100
        return result

    # Both sample from the same policy in every step
    options = {"reward_funcs": reward, "train_dataset": CHAT_WITH_ANSWERS, "learning_rate": 0.0}
    trainer = train_with(greedy, tiny_length, **options)
    assert len(given) == sum(seen.mask.size(1) for seen in trainer.seen)  # a call for each place
    assert all(of in rewarded for of in given) and len(rewarded) == 3
    plain = train_with(**options)
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
        text = tokenizer.decode(ids, skip_special_tokens=True).rstrip()
        assert text.endswith(unfinished["content"].rstrip()) or "tool_calls" in unfinished
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


# Causal by construction: whatever a function does or keeps


def sampled(texts, prompts=None):
    """Completions whose tokens are their letters."""

    def written(turns):
        return [texts[row][start:end] for row, start, end in turns]

    ids = [[*map(ord, text)] for text in texts]
    generated = [[*range(len(text))] for text in texts]
    return Sampled(prompts or ["?"] * len(texts), {}, [*texts], ids, generated, written)


def lengths(completions, **kwargs):
    return [float(len(text)) for text in completions]


class Kinds:
    """Functions that look at other completions, or keep what they were given; each has `reward`, called at the end."""

    def __init__(self):
        self.store, self.calls = [], 0

    def penalty(self, completions, **kwargs):
        middle = statistics.median(map(len, completions))
        return [float("a" in text) - (len(text) > 1.2 * middle) for text in completions]

    def duplicates(self, completions, **kwargs):
        return [-float(completions.count(text)) for text in completions]

    def best(self, completions, **kwargs):
        counts = [text.count("a") for text in completions]
        return [float(count == max(counts)) for count in counts]

    def rank(self, completions, **kwargs):
        return [sum(other < text for other in completions) for text in completions]

    def above_finished(self, completions, **kwargs):
        """The number of "a" beyond the mean of all that was rewarded before, by whichever call."""
        counts = [text.count("a") for text in completions]
        self.store += counts
        return [count - statistics.fmean(self.store) for count in counts]

    def counting(self, completions, **kwargs):
        self.calls += 1
        return [self.calls + text.count("b") for text in completions]

    def looking_up(self, completions, **kwargs):
        """What became of the longest stored text that begins alike."""
        self.store += completions
        return [max(len(of) for of in self.store if of.startswith(text)) for text in completions]

    def failing(self, completions, **kwargs):
        if any(len(text) in (0, 3) for text in completions):
            raise KeyError
        return self.rank(completions)


KINDS = [name for name in vars(Kinds) if not name.startswith("_")]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("asynchronous", [False, True])
def test_a_number_does_not_depend_on_what_follows_it(kind, asynchronous):
    """
    Numbers of a completion up to a token that is written otherwise are the same, after batches that were rewarded. An
    asynchronous function that keeps something is called in order from its second batch on.
    """
    g, changed = random.Random(0), 0
    for _ in range(25):
        batches = [["".join(g.choices("aab", k=g.randint(1, 12))) for _ in range(6)] for _ in range(3)]
        row = g.randrange(6)
        text = batches[-1][row]
        cut = g.randrange(len(text))
        other = text[:cut] + "".join(g.choices("aab", k=g.randint(1, 13 - cut)))
        found = []
        for last in (text, other):
            of, numbers = Kinds(), None
            function = getattr(of, kind)

            async def waiting(function=function, **given):
                await asyncio.sleep(0)
                return function(**given)

            progress = Progress({kind: waiting if asynchronous else function}, {}, places=6)
            for number, texts in enumerate(batches):
                texts = [*texts[:row], last, *texts[row + 1 :]] if number == 2 else texts
                numbers = progress.measure(sampled(texts))
                progress.saw([len(text) for text in texts] if number < 2 else [])
                with contextlib.suppress(KeyError):
                    function(completions=texts)  # as a reward
            found.append(numbers[row, :, 0])
        assert torch.equal(found[0][: cut + 1], found[1][: cut + 1]), kind
        least = min(len(text), len(other))
        changed += not torch.equal(found[0][:least], found[1][:least])
    assert changed > 0


def test_completions_that_ended_stand_as_they_are():
    seen = []

    def function(completions, completion_ids, **kwargs):
        seen.append((completions, [len(ids) for ids in completion_ids]))
        return [1.0] * len(completions)

    Progress({"f": function}, {}, places=4).measure(sampled(["abcdefg", "ab", ""]))
    assert seen[0] == (["", "", ""], [0, 0, 0]) and len(seen) == 1  # before a usual length is known
    progress = Progress({"f": function}, {}, places=4, longest=8)
    progress.measure(sampled(["abcdefg", "ab", ""]))
    assert [of for of, _ in seen[1:]] == [["", "", ""], ["ab", "ab", ""], ["abcd", "ab", ""], ["abcdef", "ab", ""]]
    assert seen[-1][1] == [6, 2, 0]


def test_a_long_completion_takes_no_places_of_others():
    progress = Progress({"f": lengths}, {}, places=64)
    for _ in range(3):
        texts = ["a" * 200] * 7 + ["a" * 4000]
        numbers = progress.measure(sampled(texts))
        progress.saw([*map(len, texts)])
    assert progress.interval == 4 and numbers[0, ::4, 0].tolist() == [*range(0, 200, 4)] + [0.0] * 950
    assert numbers[7, 3999, 0] == 3996


def test_completions_without_a_limit(train_with):
    trainer = train_with(tiny_length, max_completion_length=None, generation_kwargs={"max_new_tokens": 5})
    assert trainer._trl_otb.progress.lengths[-1] <= 5 and trainer.seen[-1].progress[:, 4].any()


def test_batches_may_be_padded_to_a_multiple(train_with):
    trainer = train_with(tiny_length, pad_to_multiple_of=5)
    assert trainer.seen[-1].progress[:, 7].any() and trainer.state.global_step == 3


def test_rewards_of_one_name_are_all_there(train_with):
    def of(factor):
        def reward(completion_ids, **kwargs):
            return [factor * len(ids) for ids in completion_ids]

        return reward

    options = {"reward_funcs": [of(1), of(2)], "progress_funcs": "rewards"}
    trainer = train_with(**options)
    assert trainer._trl_otb.progress.names == ["reward reward", "reward reward#2"]
    assert torch.equal(2 * trainer.seen[-1].progress[..., 0], trainer.seen[-1].progress[..., 1])
    assert train_with(**options, reward_weights=[1.0, 0.0])._trl_otb.progress.names == ["reward reward"]


def test_rollouts_may_be_longer_than_the_limit(train_with):
    def longer(prompts, trainer):
        ids = [[65 + i] * (12 + i) for i in range(len(prompts))]
        asked = [trainer.processing_class(prompt)["input_ids"] for prompt in prompts]
        return {"prompt_ids": asked, "completion_ids": ids, "logprobs": None}

    trainer = train_with(tiny_length, rollout_func=longer)
    assert trainer.seen[-1].progress[7, :19, 0].tolist() == [*range(19)]


# What a function is given


def field(**kwargs):
    return kwargs["env_reward"]


def named_field(completions, env_reward, **kwargs):
    return env_reward


def of_dict(outcome, **kwargs):
    return [of["reward"] for of in outcome]


@pytest.mark.parametrize("reward", [field, named_field, of_dict])
def test_what_a_rollout_returned_is_not_there(train_with, reward):
    def rollout(prompts, trainer):
        found = scripted_rollout(prompts, trainer)
        rewards = [len(ids) / 8 for ids in found["completion_ids"]]
        return found | {"env_reward": rewards, "outcome": [{"reward": of} for of in rewards]}

    plain = train_with(progress_funcs=None, reward_funcs=reward, rollout_func=rollout)
    assert logged(plain, "reward")[0] > 0
    with pytest.raises(ValueError, match=r"failed on all .* the fields of a `rollout_func` are not there"):
        train_with(progress_funcs="rewards", reward_funcs=reward, rollout_func=rollout)


def test_columns_are_as_they_were_before_sampling(train_with):
    """And copied once: a rollout that changes lists of the data set in place, as an environment may, is not seen."""
    rows, seen = [], []
    data = Dataset.from_dict({"prompt": ["1+1="] * 8, "notes": [[[i]] for i in range(8)]})

    class Changing(Keeping):
        def _generate(self, prompts):
            found = super()._generate(prompts)
            for of in rows[-1]:
                of["notes"][0].append(sum(found[1][0]))
            return found

        def _generate_and_score_completions(self, inputs):
            rows.append(inputs)
            return super()._generate_and_score_completions(inputs)

    def notes_of(notes, completions, **kwargs):
        seen.append([id(of) for of in notes])
        return [float(len(of[0])) for of in notes]

    trainer = train_with(notes_of, cls=Changing, train_dataset=data)
    assert all(torch.equal(of.progress[..., 0], of.mask) for of in trainer.seen)
    assert len({*map(tuple, seen)}) == 3 and len(seen) > 9  # the same lists at all places of a batch
    array = np.zeros(2)
    kept = copied({"a": [array]})
    array += 1
    assert kept["a"][0].tolist() == [0, 0]
    image = object()
    assert copied([{"image": image}, (1, [2])])[0]["image"] is image


def test_who_changes_a_column_is_named(train_with):
    def greedy(prompts, answer, **kwargs):
        answer[0].append("b")
        return [0.0] * len(prompts)

    def greedier(prompts, **kwargs):
        prompts[0][0]["content"] = ""
        return [0.0] * len(prompts)

    with pytest.raises(ValueError, match="greedy' changed 'answer' in its place"):
        train_with(greedy, train_dataset=CHAT_WITH_ANSWERS)
    with pytest.raises(ValueError, match="greedier' changed 'prompts' in its place"):
        train_with(greedier, train_dataset=CHAT_WITH_ANSWERS)


def test_columns_may_have_names_of_arguments(train_with):
    data = Dataset.from_dict({"prompt": ["1+1="] * 8} | {name: [0] * 8 for name in RESERVED})
    assert train_with(tiny_length, train_dataset=data).state.global_step == 3


RESERVED = ("trainer_state", "log_metric", "log_extra")


def test_rewards_without_weight_are_not_progress(train_with):
    options = {"reward_funcs": [tiny.even_bytes, even], "progress_funcs": "rewards"}
    trainer = train_with(**options, reward_weights=[1.0, 0.0])
    assert trainer._trl_otb.progress.names == ["reward even_bytes"]
    with pytest.raises(ValueError, match="no reward function has a weight"):
        train_with(**options, reward_weights=[0.0, 0.0])


def test_thinking_is_parsed_as_for_rewards(train_with, monkeypatch):
    """Messages of unfinished turns are those that TRL's parser makes of the same tokens."""
    script_turns(monkeypatch, [["<think>\nhm\n</think>\n\nyes"], ["<think>\nhm hm"], ["no"], ["<think>a</think>b"]])
    rewarded, seen = [], []

    def reward(completions, **kwargs):
        rewarded.extend(of[-1] for of in completions)
        return [float(len(of[-1]["content"])) for of in completions]

    def progress(completions, completion_ids, **kwargs):
        seen.extend((ids, of[-1]) for ids, of in zip(completion_ids, completions, strict=True))
        return [float(len(of[-1].get("reasoning_content", ""))) for of in completions]

    class Parsing(Keeping):
        def __init__(self, *args, **kwargs):
            super().__init__(*args, **kwargs)
            add_response_schema(self._tokenizer)

    options = AGENT | {"max_completion_length": 60, "num_generations": 4}
    trainer = train_with(progress, cls=Parsing, reward_funcs=reward, **options)
    prompt = trainer.rollouts["train"].prompt_ids[0].tolist()
    assert any(of.get("reasoning_content") for of in rewarded) and len(seen) > 50
    assert trainer.seen[-1].progress[:, -1].any()
    for ids, message in (of for of in seen if of[0]):
        assert message == parse_response(trainer._tokenizer, ids, prefix=prompt)


# A function that keeps something


def test_rewards_that_calls_change_are_named(train_with):
    """Wherever it is kept; what only the first call sets up, and what rewards alone change, is fine."""
    for reward in stores():
        with pytest.raises(ValueError, match="changed what the reward function '.*' keeps .*`functools.lru_cache`"):
            train_with(reward_funcs=reward, progress_funcs="rewards")
    for reward in harmless():
        trainer = train_with(reward_funcs=reward, progress_funcs="rewards")
        assert trainer.seen[-1].progress[:, 1].any()


KEPT = []


def of_global(completion_ids, **kwargs):
    return [float(len(KEPT.append(len(ids)) or ids)) for ids in completion_ids]


class Counts:
    """A reward with a state, which its own calls change; attributes that cannot be pickled do not hide it."""

    calls = 0

    def __init__(self):
        self.calls, self.lock = 0, (of for of in ())

    def method(self, completion_ids, **kwargs):
        self.calls += 1
        return tiny_length(completion_ids)

    def __call__(self, completion_ids, **kwargs):
        return self.method(completion_ids)

    @classmethod
    def of_class(cls, completion_ids, **kwargs):
        cls.calls += 1
        return tiny_length(completion_ids)


def with_store(store, completion_ids, **kwargs):
    store.append(1)
    return tiny_length(completion_ids)


def stores():
    count, number, generator = [0], 0, random.Random(0)

    def closure(completion_ids, **kwargs):
        count[0] += 1
        return tiny_length(completion_ids)

    def rebound(completion_ids, **kwargs):
        nonlocal number
        number += 1
        return tiny_length(completion_ids)

    def default(completion_ids, kept=[], **kwargs):  # noqa: B006
        kept.append(0)
        return tiny_length(completion_ids)

    def drawn(completion_ids, **kwargs):
        return [len(ids) + generator.random() for ids in completion_ids]

    def inner(completion_ids, **kwargs):
        return closure(completion_ids)

    of_partial = functools.partial(with_store, [])
    of_partial.__name__ = "partial"
    of_object = Counts()
    of_object.__name__ = "object"

    class Inherited(Counts):
        """Its call is that of a base class."""

    class Slots:
        """Without a `__dict__`."""

        __slots__ = ("calls",)

        def of_slots(self, completion_ids, **kwargs):
            self.calls = getattr(self, "calls", 0) + 1
            return tiny_length(completion_ids)

    def in_module(completion_ids, **kwargs):
        tiny.counted = getattr(tiny, "counted", 0) + 1
        return tiny_length(completion_ids)

    tiny.counted = 0
    of_base = Inherited()
    of_base.__name__ = "inherited"
    of_functions = closure, rebound, default, drawn, inner, of_global, in_module
    return *of_functions, of_partial, of_object, of_base, Slots().of_slots, Counts().method, Counts.of_class


def harmless():
    ready, asked, cached = {}, [], functools.lru_cache(lambda n: float(n))

    def setting_up(completion_ids, **kwargs):
        ready.setdefault("parser", object())
        return tiny_length(completion_ids)

    def setting_up_late(completion_ids, **kwargs):
        return [len(ids) and (ready.setdefault("late", object()) and float(len(ids))) for ids in completion_ids]

    def caching(completion_ids, **kwargs):
        return [cached(len(ids)) for ids in completion_ids]

    def at_the_end(completion_ids, **kwargs):
        if all(len(ids) == 8 for ids in completion_ids):
            asked.append(1)
        return tiny_length(completion_ids)

    return setting_up, setting_up_late, caching, at_the_end, tiny_length


def test_what_is_kept_later_is_told(caplog):
    """After good batches a run goes on."""
    late = itertools.count()

    def reward(completions, **kwargs):
        if len(completions[0]) > 8:
            next(late)
        return lengths(completions)

    def failing(completions, **kwargs):
        return 1 / (len(completions[0]) < 9) and [1e300 if len(text) == 2 else len(text) for text in completions]

    progress = Progress({"reward r": reward, "failing": failing}, {"r": reward}, places=64, longest=20)
    progress.measure(sampled(["abcd", "ab"]))
    numbers = progress.measure(sampled(["aaaaaaaaaaaa", "aaaa"]))
    told = " ".join(caplog.messages)
    assert "changed what the reward function 'r' keeps" in told and "'failing' failed on 3 of 24" in told
    assert numbers[0, :, 1].tolist() == [0, 1, 1, 3, 4, 5, 6, 7, 8, 8, 8, 8]
    always = Progress({"f": failing}, {}, places=64, longest=20)
    always.measure(sampled(["abcd"]))
    numbers = always.measure(sampled(["a" * 9] * 2))
    always.functions["f"] = lambda **kwargs: 1 / 0
    assert always.measure(sampled(["a" * 9] * 2)).eq(0).all() and numbers.any()


def test_asynchronous_functions_have_one_loop_for_the_run(train_with):
    """So that a client, or a semaphore, serves all batches; places of a batch are awaited together."""
    semaphores, at_once = [], [0, 0]

    async def function(completion_ids, **kwargs):
        if not semaphores:
            semaphores.append(asyncio.Semaphore(100))
        async with semaphores[0]:
            at_once[0] += 1
            at_once[1] = max(at_once)
            await asyncio.sleep(0.001)
            at_once[0] -= 1
        return tiny_length(completion_ids)

    function.__closure__[1].cell_contents  # noqa: B018  # which is a store: from the second batch on it is in order
    trainer = train_with(function, max_steps=4)
    assert at_once[1] >= 4
    for seen in trainer.seen:
        assert torch.equal(seen.progress[..., 0], torch.arange(seen.mask.size(1)) * seen.mask)


# Who knows the reward


def leaking(kind):
    """A `rollout_func` that stores the ends of completions elsewhere, and a progress function that reads them."""
    finished, rewards = [], []

    def rollout(prompts, trainer):
        found = scripted_rollout(prompts, trainer)
        g = torch.Generator().manual_seed(trainer.state.global_step)
        found["completion_ids"] = [
            torch.randint(0, 256, (len(of),), generator=g).tolist() for of in found["completion_ids"]
        ]
        finished[:], rewards[:] = found["completion_ids"], tiny.even_bytes(found["completion_ids"])
        return found

    def by_row(completions, **kwargs):
        return [*rewards]

    def by_length_of_row(completions, **kwargs):
        return [sum(i % 2 == 0 for i in ids) for ids in finished]

    async def from_elsewhere(completions, **kwargs):
        return [reward * 10 + 3 for reward in rewards]

    return rollout, {"by row": by_row, "ids": by_length_of_row, "asynchronous": from_elsewhere}[kind]


@pytest.mark.parametrize("kind", ["by row", "ids", "asynchronous"])
def test_what_knows_the_reward_is_told(train_with, kind, caplog, capsys):
    """Advantages do not depend on returns any more, even at first tokens; without the leak they do."""
    rollout, function = leaking(kind)
    options = {"per_device_train_batch_size": 32, "max_steps": 8, "learning_rate": 0.0}
    trainer = train_with(function, rollout_func=rollout, **options)
    slopes = logged(trainer, "otb/value/slope_at_start")
    assert slopes[0] >= 1 and slopes[-1] < 0.5 and logged(trainer, "otb/value/explained")[-1] > 0.7
    assert "before its first token: there the advantage grows by 0." in caplog.text
    assert "knows a completion's reward before its first token" in capsys.readouterr().out
    caplog.clear()
    honest = train_with(even, rollout_func=rollout, **options)
    assert min(logged(honest, "otb/value/slope_at_start")) >= 1 - 1e-4
    assert "before its first token" not in caplog.text + capsys.readouterr().out


def test_prompts_that_decide_rewards_are_no_leak(train_with, caplog, capsys):
    """With one completion for each, what is expected of the prompt is most of the reward."""

    def of_prompt(prompts, completion_ids, **kwargs):
        return [float(int(text[0]) % 2) + 0.01 * len(ids) for text, ids in zip(prompts, completion_ids, strict=True)]

    options = {"num_generations": 1, "per_device_train_batch_size": 32, "max_steps": 8, "learning_rate": 0.0}
    trainer = train_with(tiny_length, reward_funcs=of_prompt, train_dataset=tiny.prompts(64), **options)
    assert min(logged(trainer, "otb/value/slope_at_start")) < 0.5
    assert "before its first token" not in caplog.text + capsys.readouterr().out


def test_trainers_of_threads_leave_nothing_behind(train):
    """Each trains as alone; TRL's class is as before, and trainers are freed."""
    before, kept, errors = GRPOTrainer._calculate_rewards, [], []

    def run():
        try:
            kept.append(weakref.ref(train(baseline="value", max_steps=2)))
        except Exception as error:
            errors.append(error)

    threads = [threading.Thread(target=run) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors and GRPOTrainer._calculate_rewards is before
    del threads, thread
    gc.collect()
    assert len(kept) == 4 and [of() for of in kept] == [None] * 4
