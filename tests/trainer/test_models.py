"""Energies of many kinds of model, against a float64 softmax of each model's own logits."""

import pytest
import torch
from peft import LoraConfig
from transformers import (
    BitsAndBytesConfig,
    CohereConfig,
    CohereForCausalLM,
    Gemma2Config,
    Gemma2ForCausalLM,
    GPT2Config,
    GPT2LMHeadModel,
    GraniteConfig,
    GraniteForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

from tests.helpers import tiny
from tests.helpers.energies import energies, trainer_of


MODELS = {
    "untied": (Qwen3ForCausalLM, Qwen3Config, {}),
    "tied": (Qwen3ForCausalLM, Qwen3Config, {"tie_word_embeddings": True}),
    "llama": (LlamaForCausalLM, LlamaConfig, {}),
    "logits multiplied": (CohereForCausalLM, CohereConfig, {"logit_scale": 0.25}),
    "logits divided": (GraniteForCausalLM, GraniteConfig, {"logits_scaling": 4.0}),
    "soft-capped": (Gemma2ForCausalLM, Gemma2Config, {"final_logit_softcapping": 8.0}),
    "learned positions": (
        GPT2LMHeadModel,
        GPT2Config,
        {"n_embd": 32, "n_layer": 2, "n_head": 2, "resid_pdrop": 0, "embd_pdrop": 0, "attn_pdrop": 0},
    ),
    "mixture of experts": (
        Qwen3MoeForCausalLM,
        Qwen3MoeConfig,
        {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16},
    ),
}


@pytest.mark.parametrize("kind", MODELS)
def test_energies_of_every_kind_of_head(kind, tmp_path):
    model_class, config_class, changes = MODELS[kind]
    torch.manual_seed(0)
    model = model_class(tiny.config(config_class, **changes)).float()
    torch.nn.init.normal_(model.get_output_embeddings().weight, std=2.0)
    actual, expected, mask = energies(trainer_of(model, tmp_path))
    torch.testing.assert_close(actual.double() * mask, expected * mask, atol=2e-6, rtol=0)
    assert (actual[mask == 0] == 0).all()
    assert expected[mask.bool()].std() > 0.01  # energies that differ, so that a wrong scale would show


QUANTIZED = {
    "4 bits": {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4", "bnb_4bit_compute_dtype": torch.float32},
    "8 bits": {"load_in_8bit": True},
}


@pytest.mark.parametrize("baseline", ["otb", "value"])
@pytest.mark.parametrize("bits", QUANTIZED)
def test_quantized_models_train_adapters(bits, baseline, model_path, tmp_path):
    trainer = trainer_of(
        model_path,
        tmp_path,
        baseline=baseline,
        peft_config=LoraConfig(target_modules=["q_proj", "v_proj"]),
        quantization_config=BitsAndBytesConfig(**QUANTIZED[bits]),
    )
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
        trainer_of(
            model_path, tmp_path, peft_config=LoraConfig(target_modules=["q_proj"]), quantization_config=everything
        )
