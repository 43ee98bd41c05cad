"""
What runs otherwise on a GPU: TRL's Triton head, bfloat16 products, peak memory. `pytest -m gpu`, or `make gpu`.

All but memory is tested on the CPU too: with the head that TRL makes of torch operations there, and with the Triton
head under Triton's interpreter.
"""

import gc
import os
import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from trl.trainer import utils as trl_utils

from tests.helpers import tiny
from tests.helpers.energies import HEADS, energies, model_of, trainer_of
from tests.helpers.settings import LORA, SGD, SOURCES, assert_same_weights, scripted_rollout, weights
from trl_otb.seam.forwards import extra_forward


chunked_logprob = pytest.importorskip("trl.kernels.chunked_logprob", exc_type=ImportError)
if not hasattr(chunked_logprob, "_use_triton"):
    pytest.skip("trl 1.16 is the first whose head can do without Triton", allow_module_level=True)

# Triton reads it when it is imported, so that a process has its interpreter throughout, or not at all
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICES = ["interpreter"] if INTERPRETED else ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
# Below one block of the kernel; two blocks and one token more; several tiles, one token more; Qwen2.5's
VOCABULARIES = [265, 2049, *([] if INTERPRETED else [49152, 49153, pytest.param(151936, marks=pytest.mark.slow)])]
PRECISIONS = {
    "float32": (torch.float32, {}),
    "bf16 model": (torch.bfloat16, {}),
    "bf16 model, fp32 head": (torch.bfloat16, {"cast_lm_head_to_fp32": True}),
    "bf16 autocast": (torch.float32, {"bf16": True}),
    "bf16 model and autocast": (torch.bfloat16, {"bf16": True}),
}
# bfloat16 logits have 8 bits: where two ways of adding up round differently, as kinds of CPU do, a probability is off
# by some per cent; the mean error is far smaller, and a wrong scale would show in it
BF16_ERROR = 0.1


@pytest.fixture(params=DEVICES)
def device(request, monkeypatch):
    """By torch's name; the interpreter runs Triton's kernels on the CPU."""
    if request.param != "interpreter":
        return request.param
    for module in (chunked_logprob, trl_utils):
        monkeypatch.setattr(module, "_use_triton", lambda device: True)
    for tile in ("_forward_tile", "_backward_tile"):
        monkeypatch.delattr(chunked_logprob, tile)  # which take the kernels' place without Triton
    monkeypatch.setattr(trl_utils, "_CHUNKED_LOGPROB_CHUNK_SIZE", 1536)  # so that few tokens need several tiles
    return "cpu"


@pytest.mark.slow
@pytest.mark.skipif(INTERPRETED, reason="this is the process that it starts")
@pytest.mark.skipif(find_spec("triton") is None, reason="needs triton, which there is for Linux on x86-64")
def test_tests_hold_under_tritons_interpreter(tmp_path):
    command = [sys.executable, "-m", "pytest", "-q", "-n0", "-p", "no:cacheprovider", "-m", "not gpu"]
    command += ["--deselect", os.environ["PYTEST_CURRENT_TEST"].split(" ")[0], f"--basetemp={tmp_path / 'inner'}"]
    options = {"cwd": Path(__file__).parents[2], "env": {**os.environ, "TRITON_INTERPRET": "1"}}
    done = subprocess.run([*command, __file__], capture_output=True, text=True, **options)
    assert done.returncode == 0, done.stdout[-5000:]
    assert re.search(r"^\d+ passed, \d+ deselected", done.stdout, flags=re.MULTILINE), done.stdout[-500:]


@pytest.mark.gpu
def test_energies_come_from_triton():
    assert chunked_logprob._use_triton(torch.device("cuda")) and not chunked_logprob._use_triton(torch.device("cpu"))


@pytest.mark.parametrize("vocabulary", VOCABULARIES)
@pytest.mark.parametrize("precision", [*PRECISIONS][: 2 if INTERPRETED else None])
def test_energies_match_float64_softmax(device, precision, vocabulary, tmp_path):
    if device == "cpu" and vocabulary > 100_000:
        pytest.skip("takes a CPU a minute, and shows what 49,153 shows")
    dtype, options = PRECISIONS[precision]
    trainer = trainer_of(model_of("untied", vocabulary, dtype), tmp_path, use_cpu=device == "cpu", **options)
    assert trainer.accelerator.device.type == device
    actual, expected, mask = energies(trainer, vocabulary)
    assert actual.device.type == device and actual.dtype == torch.float32
    error = ((actual - expected) * mask).abs()
    rounded = precision not in ("float32", "bf16 model, fp32 head")
    most, mean = (BF16_ERROR, 5e-3) if rounded else (1e-4 if device == "cuda" else 1e-5, 1e-5)
    assert error.max() < most and error.sum() / mask.sum() < mean
    assert expected[mask.bool()].std() > 0.005  # energies that differ, so that a wrong scale would show
    assert (actual[mask == 0] == 0).all()


@pytest.mark.parametrize("head", HEADS)
def test_energies_of_every_kind_of_head(device, head, tmp_path):
    actual, expected, mask = energies(trainer_of(model_of(head, std=2.0), tmp_path, use_cpu=device == "cpu"))
    most = 1e-4 if device == "cuda" else 1e-5 if INTERPRETED else 2e-6
    torch.testing.assert_close(actual.double() * mask, expected * mask, atol=most, rtol=0)
    assert (actual[mask == 0] == 0).all()
    assert expected[mask.bool()].std() > 0.01  # energies that differ, so that a wrong scale would show


def test_masked_batch_has_no_energy(device, tmp_path):
    trainer = trainer_of(model_of(), tmp_path, use_cpu=device == "cpu")
    ids = torch.ones(2, 3, dtype=torch.long, device=trainer.accelerator.device)
    batch = {"prompt_ids": ids, "prompt_mask": ids, "completion_ids": ids, "completion_mask": ids * 0}
    energy = extra_forward(trainer, batch, False).energy
    assert energy.shape == (2, 3) and (energy == 0).all()


@pytest.mark.parametrize("options", [{}, *([] if INTERPRETED else [{"bf16": True}, {"peft_config": LORA}])])
def test_the_three_sources_agree(train, device, options):
    options = {"max_steps": 1, "use_cpu": device == "cpu", **options}
    trainers = {name: train(**options, **source) for name, source in SOURCES.items()}
    assert [t.energy_source for t in trainers.values()] == list(SOURCES)
    reference, *others = (t.rollouts["train"] for t in trainers.values())
    assert reference.energy.device.type == device and reference.energy[reference.mask.bool()].std() > 0.01
    most, mean, of_advantages = (BF16_ERROR, 1e-2, 5e-2) if "bf16" in options else (1e-5, 1e-5, 1e-4)
    for other in others:
        assert torch.equal(other.completion_ids, reference.completion_ids)
        error = ((other.energy - reference.energy) * reference.mask).abs()
        assert error.max() < most and error.sum() / reference.mask.sum() < mean
        assert (other.advantages - reference.advantages).abs().max() < of_advantages


def test_training_equals_that_of_torch_operations(train, device, monkeypatch):
    options = {**SGD, "max_steps": 1, "rollout_func": scripted_rollout, "entropy_coef": 0.01}
    trained = weights(train(use_cpu=device == "cpu", **options))
    monkeypatch.undo()
    for name, expected in weights(train(**options)).items():
        torch.testing.assert_close(trained[name].cpu(), expected, atol=1e-5, rtol=1e-4, msg=name)


def long_rollout(prompts, trainer):
    g = torch.Generator().manual_seed(0)
    length = trainer.args.max_completion_length
    ids = torch.randint(0, 256, (len(prompts), length), generator=g).tolist()
    return {"prompt_ids": [[1, 2, 3]] * len(prompts), "completion_ids": ids, "logprobs": None}


@pytest.mark.gpu
@pytest.mark.parametrize("iterations", [1, 2])
def test_no_logits_by_peak_memory(train, iterations):
    """
    (B, T, V) logits in float32 would take 4.6 GiB, a tile of TRL's head takes 0.5. On the CPU that head copies its
    tiles several times; test_energies_are_computed_once_a_rollout watches it there.
    """
    length, vocabulary = 1024, 151936
    model = {"model": model_of(vocabulary=vocabulary), "processing_class": tiny.tokenizer(), "use_cpu": False}
    options = {"max_completion_length": length, "num_iterations": iterations}
    trainer = train(train=False, rollout_func=long_rollout, **model, **options)
    gc.collect()
    before = torch.cuda.memory_allocated() / 2**20
    gc.collect()
    torch.cuda.reset_peak_memory_stats()
    trainer.train()
    assert torch.cuda.max_memory_allocated() / 2**20 - before < 0.5 * 8 * length * vocabulary * 4 / 2**20


@pytest.mark.gpu
@pytest.mark.parametrize("baseline", ["otb_loo", "value"])
def test_full_determinism(train, baseline):
    try:
        first, second = (train(use_cpu=False, full_determinism=True, baseline=baseline) for _ in range(2))
    finally:
        torch.use_deterministic_algorithms(False)
    assert_same_weights(first, second)
