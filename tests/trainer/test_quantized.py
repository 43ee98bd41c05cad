"""Quantized models: adapters train on energies of the model's own logits, and a quantized head is refused."""

import pytest
import torch
from peft import LoraConfig
from transformers import BitsAndBytesConfig

from tests.helpers.energies import energies, trainer_of


QUANTIZED = {
    "4 bits": {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4", "bnb_4bit_compute_dtype": torch.float32},
    "8 bits": {"load_in_8bit": True},
}


@pytest.mark.parametrize("baseline", ["otb", "value"])
@pytest.mark.parametrize("bits", QUANTIZED)
def test_quantized_models_train_adapters(bits, baseline, model_path, tmp_path):
    adapter, quantized = LoraConfig(target_modules=["q_proj", "v_proj"]), BitsAndBytesConfig(**QUANTIZED[bits])
    trainer = trainer_of(model_path, tmp_path, adapter, quantized, baseline=baseline)
    assert {p.dtype for p in trainer.model.parameters()} & {torch.uint8, torch.int8}
    trainer.train()
    assert trainer.state.log_history[0]["grad_norm"] > 0
    trainer.model.train()
    actual, expected, mask = energies(trainer)
    torch.testing.assert_close(actual.double() * mask, expected * mask, atol=2e-6, rtol=0)


@pytest.mark.parametrize("bits", QUANTIZED)
def test_a_quantized_head_is_refused(bits, model_path, tmp_path):
    everything = BitsAndBytesConfig(**QUANTIZED[bits], llm_int8_skip_modules=["nothing"])
    with pytest.raises(ValueError, match=r"LM head .* is quantized .* llm_int8_skip_modules=\['lm_head'\]"):
        trainer_of(model_path, tmp_path, LoraConfig(target_modules=["q_proj"]), everything)
