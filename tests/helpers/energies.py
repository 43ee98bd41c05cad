"""Energies as a trainer gets them, and by a float64 softmax of its model's own logits."""

import torch

from tests.helpers import tiny
from tests.helpers.oracles import energies_by_softmax
from trl_otb import OTBGRPOConfig, OTBGRPOTrainer
from trl_otb.seam.forwards import extra_forward


def trainer_of(model, tmp_path, peft_config=None, quantization_config=None, **options):
    args = OTBGRPOConfig(**{**tiny.SETTINGS, "output_dir": str(tmp_path), "temperature": 0.7, **options})
    trainer = OTBGRPOTrainer(
        model,
        tiny.even_bytes,
        args=args,
        train_dataset=tiny.prompts(),
        processing_class=tiny.tokenizer(),
        peft_config=peft_config,
        quantization_config=quantization_config,
    )
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
    actual = extra_forward(trainer, batch, False, trainer.recorder).energy
    return actual, energies_by_softmax(trainer.model, batch, 0.7), batch["completion_mask"]
