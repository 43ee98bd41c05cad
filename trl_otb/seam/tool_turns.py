"""
A repair of TRL: tool turns that all processes take together. It can be removed once `GRPOTrainer._tool_call_loop` does
that, when the tests named `test_unequal_numbers_of_turns` pass without it.
"""

from typing import Any

import torch
from trl import GRPOTrainer


class CollectiveToolLoop(GRPOTrainer):
    """
    A [`~trl.GRPOTrainer`] whose processes may have unequal numbers of tool turns.

    If generating a turn involves all processes (ZeRO-3, FSDP2, a vLLM server, tensor-parallel vLLM), TRL 1.16 lets a
    process without further calls continue. The processes then wait for each other in different places, or vLLM, which
    distributes completions in slices of equal length, returns those of another process. Here a process without calls
    idles through the turns of the others.
    """

    def _tool_call_loop(self, *args: Any, **kwargs: Any) -> Any:
        result = super()._tool_call_loop(*args, **kwargs)
        if self._turns_are_collective():
            while self._generate_together([], None, {}) is not None:
                pass
        return result

    def _generate_single_turn(
        self, prompt_ids: Any, images: Any, multimodal_fields: Any, num_generations: int, *args: Any, **kwargs: Any
    ) -> Any:
        if self.tools and self._turns_are_collective():
            return self._generate_together(prompt_ids, images, multimodal_fields, num_generations, *args, **kwargs)
        return super()._generate_single_turn(prompt_ids, images, multimodal_fields, num_generations, *args, **kwargs)

    def _turns_are_collective(self) -> bool:
        if self.accelerator.num_processes == 1:
            return False
        if self.use_vllm:
            return self.vllm_mode == "server" or self.vllm_tensor_parallel_size > 1
        deepspeed = self.accelerator.state.deepspeed_plugin
        return self.is_fsdp_enabled or (deepspeed is not None and deepspeed.zero_stage == 3)

    def _generate_together(
        self, prompt_ids: Any, images: Any, multimodal_fields: Any, num_generations: int = 1, *args: Any, **kwargs: Any
    ) -> Any:
        """A turn of all processes, in which those without prompts idle; None if no process has prompts."""
        rows = len(prompt_ids)
        most = self.accelerator.gather(torch.tensor([rows], device=self.accelerator.device)).max().item()
        if most == 0:
            return None
        idle = most - rows if self.use_vllm else int(rows == 0)  # vLLM's slices are of equal length on every process
        prompt_ids = prompt_ids + [[self._tokenizer.eos_token_id]] * idle
        images = None if images is None else images + [None] * idle
        turn = (prompt_ids, images, multimodal_fields, num_generations)
        ids, logprobs = super()._generate_single_turn(*turn, *args, **kwargs)
        return ids[:rows], None if logprobs is None else logprobs[:rows]
