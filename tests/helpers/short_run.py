"""
Two steps of a run, as one of many processes may see them.

Prints what the trainer raised, or the gradient norms of its steps and, after `warned:`, each warning of this package.
"""

import logging
import sys
from unittest.mock import patch

from tests.helpers import tiny


def synchronous(kind, model, folder):
    from trl.trainer import grpo_trainer

    from tests.helpers.agents import CHAT
    from tests.helpers.recording import Sampler
    from tests.helpers.scripted import TOOLS
    from trl_otb import OTBGRPOConfig, OTBGRPOTrainer

    options = {
        "reused": {"num_iterations": 2},
        "vllm": {"use_vllm": True, "vllm_mode": "colocate"},
        "tools": {"generation_kwargs": {"max_new_tokens": 2}},
    }.get(kind, {})
    baseline = "rloo" if kind == "rloo" else "value"
    args = OTBGRPOConfig(**tiny.SETTINGS | options, output_dir=folder, baseline=baseline, scale_rewards="none")
    more = {"tools": TOOLS, "train_dataset": CHAT} if kind == "tools" else {"train_dataset": tiny.prompts()}
    with patch.object(grpo_trainer, "VLLMGeneration", Sampler):
        trainer = OTBGRPOTrainer(model, tiny.even_bytes, args=args, **more)
        trainer.train()
    return trainer


def asynchronous(model, folder):
    from recipes.toy.local_rollouts import LocalWorker, on_cpu
    from tests.helpers.agents import CHAT
    from trl_otb import AsyncOTBGRPOConfig, AsyncOTBGRPOTrainer

    options = {"token_budget": 0, "max_completion_length": 12, "max_staleness": 0, "scale_rewards": "none"}
    args, tokenizer = AsyncOTBGRPOConfig(**tiny.SETTINGS | options, output_dir=folder), tiny.tokenizer()
    with on_cpu():
        worker = LocalWorker(model, args, CHAT, [tiny.even_bytes], tokenizer)
        data = {"train_dataset": CHAT, "rollout_worker": worker, "weight_transfer": worker}
        trainer = AsyncOTBGRPOTrainer(model, args=args, processing_class=tokenizer, **data)
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
