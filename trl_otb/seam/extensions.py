"""What GRPOTrainer lacks: a loss for advantages per token, and tool turns that all processes take together."""

from functools import partial
from typing import Any
from unittest.mock import patch

import torch
from trl import GRPOTrainer

from ..rollout import generated_mask


class TokenLoss(GRPOTrainer):
    """
    A [`~trl.GRPOTrainer`] whose loss takes one advantage per token, `(B, T)`, with all of its options.

    GSPO (`importance_sampling_level="sequence"`) weights a completion by s = exp(mean_t log π(y_t)/π_old(y_t)), one
    ratio for all tokens, so every token gets the completion's advantage. GSPO-token (https://arxiv.org/abs/2507.18071,
    section 4.3) uses sg[s] · π(y_t) / sg[π(y_t)], where sg stops the gradient: its value is s, its gradient the
    token's own. With one advantage per completion the two have the same gradient. TRL's loss with ratios per token
    computes this if the old log-probs are sg[log π(y_t)] − log s.
    """

    def _compute_loss(self, model: Any, inputs: dict[str, Any]) -> torch.Tensor:
        if self.importance_sampling_level != "sequence" or inputs["advantages"].dim() == 1:
            return super()._compute_loss(model, inputs)
        inputs = dict(inputs)  # the micro-batch is used again
        spread = partial(_spread_sequence_ratio, inputs)
        with self.recorder.recording(on_logps=spread), patch.object(self, "importance_sampling_level", "token"):
            return super()._compute_loss(model, inputs)

    # Both use the sign of a completion's advantage, so they get one advantage per completion

    @classmethod
    def get_off_policy_mask(
        cls, advantages: torch.Tensor, per_token_logps: torch.Tensor, *args: Any, **kwargs: Any
    ) -> torch.Tensor:
        mask = kwargs["mask"] if "mask" in kwargs else args[1]
        return super().get_off_policy_mask(_completion_advantage(advantages, mask), per_token_logps, *args, **kwargs)

    @classmethod
    def get_gamma_weights(
        cls, advantages: torch.Tensor, log_ratio_per_token: torch.Tensor, mask: torch.Tensor, *args: Any, **kwargs: Any
    ) -> torch.Tensor:
        advantages = _completion_advantage(advantages, mask)
        return super().get_gamma_weights(advantages, log_ratio_per_token, mask, *args, **kwargs)


class CollectiveToolLoop(GRPOTrainer):
    """
    A [`~trl.GRPOTrainer`] whose processes may have unequal numbers of tool turns.

    If generating a turn involves all processes (ZeRO-3, FSDP2, a vLLM server, tensor-parallel vLLM), TRL 1.16 lets a
    process without further calls continue. The processes then wait for each other in different places, or vLLM, which
    distributes completions in slices of equal length, returns those of another process. Here a process without calls
    idles through the turns of the others.

    This class can be removed once `GRPOTrainer._tool_call_loop` keeps the processes together, that is, when the tests
    `test_unequal_numbers_of_turns` pass without it. `_tool_call_loop` in
    https://github.com/huggingface/trl/blob/v1.16.0/trl/trainer/grpo_trainer.py is where TRL would have to change.
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
        own = len(prompt_ids)
        most = self.accelerator.gather(torch.tensor([own], device=self.accelerator.device)).max().item()
        if most == 0:
            return None
        idle = most - own if self.use_vllm else int(own == 0)  # vLLM's slices are of equal length on every process
        prompt_ids = prompt_ids + [[self._tokenizer.eos_token_id]] * idle
        images = None if images is None else images + [None] * idle
        rows = (prompt_ids, images, multimodal_fields, num_generations)
        ids, logprobs = super()._generate_single_turn(*rows, *args, **kwargs)
        return ids[:own], None if logprobs is None else logprobs[:own]


def _spread_sequence_ratio(inputs: dict[str, Any], logps: torch.Tensor) -> None:
    """Set the micro-batch's old log-probs so that each token's ratio is its sequence's."""
    old_logps = inputs.get("old_per_token_logps")
    if old_logps is None:  # on-policy: all ratios are 1
        return
    mask, logps = generated_mask(inputs), logps.detach()
    log_ratio = ((logps - old_logps) * mask).sum(-1, keepdim=True) / mask.sum(-1, keepdim=True).clamp(min=1)
    inputs["old_per_token_logps"] = logps - log_ratio


def _completion_advantage(advantages: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """(B, 1) mean advantage of a completion's generated tokens."""
    return (advantages * mask).sum(dim=1, keepdim=True) / mask.sum(dim=1, keepdim=True).clamp(min=1)
