"""
What runs otherwise on a GPU: TRL's Triton head, bfloat16 products, peak memory. `pytest -m gpu`, or `make gpu`.

All but memory is tested on the CPU too, where TRL's head is made of torch operations.
"""

import gc

import pytest
import torch
from transformers import Qwen3ForCausalLM
from trl.kernels import chunked_logprob

from recipes.benchmarks.step import peak, reset_peak
from tests.helpers import tiny
from tests.helpers.energies import energies, trainer_of
from tests.helpers.settings import LORA, SOURCES, scripted_rollout


GPU = pytest.param("cuda", marks=pytest.mark.gpu)
DEVICES = ["cpu", GPU]
PRECISIONS = {
    "float32": (torch.float32, {}),
    "bf16 model": (torch.bfloat16, {}),
    "bf16 model, fp32 head": (torch.bfloat16, {"cast_lm_head_to_fp32": True}),
    "bf16 autocast": (torch.float32, {"bf16": True}),
    "bf16 model and autocast": (torch.bfloat16, {"bf16": True}),
}


def wide_model(vocabulary, dtype=torch.float32, seed=0):
    torch.manual_seed(seed)
    model = Qwen3ForCausalLM(tiny.config(vocab_size=vocabulary)).to(dtype)
    torch.nn.init.normal_(model.get_output_embeddings().weight, std=0.5)
    return model


@pytest.mark.gpu
def test_energies_come_from_triton():
    assert chunked_logprob._use_triton(torch.device("cuda")) and not chunked_logprob._use_triton(torch.device("cpu"))


# Below one block of the kernel, several tiles of it, one token more than a whole number of blocks; Qwen2.5's
@pytest.mark.parametrize("vocabulary", [265, 49152, 49153, pytest.param(151936, marks=pytest.mark.slow)])
@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("device", DEVICES)
def test_energies_are_those_of_a_float64_softmax(device, precision, vocabulary, tmp_path):
    if device == "cpu" and vocabulary > 100_000:
        pytest.skip("takes a CPU a minute, and shows what 49,153 shows")
    dtype, options = PRECISIONS[precision]
    trainer = trainer_of(wide_model(vocabulary, dtype), tmp_path, use_cpu=device == "cpu", **options)
    assert trainer.accelerator.device.type == device
    actual, expected, mask = energies(trainer, vocabulary)
    assert actual.device.type == device and actual.dtype == torch.float32
    error = ((actual - expected) * mask).abs()
    # bfloat16 logits have 8 bits: where two ways of adding up round differently, a probability is off by some per cent
    rounded = precision not in ("float32", "bf16 model, fp32 head")
    assert error.max() < (0.1 if rounded else 1e-4 if device == "cuda" else 1e-5)
    assert error.sum() / mask.sum() < (5e-3 if rounded else 1e-5)
    assert expected[mask.bool()].std() > 0.005  # energies that differ, so that a wrong scale would show
    assert (actual[mask == 0] == 0).all()


@pytest.mark.parametrize("options", [{}, {"bf16": True}, {"peft_config": LORA}], ids=["float32", "bf16", "lora"])
@pytest.mark.parametrize("device", DEVICES)
def test_the_three_sources_agree(train, device, options):
    options = {"max_steps": 1, "rollout_func": scripted_rollout, "use_cpu": device == "cpu", **options}
    trainers = {name: train(**{**options, **source}) for name, source in SOURCES.items()}
    assert [t.energy_source for t in trainers.values()] == list(SOURCES)
    reference, *others = (t.rollouts["train"] for t in trainers.values())
    assert reference.energy.device.type == device and reference.energy[reference.mask.bool()].std() > 0.01
    energy, advantages = (2e-2, 5e-2) if "bf16" in options else (1e-5, 1e-4)
    for other in others:
        assert torch.equal(other.completion_ids, reference.completion_ids)
        differences = (other.energy - reference.energy) * reference.mask
        assert differences.abs().max() < energy
        assert (other.advantages - reference.advantages).abs().max() < advantages


def long_rollout(prompts, trainer):
    g = torch.Generator().manual_seed(0)
    length = trainer.args.max_completion_length
    ids = torch.randint(0, 256, (len(prompts), length), generator=g).tolist()
    return {"prompt_ids": [[1, 2, 3]] * len(prompts), "completion_ids": ids, "logprobs": None}


@pytest.mark.gpu
@pytest.mark.parametrize("source", SOURCES)
def test_no_logits_by_peak_memory(train, source):
    """
    (B, T, V) logits in float32 would take 4.6 GiB, a tile of TRL's head takes 0.5. On the CPU that head copies its
    tiles several times; test_logits_are_never_materialised watches it there.
    """
    length, vocabulary = 1024, 151936
    trainer = train(
        model=wide_model(vocabulary),
        processing_class=tiny.tokenizer(),
        train=False,
        rollout_func=long_rollout,
        max_completion_length=length,
        use_cpu=False,
        **SOURCES[source],
    )
    gc.collect()
    before = torch.cuda.memory_allocated() / 2**20
    reset_peak(on_gpu=True)
    trainer.train()
    assert peak(on_gpu=True) - before < 0.5 * 8 * length * vocabulary * 4 / 2**20
