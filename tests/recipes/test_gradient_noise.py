"""recipes/gradient_noise.py: unbiased, equal to brute force and to the comparison, and without effect on training."""

import json
from dataclasses import replace

import pytest
import torch
from transformers import TrainerCallback

from recipes.common import ProblemOptions
from recipes.gradient_noise import NoiseScaleTrainer, noise_and_signal
from recipes.math import load_problems
from recipes.toy import worked_sums
from tests.helpers import tiny
from tests.helpers.recording import Recording
from tests.helpers.settings import LORA, assert_same_weights, logged
from trl_otb import OTBGRPOConfig, OTBGRPOTrainer, compare_baselines
from trl_otb.baselines import BASELINES
from trl_otb.comparison.efficiency import moments_of
from trl_otb.comparison.gradients import CompletionGradients, Projection
from trl_otb.comparison.moments import prompt_moments
from trl_otb.seam.pools import at_rest, sample


# Clipped, and several optimizer steps per generation batch, so that another order of rows would train something else
GROUPS = {
    "per_device_train_batch_size": 4,
    "gradient_accumulation_steps": 2,
    "steps_per_generation": 4,
    "max_steps": 3,
    "max_grad_norm": 0.01,
}


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
    "options",
    [
        {"gradient_accumulation_steps": 4},
        {"peft_config": LORA},
        {"num_iterations": 2, "gradient_accumulation_steps": 4},
    ],
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
    """As without the callback."""
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


def moments_of_prompt(trainer, example, completions, seed):
    """Of a pool of completions, in groups of 4 under `ogb`, by the gradients of all parameters."""
    parameters = list(trainer.model.parameters())
    of = CompletionGradients(trainer, parameters, Projection([p.numel() for p in parameters], 10**9))
    ((pool, rows),) = sample(trainer, [example], completions, seed)
    masks = [row["completion_mask"][0] for row in rows]
    return prompt_moments(pool, masks, lambda i, a: of(rows[i], a), {"ogb": BASELINES["ogb"]}, [4], {})


@pytest.mark.slow
def test_the_callback_agrees_with_compare_baselines(short_policy, tmp_path):
    """
    The same eight prompts, without learning, and a reward for few tokens, whose gradient the prompts share. The
    callback's signal is ⟨g_p, g_q⟩ for prompts that differ, its noise the rest of E‖ĝ_p‖²: of completions and prompts.
    """
    options = ProblemOptions(dataset_options=json.dumps(worked_sums.CHAIN_SUM), num_train_problems=8, instruction="")
    prompts, *_ = load_problems(replace(options, num_held_out_problems=1), seed=5)
    settings = {**tiny.SETTINGS, "max_completion_length": 24, "learning_rate": 0.0, "output_dir": str(tmp_path)}

    def trainer_of(cls, **more):
        return cls(
            str(short_policy),
            lambda completion_ids, **kwargs: [-len(ids) / 8 for ids in completion_ids],
            args=OTBGRPOConfig(**(settings | more)),
            train_dataset=prompts,
        )

    trainer = trainer_of(OTBGRPOTrainer)
    with at_rest(trainer, frozenset({"energy"})):
        of_prompts = [moments_of_prompt(trainer, prompts[i], 96, seed=i) for i in range(8)]
    found = moments_of(of_prompts, set())["ogb", 4]
    signal = (found.signal.sum() - found.signal.diagonal().sum()) / (8 * 7)
    expected = ((found.square.mean() - signal) / signal).item()

    # One prompt per micro-batch, all eight per step; this loss divides all tokens by one number
    of_run = {"baseline": "ogb", "loss_type": "dr_grpo", "per_device_train_batch_size": 4}
    trainer = trainer_of(NoiseScaleTrainer, **of_run, gradient_accumulation_steps=8, max_steps=150)
    trainer.gradient_noise.decay_per_step = 0.999
    trainer.train()
    assert trainer.gradient_noise.scale == pytest.approx(expected, rel=0.3)
    assert expected > 3  # noise is what is measured
