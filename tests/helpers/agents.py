"""Scripted agents: one group of eight completions of several turns, and the double loop of what they should get."""

import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM

from tests.helpers.oracles import double_loop, energies_by_softmax, mask_of


CHAT = Dataset.from_dict({"prompt": [[{"role": "user", "content": f"{i}+3?"}] for i in range(8)]})
AGENT = {
    "train_dataset": CHAT,
    "num_generations": 8,
    "max_completion_length": 400,
    "generation_kwargs": {"max_new_tokens": 2},  # what is sampled is replaced
    "learning_rate": 0.0,
    "max_steps": 1,
}


def by_length(completion_ids, **kwargs):
    return [len(ids) % 7 / 7 for ids in completion_ids]


def rewards_of(batch):
    return [
        len(row) % 7 / 7
        for row in (ids[m] for ids, m in zip(batch["completion_ids"], batch["completion_mask"].bool(), strict=True))
    ]


def assert_is_double_loop(batch, rewards, model_path, **options):
    model = AutoModelForCausalLM.from_pretrained(model_path, dtype=torch.float32)
    energy = energies_by_softmax(model, batch)
    mask = mask_of(batch)
    expected = double_loop(rewards, energy.tolist(), mask.tolist(), 8, **options)
    actual = batch["advantages"]
    actual = actual.unsqueeze(1) * mask if actual.dim() == 1 else actual
    torch.testing.assert_close(actual.double(), expected.double(), atol=2e-5, rtol=0)
    assert actual.abs().max() > 0.01
