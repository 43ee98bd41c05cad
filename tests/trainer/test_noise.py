"""The gradient noise meter: unbiased, equal to brute force, and silent where it has nothing to measure."""

from types import SimpleNamespace

import pytest
import torch
from transformers import TrainerCallback
from trl import GRPOConfig, GRPOTrainer

from tests.helpers.settings import LORA, assert_same_weights, logged
from trl_otb import GradientNoiseCallback
from trl_otb.noise import noise_and_signal, norm_of


# Clipped, and several optimizer steps per generation batch, so that another order of rows would train something else
GROUPS = {
    "per_device_train_batch_size": 4,
    "gradient_accumulation_steps": 2,
    "steps_per_generation": 4,
    "max_steps": 3,
    "max_grad_norm": 0.01,
    "keep_groups_together": True,
}


def test_the_estimates_are_unbiased():
    """1,000 batches of 5 parts in 3 dimensions: g = (1, 2, 0), a part's gradient has covariance diag(1, 4, 9)."""
    g, std = torch.tensor([1.0, 2.0, 0.0]), torch.tensor([1.0, 2.0, 3.0])
    parts = g + std * torch.randn(1000, 5, 3, generator=torch.Generator().manual_seed(0))
    estimates = torch.tensor(
        [noise_and_signal(h.square().sum(1).mean().item(), h.mean(0).square().sum().item(), 5) for h in parts]
    )
    error = estimates.std(0) / 1000**0.5
    assert ((estimates.mean(0) - torch.tensor([14.0, 5.0])).abs() < 3 * error).all() and error.max() < 0.5


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [(7,), (3, 5), (8192, 256), (64, 128, 3, 3, 3)])
def test_norms_keep_their_digits(shape, dtype):
    gradient = torch.randn(shape, generator=torch.Generator().manual_seed(0)).to(dtype)
    expected = pytest.approx(gradient.double().norm().item(), rel=1e-5)
    assert norm_of(gradient).item() == expected and norm_of(gradient.transpose(0, -1)).item() == expected


class BruteForce(TrainerCallback):
    """Keeps the gradient of every micro-batch, as differences of what has accumulated."""

    def __init__(self):
        self.parts, self.before, self.estimates = [], None, []

    def _keep(self, model):
        total = torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None]).double()
        self.parts.append(total - (self.before if self.before is not None else 0))
        self.before = total

    def on_substep_end(self, args, state, control, model=None, **kwargs):
        self._keep(model)

    def on_pre_optimizer_step(self, args, state, control, model=None, **kwargs):
        self._keep(model)
        h = len(self.parts) * torch.stack(self.parts)
        true = h.mean(0).square().sum()
        noise = (h - h.mean(0)).square().sum() / (len(h) - 1)  # the sample variance, summed over parameters
        self.estimates.append((noise.item(), (true - noise / len(h)).item()))
        self.parts, self.before = [], None


@pytest.mark.parametrize(
    "options",
    [
        {"gradient_accumulation_steps": 4},
        {"baseline": "group_mean"},
        {"peft_config": LORA},
        {"num_iterations": 2, "gradient_accumulation_steps": 4},
    ],
)
def test_meter_is_micro_batches_sample_variance(train, options):
    meter, brute = GradientNoiseCallback(), BruteForce()
    meter.decay = 0.5
    trainer = train(callbacks=[meter, brute], **GROUPS | {"max_grad_norm": 0.0, "max_steps": 6} | options)
    noise = signal = weight = 0.0
    expected = []
    for n, s in brute.estimates:
        noise, signal, weight = 0.5 * (noise + n), 0.5 * (signal + s), 0.5 * (weight + 1)
        if signal > 0:
            expected.append(noise / signal)
    assert len(brute.estimates) == 6
    assert meter._averages.tolist() == pytest.approx([noise, signal, weight], rel=1e-3, abs=1e-3 * noise)
    assert logged(trainer, "noise/scale") == pytest.approx(expected, rel=1e-3)
    prompts = trainer.args.gradient_accumulation_steps
    assert logged(trainer, "noise/batch_over_scale") == pytest.approx([prompts / e for e in expected], rel=1e-3)
    assert meter.scale is None or meter.scale == pytest.approx(noise / signal, rel=1e-3)


@pytest.mark.parametrize("baseline", ["rloo", "group_mean", "otb"])
def test_meter_and_clipping_are_independent(train, baseline):
    meter, other = GradientNoiseCallback(), GradientNoiseCallback()
    options = {**GROUPS, "baseline": baseline}
    metered = train(callbacks=[meter], **options)
    assert_same_weights(train(**options), metered)
    assert logged(metered, "grad_norm")[0] > 0.01 and all(not p._backward_hooks for p in metered.model.parameters())
    one_step = options | {"max_steps": 1}
    train(callbacks=[meter], **one_step)
    train(callbacks=[other], **one_step | {"max_grad_norm": 0.0})
    assert meter._averages.tolist() == pytest.approx(other._averages.tolist(), rel=1e-4)


@pytest.mark.parametrize("together", [True, False])
@pytest.mark.parametrize("baseline", ["group_mean", "otb"])
def test_config_decides_group_integrity(train, baseline, together):
    options = {"baseline": baseline, "learning_rate": 0.0, "keep_groups_together": together, "max_steps": 8}
    trainer = train(**GROUPS | options)
    prompts = [batch["prompt_ids"] for batch in trainer.micro_batches]
    assert all(bool((ids == ids[0]).all()) for ids in prompts) == together

    def rows(batch):
        ids, advantages = batch["completion_ids"].float(), batch["advantages"]
        return torch.cat([ids, advantages.view(len(ids), -1)], dim=1)

    orders = set()
    for i, rollout in enumerate(trainer.batches):
        own, used = rows(rollout).tolist(), trainer.micro_batches[4 * i : 4 * i + 4]
        found = torch.cat([*map(rows, used)]).tolist()
        assert sorted(found) == sorted(own)  # every row once, with its own advantage
        orders.add(str([own.index(row) for row in found]))
    assert len(trainer.batches) == 4 and len(orders) > 1


def test_in_another_trainer_it_starts_anew(train, caplog):
    """Also where it is added after the trainer is made."""
    first = train(train=False, **GROUPS | {"max_steps": 6})
    meter = GradientNoiseCallback()
    first.add_callback(meter)
    first.train()
    logged_by_first = len(first.state.log_history)
    assert meter._averages[2] > 0 and logged(first, "noise/scale")
    options = {name: value for name, value in GROUPS.items() if name != "keep_groups_together"}
    other = train(GRPOTrainer, GRPOConfig, callbacks=[meter], **options)
    assert meter._averages[2] == 0 and "Use OTBGRPOTrainer with" in caplog.text
    assert not any("noise/scale" in entry for entry in other.state.log_history)
    assert len(first.state.log_history) == logged_by_first and not first._metrics["train"]


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"gradient_accumulation_steps": 1}, "`gradient_accumulation_steps` of 2 or more"),
        ({"keep_groups_together": False}, "`keep_groups_together=True`"),
    ],
)
def test_unmeasurable_noise_warns_once(train, caplog, options, reason):
    done = train(callbacks=[GradientNoiseCallback()], **GROUPS | options)
    (said,) = [r.getMessage() for r in caplog.records if r.name == "trl_otb.noise"]
    assert "cannot be measured" in said and reason in said
    assert not any(key.startswith("noise/") for entry in done.state.log_history for key in entry)


@pytest.mark.parametrize("option", [{"world_size": 2}, {"fp16": True}])
def test_processes_and_fp16_are_not_measured(train, caplog, option):
    trainer, meter = train(train=False, **GROUPS), GradientNoiseCallback()
    meter.trainer = trainer
    args = SimpleNamespace(**{"gradient_accumulation_steps": 2, "world_size": 1, "fp16": False} | option)
    meter.on_train_begin(args, trainer.state, trainer.control, model=trainer.model)
    assert "it measures one process, without fp16" in caplog.text
    assert not any(parameter._backward_hooks for parameter in trainer.model.parameters())


def test_removed_meter_leaves_no_hooks(train):
    class Takes(TrainerCallback):
        def on_step_end(self, args, state, control, **kwargs):
            trainer.remove_callback(meter)

    meter = GradientNoiseCallback()
    trainer = train(train=False, callbacks=[meter, Takes()], **GROUPS | {"max_steps": 1})
    trainer.train()
    assert not any(parameter._backward_hooks for parameter in trainer.model.parameters())
