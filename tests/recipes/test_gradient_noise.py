"""recipes/gradient_noise.py: unbiased, equal to brute force, and without effect on training."""

import pytest
import torch
from transformers import TrainerCallback

from recipes.gradient_noise import NoiseScaleTrainer, noise_and_signal
from tests.helpers.recording import Recording
from tests.helpers.settings import LORA, assert_same_weights, logged
from trl_otb import compare_baselines


# Clipped, and several optimizer steps per generation batch, so that another order of rows would train something else
GROUPS = {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 2, "steps_per_generation": 4}
GROUPS |= {"max_steps": 3, "max_grad_norm": 0.01}


class Recorded(NoiseScaleTrainer, Recording):
    pass


def test_the_estimates_are_unbiased():
    """1,000 batches of 5 parts in 3 dimensions: g = (1, 2, 0), a part's gradient has covariance diag(1, 4, 9)."""
    g, std = torch.tensor([1.0, 2.0, 0.0]), torch.tensor([1.0, 2.0, 3.0])
    parts = g + std * torch.randn(1000, 5, 3, generator=torch.Generator().manual_seed(0))
    estimates = torch.tensor(
        [noise_and_signal(h.square().sum(1).mean().item(), h.mean(0).square().sum().item(), 5) for h in parts]
    )
    error = estimates.std(0) / 1000**0.5
    assert ((estimates.mean(0) - torch.tensor([14.0, 5.0])).abs() < 3 * error).all() and error.max() < 0.5


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
    "options", [{"peft_config": LORA}, *[{"num_iterations": n, "gradient_accumulation_steps": 4} for n in (1, 2)]]
)
def test_meter_is_micro_batches_sample_variance(train, options):
    """Also where baselines are compared between steps, whose gradients are not the run's."""

    class Comparing(TrainerCallback):
        def on_step_end(self, args, state, control, **kwargs):
            if state.global_step == 2:
                compare_baselines(trainer, num_prompts=3, completions_per_prompt=16, baselines=["ogb"], group_sizes=[4])

    brute, options = BruteForce(), GROUPS | {"max_grad_norm": 0.0, "max_steps": 6} | options
    trainer = train(NoiseScaleTrainer, train=False, callbacks=[brute, Comparing()], **options)
    meter = trainer.gradient_noise
    meter.decay_per_step = 0.5
    trainer.train()
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
    assert all(not parameter._backward_hooks for parameter in trainer.model.parameters())


def test_measuring_trains_the_same_weights(train):
    options = GROUPS | {"baseline": "otb"}
    metered, plain = train(NoiseScaleTrainer, **options), train(NoiseScaleTrainer, train=False, **options)
    plain.remove_callback(plain.gradient_noise)
    plain.train()
    assert_same_weights(plain, metered)
    assert logged(metered, "grad_norm")[0] > 0.01 and not logged(plain, "noise/scale")


@pytest.mark.parametrize("baseline", ["group_mean", "otb"])
def test_micro_batches_hold_shuffled_groups(train, baseline):
    trainer = train(Recorded, **GROUPS | {"baseline": baseline, "learning_rate": 0.0, "max_steps": 8})
    prompts = [batch["prompt_ids"] for batch in trainer.micro_batches]
    assert all(bool((ids == ids[0]).all()) for ids in prompts)

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


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"gradient_accumulation_steps": 1}, "`gradient_accumulation_steps` is 1: .*Set 2 or more"),
        ({"per_device_train_batch_size": 2}, "size` is 2: whole groups need a multiple of `num_generations`, 4"),
    ],
)
def test_unmeasurable_noise_is_an_error(train, options, reason):
    with pytest.raises(ValueError, match=reason):
        train(NoiseScaleTrainer, **GROUPS | options)
