"""Baselines in TRL's AsyncGRPOTrainer, with samples from a loop of TRL's own that needs no server and no GPU."""

import asyncio
import copy
import functools
import math
import pickle
import subprocess
import sys
import threading
import time
from types import SimpleNamespace

import accelerate.logging
import pytest
import torch
from datasets import Dataset
from torch.nn.utils.rnn import pad_sequence
from trl.experimental.async_grpo import AsyncGRPOConfig, AsyncGRPOTrainer
from trl.experimental.async_grpo import async_rollout_worker as trl_worker

from recipes.toy.local_rollouts import LocalWorker, on_cpu
from tests.helpers import tiny
from tests.helpers.scripted import add
from tests.helpers.settings import LORA, assert_same_weights, logged
from trl_otb import AsyncOTBGRPOConfig, AsyncOTBGRPOTrainer, OTBGRPOConfig, OTBGRPOTrainer
from trl_otb.energy import token_energy
from trl_otb.experimental.async_grpo import trainer as async_trainer
from trl_otb.experimental.async_grpo.worker import carried_with, stamp_groups, stamped


SETTINGS = tiny.SETTINGS | {"token_budget": 0, "max_staleness": 0, "max_steps": 3}
SETTINGS |= {"per_device_train_batch_size": 16, "max_completion_length": 12}
PROMPTS = Dataset.from_list([{"prompt": [{"role": "user", "content": f"{i:02d}+{i:02d}="}]} for i in range(30)])


def even_or_none(completion_ids, **kwargs):
    return [None if len(ids) % 5 == 3 else r for ids, r in zip(completion_ids, even_bytes(completion_ids), strict=True)]


def even_bytes(completion_ids, **kwargs):
    """Of completions of unequal length, which even a random model has then."""
    return [r + 0.1 * (ids[-1] % 3) for ids, r in zip(completion_ids, tiny.even_bytes(completion_ids), strict=True)]


class Recorded(LocalWorker):
    """Keeps what the trainer took, which `change` has changed."""

    taken, change = (), staticmethod(lambda sample: None)

    def get(self, timeout=None):
        sample = super().get(timeout)
        self.change(sample)
        self.taken = [*self.taken, sample]
        return sample


def fork(loop):
    """Every third conversation calls `add` in words that TRL renders otherwise, and so becomes two rows."""
    call = '<tool_call>\n{"name":   "add", "arguments": {"a": 4, "b": 4}}\n</tool_call><|im_end|>'

    def sample():
        waiting, loop.waiting = loop.waiting, []
        for i, (ids, answer) in enumerate(waiting):
            calls = i % 3 == 0 and "<tool_response>" not in loop.tokenizer.decode(ids[-60:])
            said = loop.tokenizer(call if calls else f"{len(ids) * (i + 1)}<|im_end|>")["input_ids"]
            answer.set_result((said, [-5.0] * len(said)))

    loop.sample = sample


@pytest.fixture
def train_async(model_path, tmp_path):
    """Trains, and returns the trainer; `lag` is in steps."""

    def run(
        cls=AsyncOTBGRPOTrainer, config=AsyncOTBGRPOConfig, *, train=True, lag=0, reward=even_bytes, stamps=True,
        forks=False, peft_config=None, change=None, **options,
    ):  # fmt: skip
        args, tokenizer = config(**SETTINGS | {"output_dir": str(tmp_path / "run")} | options), tiny.tokenizer()
        tools = [add] if forks else None
        worker = Recorded(model_path, args, PROMPTS, [reward], tokenizer, tools=tools, steps_ahead=lag)
        worker.change = change or worker.change
        if forks:
            fork(worker.loop)
        if not stamps:
            worker.loop._score_group = functools.partial(trl_worker._AsyncRolloutLoop._score_group, worker.loop)
        trainer = cls(
            model_path, args=args, train_dataset=PROMPTS, processing_class=tokenizer,
            rollout_worker=worker, weight_transfer=worker, peft_config=peft_config,
        )  # fmt: skip
        if train:
            trainer.train()
        return trainer

    with on_cpu():
        yield run


OPTIONS = {
    "plain": {},
    "four steps old": {"lag": 4, "max_staleness": 4, "max_steps": 6},
    "cut groups": {"per_device_train_batch_size": 6, "gradient_accumulation_steps": 3},
    "token budget": {"token_budget": 120},
    "checkpointing": {"gradient_checkpointing": True},
    "no reward": {"reward": even_or_none},
    "lora": {"peft_config": LORA},
    "bf16": {"bf16": True},
    "tools": {"forks": True, "max_staleness": 4, "per_device_train_batch_size": 10},
    "forks": {"forks": True, "fork_threshold_tokens": 1, "max_staleness": 4, "per_device_train_batch_size": 10},
}


@pytest.mark.parametrize("name", OPTIONS)
def test_scaled_group_mean_equals_trls_trainer(train_async, name):
    trl = train_async(AsyncGRPOTrainer, AsyncGRPOConfig, stamps=False, **OPTIONS[name])
    ours = train_async(baseline="group_mean", scale_rewards="group", **OPTIONS[name])
    assert_same_weights(trl, ours)
    assert logged(trl, "loss") == logged(ours, "loss") and any(logged(ours, "loss"))


@pytest.mark.parametrize(
    ("name", "baseline"), [*((name, "value") for name in OPTIONS), ("plain", "rloo"), ("cut groups", "none")]
)
def test_every_baseline_trains(train_async, baseline, name):
    trainer = train_async(baseline=baseline, **OPTIONS[name])
    assert all(p.isfinite().all() for p in trainer.model.parameters())
    steps = trainer.state.global_step
    for name in ("effective_sample_share", "advantage/abs_mean"):
        assert len(logged(trainer, f"otb/{name}")) == steps
    assert baseline != "value" or (
        trainer.baseline.entry.estimator.state_dict()["_tokens"] > 0 and trainer.baseline.has_learned
    )


class Watched(AsyncOTBGRPOTrainer):
    """Keeps what its loss multiplies, and what it learns from, step by step."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.advantages, self.samples, self.learned = [], [], []


@pytest.fixture(autouse=True)
def watching(monkeypatch):
    advantages_of, learn = async_trainer.advantages_of, async_trainer.learn

    def keeps_advantages(trainer, *of_row):
        before = len(trainer._trl_otb.to_learn)
        result = advantages_of(trainer, *of_row)
        if isinstance(trainer, Watched):
            trainer.advantages.append(result)
            trainer.samples += trainer._trl_otb.to_learn[before:]
        return result

    def keeps_groups(trainer):
        before = [int(sample.group) for sample in trainer._trl_otb.to_learn]
        metrics = learn(trainer)
        waiting = {int(sample.group) for sample in trainer._trl_otb.to_learn}
        if isinstance(trainer, Watched):
            trainer.learned.append((len(trainer.samples), {*before} - waiting))
        return metrics

    monkeypatch.setattr(async_trainer, "advantages_of", keeps_advantages)
    monkeypatch.setattr(async_trainer, "learn", keeps_groups)


def test_read_values_match_plain_forwards(train_async, model_path):
    """Packed and with shared prefixes; log-probs, energies and the base of each sample."""
    trainer = train_async(Watched, learning_rate=0.0, max_steps=2)
    taken = trainer.rollout_worker.taken[: len(trainer.samples)]
    found = {(float(s.returns), len(s.logps), round(s.logps.sum().item(), 3)): s for s in trainer.samples}
    assert len(taken) == len(trainer.samples) == 32
    groups, numbers = {}, {}
    for sample in taken:
        groups.setdefault(sample.group_id, []).append(sample.metrics["reward"])
    for sample in taken:
        ids, mask = torch.tensor(sample.input_ids), torch.tensor(sample.completion_mask).bool()
        with torch.no_grad():
            logits = trainer.rollout_worker.loop.policy(ids.unsqueeze(0)).logits[0].double()
        logps = logits[:-1].log_softmax(-1)
        own = logps.gather(1, ids[1:, None]).squeeze(1)[mask[1:]]
        energy = token_energy(own, logps[mask[1:]].mul(2).logsumexp(-1))
        read = found[sample.metrics["reward"], int(mask.sum()), round(own.sum().item(), 3)]
        torch.testing.assert_close(read.logps, own.float(), atol=2e-5, rtol=0)
        torch.testing.assert_close(read.energy, energy, atol=2e-5, rtol=0)
        rewards = groups[sample.group_id]
        others = (sum(rewards) - sample.metrics["reward"]) / 3
        assert read.b0.item() == pytest.approx(others, abs=1e-6)
        assert numbers.setdefault(sample.group_id, read.group.item()) == read.group.item()
    assert len({*numbers.values()}) == len(numbers) == 8


def each_token(trainer):
    return [sample for sample in trainer.samples for _ in sample.logps]


def test_advantages_are_returns_minus_baseline(train_async):
    plain = train_async(Watched, baseline="rloo", learning_rate=0.0, max_steps=4)
    scaled = train_async(Watched, baseline="rloo", scale_rewards="group", learning_rate=0.0, max_steps=4)
    trls = train_async(Watched, baseline="group_mean", learning_rate=0.0, max_steps=4)
    value = train_async(Watched, learning_rate=0.0, max_steps=4)
    for one, two, three in zip(plain.advantages, scaled.advantages, trls.advantages, strict=True):
        torch.testing.assert_close(one, 4 / 3 * three, atol=1e-6, rtol=0)
        assert ((two / one)[one.abs() > 0.01] > 1).all()
    taken = {}  # by mean of the group's others and own reward
    for s in scaled.rollout_worker.taken:
        key = round(s.metrics["otb/others"], 5), round(s.metrics["reward"], 5)
        taken.setdefault(key, set()).add(s.metrics["reward_std"])
    for one, two, sample in zip(*(torch.cat(x.advantages) for x in (plain, scaled)), each_token(scaled), strict=True):
        stds = taken[round(float(sample.b0), 5), round(float(sample.returns), 5)]
        assert any(two.item() == pytest.approx(one.item() / (std + 1e-8), rel=1e-4, abs=1e-6) for std in stds)
    assert torch.equal(value.advantages[0], plain.advantages[0])  # nothing is predicted yet
    assert (value.advantages[-1] - plain.advantages[-1]).abs().max() > 0.01


@pytest.mark.parametrize("staleness", [0, 4])
def test_groups_teach_when_complete_or_dropped(train_async, staleness):
    """Steps of 18 samples cut groups of 4; without staleness, samples taken ahead of a step are dropped."""
    options = {"per_device_train_batch_size": 6, "gradient_accumulation_steps": 3, "max_steps": 5}
    trainer = train_async(Watched, max_staleness=staleness, **options)
    groups = [int(sample.group) for sample in trainer.samples]
    at_once = [set(groups[:n]) & set(groups[n:]) for n, _ in trainer.learned]  # cut by the end of a step
    assert sum(map(len, at_once)) >= 1
    for cut, (n, learned) in zip(at_once, trainer.learned, strict=True):
        assert learned and not learned & cut and not learned & set(groups[n:])
    assert len(trainer.learned) == 5 and len(groups) == 90


def test_ratios_weight_learning_and_luck_alone(train_async, monkeypatch):
    monkeypatch.setattr("trl_otb.baselines.luck.TOO_FAR", math.inf)  # a ratio with a mean of 2 would be noticed
    ratio = 2.0

    def change(sample):
        sample.old_log_probs -= math.log(ratio) * sample.completion_mask.astype("float32")

    options = {"learning_rate": 0.0, "max_steps": 3, "train": False, "epsilon": 100.0}
    one, two = train_async(Watched, **options), train_async(Watched, **options)
    two.rollout_worker.change = change
    one.train()
    two.train()
    # Where all weights are alike, the same is learned; the clamps of what was learned differ a little
    torch.testing.assert_close(one.advantages[-1], two.advantages[-1], atol=0.01, rtol=0)
    for a, b in zip(one.samples, two.samples, strict=True):
        torch.testing.assert_close(b.draw_ratio, torch.full_like(b.draw_ratio, ratio), rtol=1e-3, atol=0)
        torch.testing.assert_close(b.loss_energy, ratio**2 * a.loss_energy, rtol=1e-3, atol=1e-6)
        assert torch.equal(a.energy, b.energy)
    assert logged(two, "ratio")[0] == pytest.approx(ratio, rel=1e-3)
    assert logged(two, "otb/effective_sample_share")[0] == pytest.approx(1.0, rel=1e-3)


def scores(trainer, samples):
    """Of each sample's trained tokens, the derivatives of their log-probs by a shift of even ids' logits."""
    ids, masks = (
        pad_sequence([torch.tensor(getattr(sample, name)) for sample in samples], batch_first=True)
        for name in ("input_ids", "completion_mask")
    )
    with torch.no_grad():
        probs = trainer.rollout_worker.loop.policy(ids).logits.double().softmax(-1)
    even = (torch.arange(probs.size(-1)) % 2 == 0).double()
    of_tokens = even[ids[:, 1:]] - probs[:, :-1] @ even
    return [row[mask] for row, mask in zip(of_tokens, masks[:, 1:].bool(), strict=True)]


@pytest.mark.slow
def test_value_is_unbiased(train_async):
    """
    E Σ_t B_t s_t is 0 over 4,000 completions, in steps that cut groups: far from E G Σ_t s_t / N, which it would be
    under the group mean.
    """
    cut = {"per_device_train_batch_size": 62, "max_steps": 81, "max_staleness": 4, "learning_rate": 0.0}
    trainer = train_async(Watched, baseline="value", reward=tiny.even_bytes, **cut)
    advantages = torch.cat(trainer.advantages).split([len(sample.logps) for sample in trainer.samples])
    constant = torch.stack([sample.returns for sample in trainer.samples[:1000]]).mean()  # less noise
    products, signal, taken = [], [], trainer.rollout_worker.taken
    for i, (own, found) in enumerate(zip(trainer.samples, advantages, strict=True)):
        if i % 62 == 0:
            of_step = torch.tensor([float(sample.old_log_probs.sum()) for sample in taken[i : i + 62]])
            scores_of_step = scores(trainer, taken[i : i + 62])
        of_tokens = scores_of_step[(of_step - own.logps.sum()).abs().argmin()]  # TRL has ordered the rows
        products.append(((own.returns - found.double() - constant) * of_tokens).sum())
        signal.append(((own.returns - constant) * of_tokens).sum())
    products, signal = torch.stack(products[1000:]), torch.stack(signal[1000:])  # once `value` has learned
    # Completions of a group share their prompt and others' returns: errors from means of eight groups
    error = products[: len(products) // 32 * 32].view(-1, 32).mean(1).std() / (len(products) // 32) ** 0.5
    assert products.mean().abs() < 3.5 * error and signal.mean() / 4 > 10 * error


def test_one_completion_uses_earlier_returns(train_async):
    trainer = train_async(Watched, num_generations=1, learning_rate=0.0, max_steps=4)
    assert (trainer.advantages[0] == 0).all()  # nothing is known
    first, second = (trainer.samples[i : i + 16] for i in (0, 16))
    mean = torch.stack([sample.returns for sample in first]).mean().item()
    assert {round(sample.b0.item(), 6) for sample in second} == {round(mean, 6)}
    assert trainer.advantages[1].abs().max() > 0.01 and trainer.baseline.entry.estimator.state_dict()["_prompts"] > 16


def test_forked_rows_share_base_and_wait(train_async):
    trainer = train_async(Watched, **OPTIONS["forks"] | {"max_steps": 6})
    of_group = [[s for s in trainer.samples if int(s.group) == group] for group in range(8)]
    assert {*map(len, of_group)} == {5, 6}
    for samples in of_group:
        returns = {round(float(s.returns), 6) for s in samples}
        bases = {(round(float(s.returns), 6), round(float(s.b0), 6)) for s in samples}
        assert len(bases) == len(returns)  # rows of one conversation have one return and one base
    learned = [group for _, groups in trainer.learned for group in groups]
    assert len(learned) == len({*learned}) > 6


def samples_of(*conversations):
    """A sample for each row of a conversation, given as (reward, rows)."""
    made = [SimpleNamespace(metrics={"reward": reward}) for reward, rows in conversations for _ in range(rows)]
    return stamped(made, [rows for _, rows in conversations])


def test_stamps_match_hand_calculation():
    nan = math.nan
    found = samples_of((1.0, 2), (nan, 1), (4.0, 1), (2.5, 0), (7.0, 1))  # the fourth left no row
    others = [sample.metrics["otb/others"] for sample in found]
    assert others[:2] == [5.5, 5.5] and math.isnan(others[2]) and others[3:] == [4.0, 2.5]
    assert {sample.metrics["otb/rows"] for sample in found} == {5.0} and found[0].metrics["otb/mean"] == 4.0
    (alone,) = samples_of((1.0, 1))
    assert math.isnan(alone.metrics["otb/others"])


def test_carried_values_survive_deepspeed_rounding(train_async):
    trainer = train_async(train=False)
    batch = next(iter(trainer.get_train_dataloader()))
    assert batch["otb_samples"].dtype == batch["otb_groups"].dtype == torch.int64
    carried = batch["otb_samples"][0].view(torch.float64)
    rewards = {s.metrics["reward"] for s in trainer.rollout_worker.taken}
    assert {row[0].item() for row in carried} <= rewards and len(carried) == 16
    assert [*dict.fromkeys(row[4].item() for row in carried)] == [0.0, 1.0, 2.0, 3.0]


class Own(AsyncGRPOTrainer):
    """Its loss reads advantages before the forward."""

    def compute_loss(self, model, inputs, *args, **kwargs):
        return super().compute_loss(model, inputs | {"advantages": inputs["advantages"].clamp(-1, 1)}, *args, **kwargs)


def clipping(self, *args, **kwargs):
    return Own.compute_loss(self, *args, **kwargs)


@pytest.mark.parametrize("where", ["in a class", "before it", "in the package", "on the trainer"])
def test_a_loss_of_ones_own_is_refused(train_async, monkeypatch, where):
    classes = {"in a class": (AsyncOTBGRPOTrainer, Own), "before it": (Own, AsyncOTBGRPOTrainer)}
    cls = type("Mine", classes.get(where, (AsyncOTBGRPOTrainer,)), {})
    with pytest.raises(TypeError, match=r"compute_loss` may read them before. If it only adds"):
        trainer = train_async(cls, train=False)
        if where == "in the package":
            monkeypatch.setattr(AsyncOTBGRPOTrainer, "compute_loss", functools.wraps(Own.compute_loss)(clipping))
        else:
            monkeypatch.setattr(trainer, "compute_loss", clipping)
        trainer.train()
    train_async(type("Mine", (AsyncOTBGRPOTrainer, Own), {}), baseline="group_mean", scale_rewards="group", max_steps=1)


def test_a_sample_may_come_twice_and_its_group_have_any_name():
    sample = {"advantage": 0.0, "group_id": "a text", "metrics": {"reward": 1.0, "otb/mean": 1.0, "otb/others": 1.0}}
    carry = carried_with(lambda examples: {}, 4, "none")
    rows = [[SimpleNamespace(samples=[copy.deepcopy(sample)]) for _ in range(2)] for _ in range(2)]
    first, second = (carry([of_batch]) for of_batch in rows)
    assert torch.equal(first["otb_samples"], second["otb_samples"])
    assert first["otb_groups"].tolist() == [[[0, 2]], [[0, 2]]]
    # A broadcast sends as much memory as a tensor has numbers, from where it begins
    assert all(of.is_contiguous() for of in first.values())
    with pytest.raises(ValueError, match="without `reward_std`"):
        carried_with(lambda examples: {}, 4, "group")([[SimpleNamespace(samples=[dict(sample)])]])


def test_changed_advantages_are_said_to_be_replaced(train_async, caplog):
    accelerate.logging.MultiProcessAdapter.warning_once.cache_clear()
    train_async(baseline="rloo", max_steps=1)
    assert "are replaced" not in caplog.text
    train_async(change=lambda sample: setattr(sample, "advantage", 0.0), baseline="rloo", max_steps=1)
    assert "changed are replaced by those of `baseline='rloo'`" in caplog.text


def one_of_four(completion_ids, **kwargs):
    return [0.5 + completion_ids[0][0] % 7, *[None] * (len(completion_ids) - 1)]


@pytest.mark.parametrize("baseline", ["rloo", "value", "group_mean"])
def test_single_scored_completion_needs_value(train_async, baseline):
    trainer = train_async(Watched, baseline=baseline, reward=one_of_four, learning_rate=0.0)
    first, *_, last = trainer.advantages
    assert (first == 0).all() and (last != 0).any() == (baseline == "value")


def test_a_worker_that_does_not_stamp_is_named(train_async):
    """Its advantages may be divided or not, clipped, or of some of the group: they do not say B0."""
    with pytest.raises(
        ValueError, match="does not hold the mean reward of its group's other completions.*worker.stamped`"
    ):
        train_async(stamps=False, baseline="rloo")
    train_async(stamps=False, baseline="group_mean", scale_rewards="group")  # TRL's own advantages


def test_a_dropped_sample_is_named():
    with pytest.raises(ValueError, match="A group of 3 conversations has 2 samples, and 3 were expected. Drop"):
        stamped([SimpleNamespace(metrics={"reward": 1.0})] * 2, [1, 1, 1])


def as_iterator(completion_ids, **kwargs):
    return iter(even_bytes(completion_ids))


def as_text(completion_ids, **kwargs):
    return [str(reward) for reward in even_bytes(completion_ids)]


@pytest.mark.parametrize("reward", [as_iterator, as_text])
def test_rewards_that_trl_takes_are_taken(train_async, reward):
    usual, other = train_async(max_steps=1), train_async(max_steps=1, reward=reward)
    assert_same_weights(usual, other)


def test_the_other_trainers_config_is_refused(model_path, tmp_path):
    for cls, args in ((OTBGRPOTrainer, AsyncOTBGRPOConfig), (AsyncOTBGRPOTrainer, OTBGRPOConfig)):
        options = {name: tiny.SETTINGS[name] for name in ("use_cpu", "bf16")} | {"scale_rewards": "none"}
        args = args(**options, output_dir=str(tmp_path), baseline="none")
        with pytest.raises(TypeError, match=f"`args` is a {type(args).__name__}: {cls.__name__} takes an"):
            cls(model_path, reward_funcs=even_bytes, args=args, train_dataset=PROMPTS)


def infinite(completion_ids, **columns):
    return [math.inf, *[1.0] * (len(completion_ids) - 1)]


def per_turn(completion_ids, **columns):
    return [[0.5, 0.5], *[1.0] * (len(completion_ids) - 1)]


async def per_turn_later(**columns):
    return per_turn(**columns)


@pytest.mark.parametrize(
    ("reward", "message"),
    [
        (infinite, "'infinite' returned inf for completion 0: make it finite"),
        (per_turn, "'per_turn' returned 2 rewards for completion 0: .* Return their sum"),
        (per_turn_later, "'per_turn_later' returned 2 rewards for completion 0"),
    ],
)
def test_wrong_rewards_are_refused(train_async, reward, message):
    with pytest.raises(ValueError, match=message):
        train_async(reward=reward)


def test_an_environments_rewards_of_turns_are_refused(train_async):
    loop = train_async(train=False).rollout_worker.loop
    group = SimpleNamespace(env_rewards=[(dict, 0.5), (dict, [0.5, 0.5])], completions_sequences=[[], []])
    with pytest.raises(ValueError, match="'get_reward' returned 2 rewards for completion 1"):
        asyncio.run(loop._score_group(group))


class Loop:
    """Stands for TRL's loop in the child process."""

    def __init__(self, reward_funcs):
        self.reward_funcs = reward_funcs

    async def _score_group(self, group):
        rewards = self.reward_funcs[0]()
        return [SimpleNamespace(metrics={"reward": reward}) for reward in rewards]


def two_rewards(**columns):
    return [0.5, 2.0]


def test_trls_workers_stamp_in_child_process():
    stopped = {"_process": None, "_failed_event": None}
    worker = object.__new__(type("Worker", (trl_worker.AsyncRolloutWorker,), {"_loop_cls": Loop, **stopped}))
    for _ in range(2):  # of two trainers
        stamp_groups(worker)
    made = pickle.loads(pickle.dumps(worker._loop_cls))(reward_funcs=[two_rewards])
    group = SimpleNamespace(env_rewards=[None, None], completions_sequences=[[0], [0]])
    samples = asyncio.run(made._score_group(group))
    assert [sample.metrics["otb/others"] for sample in samples] == [2.0, 0.5] and isinstance(made, Loop)


def test_worker_stops_with_its_child():
    """TRL's own would set an event that the child had waited for, and wait for it to wake."""
    worker = object.__new__(trl_worker.AsyncRolloutWorker)
    worker._process = SimpleNamespace(join=lambda timeout: None, is_alive=lambda: False)
    worker._failed_event, worker._stop_event_mp = SimpleNamespace(is_set=lambda: True), None
    stamp_groups(worker)
    worker.stop()
    assert worker._process is None


def test_killed_child_is_named():
    """TRL's own would wait for minutes, and then say that it is hung."""
    worker = object.__new__(trl_worker.AsyncRolloutWorker)
    worker._process = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    worker._process.is_alive = lambda: worker._process.poll() is None
    worker._failed_event, worker._heartbeat_value = threading.Event(), SimpleNamespace(value=time.time())
    stamp_groups(worker)
    worker.check_health(300.0)
    worker._process.kill()
    worker._process.exitcode = worker._process.wait()
    with pytest.raises(RuntimeError, match="has died, with exit code -9"):
        worker.check_health(300.0)


def test_learned_state_is_in_checkpoints(train_async, tmp_path):
    run = {"output_dir": str(tmp_path / "run"), "save_strategy": "steps", "save_steps": 2, "max_steps": 2}
    first = train_async(**run)
    resumed = train_async(train=False, **run | {"max_steps": 3})
    resumed.train(resume_from_checkpoint=str(tmp_path / "run" / "checkpoint-2"))
    assert torch.equal(resumed._trl_otb.recorder.projection, first._trl_otb.recorder.projection)
    assert (
        resumed.baseline.entry.estimator.state_dict()["_prompts"]
        == 1.5 * first.baseline.entry.estimator.state_dict()["_prompts"]
        > 0
    )
    assert resumed._trl_otb.extra_state["earlier"][1] > first._trl_otb.extra_state["earlier"][1]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"baseline": "otb"}, "`baseline` is 'otb', which needs whole groups at once.*Choose 'value'"),
        ({"baseline": "absent"}, "`baseline` is 'absent': it must be one of"),
        ({"scale_rewards": "batch", "baseline": "rloo"}, "`scale_rewards` is 'batch': it must be 'none' or 'group'"),
        ({"scale_rewards": "group"}, "`scale_rewards` is 'group' and `baseline` is 'value'.*set 'none'"),
        ({"baseline": "rloo", "num_generations": 1}, "`num_generations` is 1 and `baseline` is 'rloo'.*Choose 'value'"),
    ],
)
def test_what_cannot_be_honoured_is_named(options, message, tmp_path):
    with pytest.raises(ValueError, match=message):
        AsyncOTBGRPOConfig(**SETTINGS | options, output_dir=str(tmp_path))


@pytest.mark.parametrize("wrong", [None, "zeros", "raw"])
def test_wrong_log_probs_of_the_sampler_are_noticed(train_async, caplog, wrong):
    """As a plain vLLM server's, which are of temperature 1: at temperature 0.7 about 0.7 of those that are right."""

    def change(sample):
        factor = {None: 1.0, "zeros": 0.0, "raw": 0.7}[wrong]
        sample.old_log_probs = factor * sample.old_log_probs

    trainer = train_async(change=change, max_steps=25, learning_rate=0.0)
    left_out = logged(trainer, "otb/value/luck_left_out")
    if wrong is None:
        assert not any(left_out) and "Later luck" not in caplog.text
    else:
        assert (
            any(left_out) and all(left_out[left_out.index(1.0) :]) and trainer.baseline.entry.estimator.luck_weight == 0
        )
        assert "the ratio of policy to sampler has a mean of" in caplog.text


@pytest.mark.parametrize(("options", "expected"), [
    ({}, "beyond rloo (mean of the last 3 batches)"),
    ({"num_generations": 1}, "beyond the mean of earlier steps (mean of the last "),
    ({"baseline": "rloo"}, None),
    ({"baseline": "group_mean", "scale_rewards": "group"}, None),
])  # fmt: skip
def test_the_end_of_training_says_what_value_did(train_async, capsys, options, expected):
    train_async(max_steps=3, **options)
    lines = [line for line in capsys.readouterr().out.splitlines() if "of the gradient's power" in line]
    assert len(lines) == (expected is not None) and all(expected in line for line in lines)


def test_progress_functions_are_refused():
    with pytest.raises(TypeError, match="has no option 'progress_funcs'"):
        AsyncOTBGRPOConfig("out", progress_funcs=["rewards"])
    args = AsyncOTBGRPOConfig("out", use_cpu=True, bf16=False)
    with pytest.raises(TypeError, match="`progress_funcs` is not read in asynchronous training"):
        AsyncOTBGRPOTrainer("not loaded", even_bytes, args, progress_funcs=[even_bytes])
