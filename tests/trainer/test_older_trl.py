"""What a run needs of every TRL, in short; and what stands in the place of its LM head before 1.15."""

from itertools import product

import pytest
import torch
from accelerate.hooks import ModelHook, add_hook_to_module
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoModelForCausalLM
from trl import GRPOConfig, GRPOTrainer

from tests.helpers.oracles import energies_by_softmax, mask_of
from tests.helpers.settings import SETTINGS, SOURCES, assert_same_weights
from trl_otb import OTBGRPOConfig, OTBGRPOTrainer
from trl_otb.energy import TOKENS_AT_ONCE, log_sum_sq_probs
from trl_otb.seam import older_trl
from trl_otb.seam.older_trl import check_head, check_liger


class Sizes(TorchDispatchMode):
    """Numbers in the largest tensor that is made."""

    largest = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        if isinstance(result, torch.Tensor) and result._base is None:  # no view
            self.largest = max(self.largest, result.numel())
        return result


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_sums_from_logits_are_those_of_a_softmax_and_need_no_copy_of_them(dtype):
    rows, length, vocabulary = 3, 2 * TOKENS_AT_ONCE + 1, 50
    logits = 5 * torch.randn(rows, length, vocabulary, generator=torch.Generator().manual_seed(0)).to(dtype)
    with Sizes() as made:
        found = log_sum_sq_probs(logits, 0.7)
    expected = (logits.double() / 0.7).softmax(-1).square().sum(-1).log()
    torch.testing.assert_close(found.double(), expected, atol=1e-5, rtol=0)
    assert TOKENS_AT_ONCE * vocabulary == made.largest < logits.numel() / 3


@pytest.mark.parametrize(("source", "baseline"), product(SOURCES, ["otb", "value"]))
def test_energies_of_each_source_are_those_of_a_softmax(train, source, baseline):
    trainer = train(baseline=baseline, learning_rate=0.0, temperature=0.7, **SOURCES[source])
    batch, found = trainer.batches[-1], trainer.rollouts["train"].energy
    expected = energies_by_softmax(trainer.model.eval(), batch, 0.7)
    torch.testing.assert_close(found.double() * mask_of(batch), expected, atol=1e-5, rtol=0)
    assert trainer.energy_source == source and batch["advantages"].shape == found.shape


@pytest.mark.parametrize("setting", ["plain", "num_iterations", "lora and beta"])
def test_group_mean_is_this_versions_own_trainer(train, setting):
    options = {"scale_rewards": "none", **SETTINGS[setting]}
    ours = train(OTBGRPOTrainer, OTBGRPOConfig, baseline="group_mean", **options)
    assert_same_weights(train(GRPOTrainer, GRPOConfig, **options), ours)


def test_a_forward_with_hooks_of_accelerate_is_called(model_path):
    """As where a model is split over devices: then `forward` is a function, not a method."""
    model = AutoModelForCausalLM.from_pretrained(model_path, dtype=torch.float32)
    ids = torch.randint(0, 256, (2, 7), generator=torch.Generator().manual_seed(0))
    expected = log_sum_sq_probs(model(ids).logits.detach()[:, :-1], 0.7)
    add_hook_to_module(model, ModelHook())
    older_trl._add_to_outputs(model, 0.7, False, ())
    assert torch.equal(model(ids)["log_sum_sq_probs"], expected)


def test_liger_with_a_baseline_per_token_is_refused_before_its_head(monkeypatch):
    monkeypatch.setattr(older_trl, "NO_FUSED_HEAD", True)
    check_liger(use_liger_kernel=True, per_token=False, baseline="rloo")
    check_liger(use_liger_kernel=False, per_token=True, baseline="value")
    with pytest.raises(ValueError, match="`use_liger_kernel` is set and `baseline` is 'value'"):
        check_liger(use_liger_kernel=True, per_token=True, baseline="value")


def test_the_head_of_1_15_is_refused_on_a_cpu(monkeypatch):
    triton = pytest.importorskip("triton")
    cpu = torch.device("cpu")
    monkeypatch.setattr(older_trl, "NO_FUSED_HEAD", False)
    monkeypatch.setattr(older_trl.trl, "__version__", "1.15.0")
    monkeypatch.setattr(triton.knobs.runtime, "interpret", True)
    check_head(cpu)
    monkeypatch.setattr(triton.knobs.runtime, "interpret", False)
    check_head(torch.device("cuda"))
    with pytest.raises(ImportError, match="trl 1.15.0 runs its Triton kernels on a CPU"):
        check_head(cpu)
    monkeypatch.setattr(older_trl.trl, "__version__", "1.16.0")
    check_head(cpu)


def test_asynchronous_training_names_the_version_that_it_needs(monkeypatch):
    for version in ("1.15.0", "1.16.0", "1.17.2", "1.18.0", "2.0.0"):
        monkeypatch.setattr(older_trl.trl, "__version__", version)
        reason = older_trl.no_asynchronous_training()
        if version in ("1.16.0", "1.17.2"):
            assert reason is None
        else:
            assert f"needs trl 1.16 or 1.17, and {version} is installed" in reason
