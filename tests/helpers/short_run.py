"""
Two steps of a run, as one of many processes may see them: `python -m tests.helpers.short_run KIND MODEL FOLDER`.

Prints what the trainer raised, or the gradient norms of its steps and, after `warned:`, each warning of this package.
"""

import logging
import sys
from unittest.mock import patch

from tests.helpers import tiny


def synchronous(kind, model, folder):
    import torch
    from trl import trainer as trl_trainer

    from tests.helpers.scripted import TOOLS
    from trl_otb import OTBGRPOConfig, OTBGRPOTrainer

    class Sampler:
        """Stands for TRL's vLLM."""

        def __init__(self, **options):
            self.model = options["model"]

        def sync_weights(self):
            pass

        def generate(self, prompts, **options):
            generator = torch.Generator().manual_seed(0)
            ids = torch.randint(0, 256, (len(prompts), 6), generator=generator).tolist()
            return None, ids, [[[-5.0 - i % 2] for i in range(6)] for _ in prompts], None

    options = {
        "vllm": {"use_vllm": True, "vllm_mode": "colocate"},
        "reused": {"num_iterations": 2},
        "tools": {"generation_kwargs": {"max_new_tokens": 2}},
    }.get(kind, {})
    baseline = kind if kind in ("otb", "value", "rloo", "group_mean") else "value"
    args = OTBGRPOConfig(**tiny.SETTINGS | options, output_dir=folder, baseline=baseline, scale_rewards="none")
    more = {"tools": TOOLS} if kind == "tools" else {}
    with patch.object(trl_trainer.grpo_trainer, "VLLMGeneration", Sampler):
        with patch.object(trl_trainer.grpo_trainer, "is_vllm_available", lambda **options: True, create=True):
            trainer = OTBGRPOTrainer(model, tiny.even_bytes, args=args, train_dataset=data(kind == "tools"), **more)
            trainer.train()
    return trainer


def data(conversations):
    from datasets import Dataset

    prompts = [[{"role": "user", "content": f"{i}+3?"}] for i in range(8)]
    return Dataset.from_dict({"prompt": prompts}) if conversations else tiny.prompts()


def asynchronous(model, folder):
    from recipes.toy.local_rollouts import LocalWorker, on_cpu
    from trl_otb import AsyncOTBGRPOConfig, AsyncOTBGRPOTrainer

    options = {"token_budget": 0, "max_completion_length": 12, "max_staleness": 0, "scale_rewards": "none"}
    args, tokenizer = AsyncOTBGRPOConfig(**tiny.SETTINGS | options, output_dir=folder), tiny.tokenizer()

    def reward(completion_ids, **kwargs):
        return tiny.even_bytes(completion_ids)

    with on_cpu():
        worker = LocalWorker(model, args, data(True), [reward], tokenizer)
        trainer = AsyncOTBGRPOTrainer(
            model, args=args, train_dataset=data(True), processing_class=tokenizer, rollout_worker=worker,
            weight_transfer=worker,
        )  # fmt: skip
        trainer.train()
    return trainer


def main(kind, model, folder):
    warnings = []
    handler = logging.Handler()
    handler.emit = lambda record: warnings.append(record.getMessage())
    logging.getLogger("trl_otb").addHandler(handler)
    try:
        trainer = asynchronous(model, folder) if kind == "async" else synchronous(kind, model, folder)
    except Exception as error:
        print(f"{type(error).__name__}: {error}")
    else:
        print("trained:", [entry["grad_norm"] for entry in trainer.state.log_history if "grad_norm" in entry])
    for warning in warnings:
        print(f"warned: {warning}")


if __name__ == "__main__":
    main(*sys.argv[1:])
