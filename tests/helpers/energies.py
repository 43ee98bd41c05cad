"""Energies as a trainer gets them, and by a float64 softmax of its model's own logits."""

from functools import partial

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from tests.helpers import tiny
from tests.helpers.oracles import energies_by_softmax
from trl_otb import OTBGRPOConfig, OTBGRPOTrainer
from trl_otb.seam.forwards import extra_forward


GPT2 = {"n_embd": 32, "n_layer": 2, "n_head": 2, "resid_pdrop": 0, "embd_pdrop": 0, "attn_pdrop": 0}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
HEADS = {
    "untied": ("qwen3", {}),
    "tied": ("qwen3", {"tie_word_embeddings": True}),
    "llama": ("llama", {}),
    "logits multiplied": ("cohere", {"logit_scale": 0.25}),
    "logits divided": ("granite", {"logits_scaling": 4.0}),
    "soft-capped": ("gemma2", {"final_logit_softcapping": 8.0}),
    "learned positions": ("gpt2", GPT2),
    "mixture of experts": ("qwen3_moe", EXPERTS),
}


def model_of(head="untied", vocabulary=265, dtype=torch.float32, std=0.5):
    torch.manual_seed(0)
    kind, changes = HEADS[head]
    config = tiny.config(partial(AutoConfig.for_model, kind), vocab_size=vocabulary, **changes)
    model = AutoModelForCausalLM.from_config(config).to(dtype)
    torch.nn.init.normal_(model.get_output_embeddings().weight, std=std)
    return model


def trainer_of(model, tmp_path, peft_config=None, quantization_config=None, **options):
    args = OTBGRPOConfig(**{**tiny.SETTINGS, "output_dir": str(tmp_path), "temperature": 0.7, **options})
    data = {"train_dataset": tiny.prompts(), "processing_class": tiny.tokenizer()}
    adapted = {"peft_config": peft_config, "quantization_config": quantization_config}
    trainer = OTBGRPOTrainer(model, tiny.even_bytes, args=args, **data, **adapted)
    trainer.model.train()
    return trainer


def energies(trainer, vocabulary=256):
    """(energy of the trainer's extra forward, energy by a float64 softmax of materialised logits, mask)"""
    g = torch.Generator().manual_seed(0)
    batch = {
        "prompt_ids": torch.randint(0, 256, (6, 5), generator=g),
        "prompt_mask": (torch.arange(5) >= torch.tensor([[0], [0], [2], [3], [0], [4]])).long(),
        "completion_ids": torch.randint(0, vocabulary, (6, 20), generator=g),
        "completion_mask": (torch.arange(20) < torch.tensor([[20], [1], [7], [20], [0], [13]])).long(),
    }
    batch = {key: value.to(trainer.accelerator.device) for key, value in batch.items()}
    actual = extra_forward(trainer, batch, False).energy
    return actual, energies_by_softmax(trainer.model, batch, 0.7), batch["completion_mask"]
