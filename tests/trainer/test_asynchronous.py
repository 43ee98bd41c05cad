"""Baselines in TRL's AsyncGRPOTrainer, with a rollout worker of our own that needs no GPU."""

import asyncio
import math
from types import SimpleNamespace

import pytest
import torch
from datasets import Dataset
from trl.experimental.async_grpo import AsyncGRPOConfig, AsyncGRPOTrainer

from tests.helpers import tiny
from tests.helpers.local_worker import LocalWorker, on_cpu
from tests.helpers.settings import LORA, assert_same_weights, logged
from trl_otb import AsyncOTBGRPOConfig, AsyncOTBGRPOTrainer
from trl_otb.energy import token_energy
from trl_otb.seam.asynchronous import carried_of, one_number_each, stamped


SETTINGS = {
    name: tiny.SETTINGS[name] for name in tiny.SETTINGS if name not in ("num_generations", "max_completion_length")
}
SETTINGS |= {
    "token_budget": 0,
    "num_generations": 4,
    "per_device_train_batch_size": 16,
    "max_steps": 3,
    "max_staleness": 0,
}
PROMPTS = [tiny.tokenizer()(f"{i:02d}+{i:02d}=")["input_ids"] for i in range(30)]


def even_or_none(said):
    return [None if i % 5 == 3 else r for i, r in enumerate(tiny.even_bytes(said))]


@pytest.fixture
def train_async(model_path, tmp_path):
    """Trains, and returns the trainer; `lag` is in steps."""

    def run(
        cls=AsyncOTBGRPOTrainer,
        config=AsyncOTBGRPOConfig,
        *,
        train=True,
        lag=0,
        reward=tiny.even_bytes,
        stamps=True,
        peft_config=None,
        resume=None,
        **options,
    ):
        args = config(**SETTINGS | {"output_dir": str(tmp_path / "run")} | options)
        step = args.per_device_train_batch_size * args.gradient_accumulation_steps
        n = args.num_generations
        worker = LocalWorker(model_path, PROMPTS, reward, n, max(step // n, 1) * n, lag=lag * step, stamps=stamps)
        trainer = cls(
            model_path, args=args, train_dataset=Dataset.from_dict({"prompt": PROMPTS}),
            rollout_worker=worker, weight_transfer=worker, peft_config=peft_config,
        )  # fmt: skip
        if train:
            trainer.train(resume_from_checkpoint=resume)
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
}


@pytest.mark.parametrize("name", OPTIONS)
def test_trls_own_scaled_group_mean_is_trls_trainer_to_the_bit(train_async, name):
    trl = train_async(AsyncGRPOTrainer, AsyncGRPOConfig, stamps=False, **OPTIONS[name])
    ours = train_async(baseline="group_mean", scale_rewards="group", **OPTIONS[name])
    assert_same_weights(trl, ours)
    assert logged(trl, "loss") == logged(ours, "loss") and any(logged(ours, "loss"))


@pytest.mark.parametrize("name", OPTIONS)
@pytest.mark.parametrize("baseline", ["value", "rloo", "group_mean", "none"])
def test_every_baseline_trains_under_every_option(train_async, baseline, name):
    trainer = train_async(baseline=baseline, **OPTIONS[name])
    assert all(p.isfinite().all() for p in trainer.model.parameters())
    steps = trainer.state.global_step
    assert (
        len(logged(trainer, "otb/effective_share")) == steps and len(logged(trainer, "otb/advantage/abs_mean")) == steps
    )
    assert baseline != "value" or (trainer._baseline.rule._batches >= 1 and trainer.trained_baseline is not None)


class Watched(AsyncOTBGRPOTrainer):
    """Keeps what its loss multiplies, and what it learns from, step by step."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.advantages, self.samples, self.learned = [], [], []

    def _advantages(self, carried, sample_of, of_tokens):
        before = len(self._to_learn)
        self.advantages.append(super()._advantages(carried, sample_of, of_tokens))
        self.samples += self._to_learn[before:]
        return self.advantages[-1]

    def _learn(self):
        before = [int(sample.group) for sample in self._to_learn]
        super()._learn()
        waiting = {int(sample.group) for sample in self._to_learn}
        self.learned.append((len(self.samples), {*before} - waiting))


@pytest.mark.parametrize("stamps", [True, False])
def test_what_is_read_is_what_plain_forwards_of_each_sample_say(train_async, model_path, stamps):
    """Packed and with shared prefixes; log-probs, energies and the base of each sample."""
    trainer = train_async(Watched, stamps=stamps, learning_rate=0.0, max_steps=2)
    taken = trainer.rollout_worker.taken[: len(trainer.samples)]
    found = {(float(s.returns), len(s.logps), round(s.logps.sum().item(), 3)): s for s in trainer.samples}
    assert len(taken) == len(trainer.samples) == 32
    groups = {}
    for sample in taken:
        groups.setdefault(sample.group_id, []).append(sample.metrics["reward"])
    for sample in taken:
        ids, mask = torch.tensor(sample.input_ids), torch.tensor(sample.completion_mask).bool()
        with torch.no_grad():
            logits = trainer.rollout_worker.served(ids.unsqueeze(0)).logits[0].double()
        logps = logits[:-1].log_softmax(-1)
        own = logps.gather(1, ids[1:, None]).squeeze(1)[mask[1:]]
        energy = token_energy(own, logps[mask[1:]].mul(2).logsumexp(-1))
        read = found[sample.metrics["reward"], int(mask.sum()), round(own.sum().item(), 3)]
        torch.testing.assert_close(read.logps, own.float(), atol=2e-5, rtol=0)
        torch.testing.assert_close(read.energy, energy, atol=2e-5, rtol=0)
        rewards = groups[sample.group_id]
        others = (sum(rewards) - sample.metrics["reward"]) / 3
        assert read.base.item() == pytest.approx(others, abs=1e-6) and read.group.item() == sample.group_id


def test_advantages_are_returns_less_the_others_mean_or_what_value_says(train_async):
    plain = train_async(Watched, baseline="rloo", learning_rate=0.0, max_steps=4)
    scaled = train_async(Watched, baseline="rloo", scale_rewards="group", learning_rate=0.0, max_steps=4)
    trls = train_async(Watched, baseline="group_mean", learning_rate=0.0, max_steps=4)
    value = train_async(Watched, learning_rate=0.0, max_steps=4)
    for one, two, three in zip(plain.advantages, scaled.advantages, trls.advantages, strict=True):
        torch.testing.assert_close(one, 4 / 3 * three, atol=1e-6, rtol=0)
        assert ((two / one)[one.abs() > 0.01] > 1).all()
    assert torch.equal(value.advantages[0], plain.advantages[0])  # nothing is predicted yet
    assert (value.advantages[-1] - plain.advantages[-1]).abs().max() > 0.01


@pytest.mark.parametrize("staleness", [0, 4])
def test_it_learns_from_a_group_when_its_last_sample_is_trained_on_or_dropped(train_async, staleness):
    """Steps of 18 samples cut groups of 4; without staleness, samples taken ahead of a step are dropped."""
    options = {"per_device_train_batch_size": 6, "gradient_accumulation_steps": 3, "max_steps": 5}
    trainer = train_async(Watched, max_staleness=staleness, **options)
    groups = [int(sample.group) for sample in trainer.samples]
    at_once = [set(groups[:n]) & set(groups[n:]) for n, _ in trainer.learned]  # cut by the end of a step
    assert sum(map(len, at_once)) >= 1
    for cut, (n, learned) in zip(at_once, trainer.learned, strict=True):
        assert learned and not learned & cut and not learned & set(groups[n:])
    assert len(trainer.learned) == 5 and len(groups) == 90


@pytest.mark.parametrize("ratio", [0.5, 2.0])
def test_ratios_weight_what_it_learns_and_not_what_it_says(train_async, ratio):
    def off(trainer):
        produce = trainer.rollout_worker.put_group

        def put(group, ids, logps, length, said):
            produce(group, ids, [of - math.log(ratio) for of in logps], length, said)

        trainer.rollout_worker.put_group = put
        trainer.train()
        return trainer

    options = {"learning_rate": 0.0, "max_steps": 3, "train": False, "epsilon": 100.0}
    one, two = train_async(Watched, **options), off(train_async(Watched, **options))
    one.train()
    torch.testing.assert_close(one.advantages[-1], two.advantages[-1], atol=1e-4, rtol=0)  # all weights are alike
    for a, b in zip(one.samples, two.samples, strict=True):
        torch.testing.assert_close(b.weights, ratio**2 * a.weights, rtol=1e-3, atol=1e-6)
        assert torch.equal(a.energy, b.energy)
    assert logged(two, "ratio")[0] == pytest.approx(ratio, rel=1e-3)
    assert logged(two, "otb/effective_share")[0] == pytest.approx(1.0, rel=1e-3)


def test_one_completion_per_prompt_starts_from_earlier_returns(train_async):
    trainer = train_async(Watched, num_generations=1, learning_rate=0.0, max_steps=4)
    assert (trainer.advantages[0] == 0).all()  # nothing is known
    first, second = (trainer.samples[i : i + 16] for i in (0, 16))
    mean = torch.stack([sample.returns for sample in first]).mean().item()
    assert {round(sample.base.item(), 6) for sample in second} == {round(mean, 6)}
    assert trainer.advantages[1].abs().max() > 0.01 and trainer._baseline.rule._batches > 1


def samples_of(*conversations):
    """A sample for each row of a conversation, given as (reward, rows)."""
    made = [SimpleNamespace(metrics={"reward": reward}) for reward, rows in conversations for _ in range(rows)]
    return stamped(made, [rows for _, rows in conversations])


def test_stamps_of_unscored_and_forked_conversations_by_hand():
    nan = math.nan
    found = samples_of((1.0, 2), (nan, 1), (4.0, 1), (2.5, 0), (7.0, 1))  # the fourth left no row
    others = [sample.metrics["otb/others"] for sample in found]
    assert others[:2] == [5.5, 5.5] and math.isnan(others[2]) and others[3:] == [4.0, 2.5]
    assert {sample.metrics["otb/rows"] for sample in found} == {5.0} and found[0].metrics["otb/mean"] == 4.0
    (alone,) = samples_of((1.0, 1))
    assert math.isnan(alone.metrics["otb/others"])


def per_turn(**columns):
    return [[0.5, 0.5], [1.0]]


async def at_the_end(**columns):
    return [0.5, None]


def test_rewards_of_turns_are_refused():
    with pytest.raises(ValueError, match="'per_turn' returned 2 rewards for completion 0: .* Return their sum"):
        one_number_each(per_turn)()
    assert asyncio.run(one_number_each(at_the_end)()) == [0.5, None]


def test_stamps_that_trls_worker_leaves_say_the_same():
    rewards = [0.25, 1.0, 0.5, 0.125]
    mean = sum(rewards) / 4
    std = (sum((r - mean) ** 2 for r in rewards) / 4) ** 0.5
    for reward in rewards:
        metrics = {"reward": reward, "reward_std": std}
        told = {"metrics": metrics, "advantage": (reward - mean) / (std + 1e-8), "group_id": 3}
        numbers, size = carried_of(told, 4)
        assert numbers == pytest.approx([reward, std, mean, (sum(rewards) - reward) / 3, 3.0], abs=1e-12) and size == 4


def test_what_it_has_learned_is_in_checkpoints(train_async, tmp_path):
    run = {"output_dir": str(tmp_path / "run"), "save_strategy": "steps", "save_steps": 2, "max_steps": 2}
    first = train_async(**run)
    resumed = train_async(train=False, **run | {"max_steps": 3})
    resumed.train(resume_from_checkpoint=str(tmp_path / "run" / "checkpoint-2"))
    assert torch.equal(resumed.recorder.projection, first.recorder.projection)
    assert resumed._baseline.rule._batches == pytest.approx(1 + 0.9 * first._baseline.rule._batches)
    assert resumed._earlier[1] > first._earlier[1]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"baseline": "otb"}, "`baseline` is 'otb', which compares tokens of whole groups.*Choose 'value'"),
        ({"baseline": "absent"}, "`baseline` is 'absent': it must be one of"),
        ({"scale_rewards": "batch", "baseline": "rloo"}, "`scale_rewards` is 'batch': it must be 'none' or 'group'"),
        ({"scale_rewards": "group"}, "`scale_rewards` is 'group' and `baseline` is 'value'.*set 'none'"),
        ({"baseline": "rloo", "num_generations": 1}, "`num_generations` is 1 and `baseline` is 'rloo'.*Choose 'value'"),
    ],
)
def test_what_cannot_be_honoured_is_named(options, message, tmp_path):
    with pytest.raises(ValueError, match=message):
        AsyncOTBGRPOConfig(**SETTINGS | options, output_dir=str(tmp_path))
