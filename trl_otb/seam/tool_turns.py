"""
A repair of TRL: tool turns that all processes take together. It can be removed once `GRPOTrainer._tool_call_loop` does
that, when the tests named `test_unequal_numbers_of_turns` pass without it.
"""

from collections.abc import Callable
from typing import Any

import torch
from trl import GRPOTrainer

from .older_trl import EMPTY_TURN


class CollectiveToolLoop(GRPOTrainer):
    """
    A [`~trl.GRPOTrainer`] whose processes may have unequal numbers of tool turns.

    If generating a turn involves all processes (ZeRO-3, FSDP2, a vLLM server, tensor-parallel vLLM), TRL lets a
    process without further calls continue. The processes then wait for each other in different places, or vLLM, which
    distributes completions in slices of equal length, returns those of another process. Here a process without calls
    idles through the turns of the others.
    """

    def _tool_call_loop(self, *args: Any, **kwargs: Any) -> Any:
        result = super()._tool_call_loop(*args, **kwargs)
        if _turns_are_collective(self):
            while together(self, super()._generate_single_turn, *EMPTY_TURN) is not None:
                pass
        return result

    def _generate_single_turn(self, *args: Any, **kwargs: Any) -> Any:
        generate = super()._generate_single_turn
        if self.tools and _turns_are_collective(self):
            return together(self, generate, *args, **kwargs)
        return generate(*args, **kwargs)


def _turns_are_collective(trainer: GRPOTrainer) -> bool:
    if trainer.accelerator.num_processes == 1:
        return False
    if trainer.use_vllm:
        return trainer.vllm_mode == "server" or trainer.vllm_tensor_parallel_size > 1
    deepspeed = trainer.accelerator.state.deepspeed_plugin
    return trainer.is_fsdp_enabled or (deepspeed is not None and deepspeed.zero_stage == 3)


def together(trainer: GRPOTrainer, generate: Callable, prompt_ids: Any, images: Any, *args: Any, **kwargs: Any) -> Any:
    """A turn of all processes, in which those without prompts idle; None if no process has prompts."""
    rows = len(prompt_ids)
    most = trainer.accelerator.gather(torch.tensor([rows], device=trainer.accelerator.device)).max().item()
    if most == 0:
        return None
    idle = most - rows if trainer.use_vllm else int(rows == 0)  # vLLM's slices are of equal length on every process
    prompt_ids = prompt_ids + [[trainer._tokenizer.eos_token_id]] * idle
    images = None if images is None else images + [None] * idle
    ids, logprobs = generate(prompt_ids, images, *args, **kwargs)
    return ids[:rows], None if logprobs is None else logprobs[:rows]
