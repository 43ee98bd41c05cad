"""vLLM's correction of importance weights, without vLLM: a stand-in samples. What of vllm_on_cpu.py can be tested."""

import inspect
import math
import re

import pytest
import torch
from packaging.version import Version
from transformers import AutoModelForCausalLM
from trl.generation.vllm_client import VLLMClient
from trl.trainer import grpo_trainer

from recipes.benchmarks import vllm_on_cpu
from tests.helpers import tiny
from tests.helpers.oracles import energies_by_softmax, generated, logps_by_softmax, mask_of
from tests.helpers.recording import Sampler, first_rollout
from tests.helpers.settings import TRL, predicted
from trl_otb.baselines import compute_advantages
from trl_otb.comparison.pools import at_rest, sample


ONE_STEP = {"max_steps": 1, "learning_rate": 0.0, "use_vllm": True, "vllm_mode": "colocate"}


@pytest.mark.parametrize(
    ("mode", "baseline"),
    [("token_truncate", "otb"), ("token_mask", "ogb"), ("sequence_truncate", "ogb"), ("sequence_mask", "otb")],
)
def test_energies_carry_the_squared_ratio(mode, baseline, train, model_path, monkeypatch):
    monkeypatch.setattr(grpo_trainer, "VLLMGeneration", Sampler)
    low, high = 0.6, 1.6
    clip = {"vllm_importance_sampling_clip_min": low, "vllm_importance_sampling_clip_max": high}
    trainer = train(**ONE_STEP, baseline=baseline, vllm_importance_sampling_mode=mode, **clip)
    assert trainer.energy_source == "the no-gradient forward that GRPOTrainer runs anyway"
    assert trainer.forwards == {"grad": 1, "no_grad": 1}  # the one that TRL runs for the correction itself

    batch = first_rollout(trainer)
    mask = mask_of(batch).double()

    # ρ from the definitions: the policy's log-probs in float64 against the sampler's
    policy = AutoModelForCausalLM.from_pretrained(model_path, dtype=torch.float32)
    with torch.no_grad():
        logps = logps_by_softmax(policy, batch).gather(-1, batch["completion_ids"].unsqueeze(-1)).squeeze(-1)
    sampled = torch.zeros_like(logps)
    for i, row in enumerate(trainer.vllm_generation.logps):
        sampled[i, : len(row)] = torch.tensor([math.nan if x is None else x for x in row])
    difference = ((logps - sampled) * mask).nan_to_num(nan=0.0)
    if mode.startswith("sequence"):
        difference = difference.sum(1, keepdim=True)
    ratio = difference.exp()
    if mode.endswith("truncate"):
        ratio = ratio.clamp(low, high)
    else:
        ratio = ratio.masked_fill((ratio < low) | (ratio > high), 0.0)
    assert ((ratio == low) | (ratio == high) | (ratio == 0)).any() and ratio.unique().numel() > 3
    if mode.startswith("token"):
        assert ratio[2, 1] == 1 or TRL < Version("1.11")  # unavailable: no correction

    rewards = torch.tensor(tiny.even_bytes(generated(batch)))
    energy = energies_by_softmax(policy, batch)
    options = {"baseline": baseline, "importance_weights": ratio}
    expected = compute_advantages(rewards, energy, mask, 4, **options)
    actual = batch["advantages"] if batch["advantages"].dim() == 2 else batch["advantages"].unsqueeze(1) * mask
    torch.testing.assert_close(actual.float(), expected, atol=1e-5, rtol=0)
    without = compute_advantages(rewards, energy, mask, 4, baseline=baseline)
    assert (without - expected).abs().max() > 1e-3  # leaving ρ out would show

    # Σ_t ρ_t² w_t A_t², as the gradient's power under the correction
    power = (ratio.square() * energy * mask * expected.double().square()).sum(1).mean().item()
    (log,) = (h for h in trainer.state.log_history if "otb/grad_power" in h)
    assert log["otb/grad_power"] == pytest.approx(power, rel=1e-4)
    # w alone, and W_T = Σ_t ρ_t² w_t
    assert log["otb/energy/token_mean"] == pytest.approx(((energy * mask).sum() / mask.sum()).item(), rel=1e-4)
    realized = (ratio.square() * energy * mask).sum(1).mean().item()
    assert log["otb/energy/completion_mean"] == pytest.approx(realized, rel=1e-4)
    assert abs(realized / (energy * mask).sum(1).mean().item() - 1) > 5e-4


@pytest.mark.parametrize("mode", [None, "token_truncate", "token_mask", "sequence_truncate"])
def test_ratios_affect_values_learning_only(mode, train, monkeypatch):
    """
    A ratio of a completion depends on all of its tokens, on which no earlier baseline may depend. That of a token
    weights its own luck, if the loss weights tokens one by one.
    """

    class Off(Sampler):
        """The last token's log-prob is off by `by`."""

        by = 0.0

        def generate(self, prompts, images, num_generations, profiler):
            nothing, completions, logps, extra = super().generate(prompts, images, num_generations, profiler)
            logps = [[*row[:-1], [(row[-1][0] or 0.0) + self.by]] for row in logps]
            return nothing, completions, logps, extra

    monkeypatch.setattr(grpo_trainer, "VLLMGeneration", Off)

    def run(steps, memory=None):
        correction = {} if mode is None else {"vllm_importance_sampling_mode": mode}
        trainer = train(**ONE_STEP | {"max_steps": steps, "train": False}, baseline="value", **correction)
        if memory is not None:
            trainer.baseline.entry.estimator.load_state_dict(memory)
        trainer.train()
        return trainer

    memory = run(4).baseline.entry.estimator.state_dict()
    memory["weight"] = 0.5
    one = run(1, memory)
    monkeypatch.setattr(Off, "by", 0.3)
    two = run(1, memory)
    rollout, other = one.rollouts["train"], two.rollouts["train"]
    mask = rollout.mask.bool()
    assert torch.equal(rollout.completion_ids, other.completion_ids)
    assert (rollout.loss_energy - other.loss_energy)[mask].abs().max() > 1e-3
    assert torch.equal(rollout.energy, other.energy)
    last = mask & (mask.cumsum(1) == mask.sum(1, keepdim=True))  # whose ratio differs
    by_token = mode is not None and mode.startswith("token")
    assert by_token != torch.equal(rollout.baselines[mask], other.baselines[mask])
    assert torch.equal(rollout.baselines[last], other.baselines[last])
    assert predicted(rollout).abs().max() > 1e-3
    sums, others = (trainer.baseline.entry.estimator.state_dict()["_sums"] for trainer in (one, two))
    assert not torch.equal(sums, others)

    if mode == "sequence_truncate":  # the gradients of a comparison have no ratios, and so no energies with them
        with at_rest(two, frozenset({"energy"})):
            ((sampled, rows),) = sample(two, [{"prompt": "abc"}], 4, seed=0)
        for row, weights, mask in zip(rows, sampled.loss_energy, sampled.mask.bool(), strict=True):
            expected = energies_by_softmax(two.model, row)[0].float()
            torch.testing.assert_close(weights[mask], expected, atol=1e-5, rtol=0)


def test_vllm_check_names_own_commands():
    commands = re.findall(r"python -m (\S+) (\w+)", vllm_on_cpu.__doc__)
    assert commands == [(vllm_on_cpu.__name__, verb) for verb in ("prepare", "serve", "train", "train_async")]
    assert all(callable(getattr(vllm_on_cpu, verb)) for _, verb in commands)


@pytest.mark.tested_trl
def test_stubbed_client_takes_same_arguments():
    names = "init_communicator _start_weight_update _finish_weight_update update_named_params".split()
    stubbed = type("Stubbed", (VLLMClient,), {})
    vllm_on_cpu.reload_instead_of_nccl(stubbed)
    for name in names:
        own, original = (list(inspect.signature(getattr(of, name)).parameters) for of in (stubbed, VLLMClient))
        assert own == original and name in vars(stubbed)
