"""Σπ² from TRL's own fused LM head, in the forwards that TRL runs anyway, without (B, T, V) logits."""

import functools
import types
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from transformers import PreTrainedModel

from ..energy import token_energy
from .contract import trl_utils
from .states import StateRecorder


@dataclass
class Forward:
    """
    A forward that scored completions.

    Args:
        logps (`torch.Tensor` of shape `(B, T)`):
            TRL's log-probs.
        log_sum_sq_probs (`list`):
            log Σπ² of each chunk of rows, `None` if the head did not compute it.
        state_chunks (`list`):
            Hidden states of each chunk, if recorded.
        recorder ([`StateRecorder`], *optional*):
            The recorder of these states.
    """

    logps: torch.Tensor
    log_sum_sq_probs: list[torch.Tensor | None]
    state_chunks: list[torch.Tensor] = field(default_factory=list)
    recorder: StateRecorder | None = None

    def states(self) -> torch.Tensor | None:
        """`(B, T, k)` states at the positions that predict the completions' tokens; `None` if not recorded."""
        if self.recorder is None:
            return None
        self.recorder.check(self.state_chunks, len(self.log_sum_sq_probs))
        length = self.logps.size(1)
        return torch.cat([chunk[:, -length - 1 : -1] for chunk in self.state_chunks]).to(self.logps.device)

    def energy(self) -> torch.Tensor:
        """`(B, T)` w_t, without gradient."""
        chunks = [chunk for chunk in self.log_sum_sq_probs if chunk is not None]
        if not chunks or len(chunks) < len(self.log_sum_sq_probs):
            raise RuntimeError(
                "The policy's forward returned no log Σπ²: something replaced the fused LM head of the model after "
                "OTBGRPOTrainer was constructed. Construct the trainer last."
            )
        length = self.logps.size(1)
        with torch.no_grad():
            return token_energy(self.logps.detach(), torch.cat(chunks)[:, -length:])


class EnergyHead:
    """
    A fused LM head that also computes log Σπ² while forwards are recorded.

    GRPOTrainer's own head returns ("log_probs", "entropy"). This one replaces it while a forward is recorded; all
    other forwards use GRPOTrainer's.

    Raises:
        ValueError: The LM head is quantized.
    """

    def __init__(self, policy: PreTrainedModel, temperature: float, cast_lm_head_to_fp32: bool) -> None:
        _check_lm_head(policy)
        self.on_forward: Callable[[Forward], None] | None = None
        self._with_energies = False
        without = policy.forward
        trl_utils.add_fused_lm_head(
            policy,
            temperature=temperature,
            cast_lm_head_to_fp32=cast_lm_head_to_fp32,
            outputs=("log_probs", "entropy", "log_sum_sq_probs"),
        )
        with_energies = policy.forward

        @functools.wraps(type(policy).forward)  # `generate` validates its arguments against the signature
        def forward(module: Any, *args: Any, **kwargs: Any) -> Any:
            return (with_energies if self._with_energies else without)(*args, **kwargs)

        policy.forward = types.MethodType(forward, policy)

    @contextmanager
    def recording_forwards(self, on_forward: Callable[[Forward], None]) -> Iterator[None]:
        """Context in which `on_forward` receives every forward that scores completions, right after it has run."""
        self.on_forward = on_forward
        try:
            yield
        finally:
            self.on_forward = None

    @contextmanager
    def energies_of_calls(self, model: torch.nn.Module) -> Iterator[list[torch.Tensor | None]]:
        """Context in which calls of `model`, the policy with its wrappers, append to the yielded list."""
        log_sum_sq_probs: list[torch.Tensor | None] = []
        hook = model.register_forward_hook(
            lambda module, args, outputs: log_sum_sq_probs.append(getattr(outputs, "log_sum_sq_probs", None))
        )
        self._with_energies = True
        try:
            yield log_sum_sq_probs
        finally:
            self._with_energies = False
            hook.remove()


def _check_lm_head(model: PreTrainedModel) -> None:
    """
    The fused head multiplies by the LM head's weight directly, and TRL does not check for packed numbers.
    """
    head = model.get_output_embeddings()
    if not head.weight.is_floating_point():
        raise ValueError(
            f"The LM head of the policy is quantized (a {type(head).__name__} whose weight is {head.weight.dtype}). "
            "Its log-probs and energies would be wrong, since TRL's fused LM head reads the weight as stored. Do not "
            "quantize the head: `BitsAndBytesConfig(..., llm_int8_skip_modules=['lm_head'])`, also for 4 bits."
        )
