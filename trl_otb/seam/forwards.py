"""Energies, log-probs and hidden states from forwards of the policy that run anyway, or from one more."""

import functools
import math
import types
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from accelerate.logging import get_logger
from torch import Tensor
from transformers import PreTrainedModel

from ..energy import token_energy
from .contract import FORWARD_KWARGS, trl_models, trl_utils
from .sampled import SampledTurn, SampledTurns, TokenValues


logger = get_logger(__name__)

NUMBERS = 32  # of a projected hidden state
DEPTH = 2 / 3  # of the layer whose states are recorded


@dataclass
class Forward:
    """
    A forward that scored completions.

    Args:
        logps (`torch.Tensor` of shape `(B, T)`):
            TRL's log-probs.
        log_sum_sq_probs (`list`):
            log Σπ² of each chunk of rows, `None` if the head did not compute it.
        states (`list`, *optional*):
            Hidden states of each chunk.
    """

    logps: Tensor
    log_sum_sq_probs: list[Tensor | None]
    states: list[Tensor] | None = None

    def values(self) -> TokenValues:
        """Energies, log-probs and states, without gradient."""
        chunks = [chunk for chunk in self.log_sum_sq_probs if chunk is not None]
        if not chunks or len(chunks) < len(self.log_sum_sq_probs):
            raise RuntimeError(
                "The policy's forward returned no log Σπ²: something replaced the fused LM head of the model after "
                "OTBGRPOTrainer was constructed. Construct the trainer last."
            )
        length, logps, states = self.logps.size(1), self.logps.detach(), None
        if self.states is not None:
            states = torch.cat([chunk[:, -length - 1 : -1] for chunk in self.states]).to(logps.device)
        with torch.no_grad():
            return TokenValues(token_energy(logps, torch.cat(chunks)[:, -length:]), logps, states)


@dataclass
class Recording:
    """What is recorded: scoring forwards without gradient, turns that are sampled, hidden states in both."""

    states: bool = False
    turns: SampledTurns | None = None
    forwards: list[Forward] = field(default_factory=list)
    on_logps: Callable[[Tensor], None] | None = None  # called with the log-probs of each scoring forward


class PolicyRecorder:
    """
    Records what forwards of the policy compute.

    GRPOTrainer's fused LM head returns ("log_probs", "entropy"). A second head, which also returns log Σπ², takes its
    place while a scoring forward is recorded; all other forwards use GRPOTrainer's.

    Args:
        policy (`PreTrainedModel`):
            The model without the PEFT wrapper.
        temperature (`float`):
            The sampling temperature.
        cast_lm_head_to_fp32 (`bool`):
            As in [`~trl.GRPOConfig`].

    Raises:
        ValueError: The LM head is quantized.
    """

    def __init__(self, policy: PreTrainedModel, temperature: float, cast_lm_head_to_fp32: bool) -> None:
        _check_lm_head(policy)
        self.policy, self.temperature = policy, temperature
        self.projection: Tensor | None = None  # kept in checkpoints: what a baseline learns depends on it
        self._recording: Recording | None = None
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
            # Called on `module`, which is another model where the policy was copied
            return (with_energies if self._with_energies else without).__func__(module, *args, **kwargs)

        policy.forward = types.MethodType(forward, policy)
        decoder = (policy.get_decoder() if hasattr(policy, "get_decoder") else None) or policy.base_model
        layers = _layers_of(decoder)
        self._layer = decoder if layers is None else layers[math.ceil(DEPTH * len(layers)) - 1]
        self._layer_name = f"{type(self._layer).__name__} of {type(decoder).__name__}"

    @contextmanager
    def recording(self, **what: Any) -> Iterator[Recording]:
        """Context in which forwards of the policy are recorded; `what` is as in [`Recording`]."""
        before, self._recording = self._recording, Recording(**what)
        try:
            yield self._recording
        finally:
            self._recording = before

    @contextmanager
    def scoring(self, model: torch.nn.Module) -> Iterator[Callable[[Tensor], None]]:
        """
        Context of a scoring forward of `model`, the policy with its wrappers or a reference; the yielded function takes
        its log-probs.
        """
        to = self._recording
        if to is None:
            yield lambda logps: None
            return
        if torch.is_grad_enabled():
            yield to.on_logps or (lambda logps: None)
            return
        found: list[Tensor | None] = []
        layers: list[Tensor] | None = [] if to.states else None
        hook = model.register_forward_hook(
            lambda module, args, outputs: found.append(getattr(outputs, "log_sum_sq_probs", None))
        )
        self._with_energies = True
        try:
            with self._recording_states(layers):
                yield lambda logps: to.forwards.append(Forward(logps, found, layers))
        finally:
            self._with_energies = False
            hook.remove()
        if layers:  # none of a reference model
            self._check_states(layers, len(found))

    @contextmanager
    def sampling(self) -> Iterator[Callable[[list[list[int]], list[list[int]]], None]]:
        """Context of one `generate` of the policy; the yielded function takes the ids of prompts and completions."""
        to = self._recording
        if to is None or to.turns is None:
            yield lambda prompt_ids, completion_ids: None
            return
        layers: list[Tensor] | None = [] if to.states else None
        turn = SampledTurn(self.temperature, layers)
        hook = self.policy.register_forward_hook(turn.on_forward, with_kwargs=True)

        def keep(prompt_ids: list[list[int]], completion_ids: list[list[int]]) -> None:
            if layers is not None:
                self._check_states(layers, turn.calls)
            to.turns.add(turn, prompt_ids, completion_ids)

        try:
            with self._recording_states(layers, last_only=True):
                yield keep
        finally:
            hook.remove()

    @contextmanager
    def _recording_states(self, found: list[Tensor] | None, last_only: bool = False) -> Iterator[None]:
        if found is None:
            yield
            return

        def record(module: Any, args: Any, output: Any) -> None:
            states = (output if isinstance(output, Tensor) else output[0]).detach()
            states = (states[:, -1:] if last_only and states.dim() == 3 else states).float()
            if self.projection is None or self.projection.size(0) != states.size(-1):
                self.projection = projection(states.size(-1))
            self.projection = self.projection.to(states.device)
            with torch.autocast(states.device.type, enabled=False):
                found.append(states @ self.projection)

        hook = self._layer.register_forward_hook(record)
        try:
            yield
        finally:
            hook.remove()

    def _check_states(self, found: list[Tensor], forwards: int) -> None:
        """
        Raises:
            ValueError: The layer was not called once in each forward, or returns no `(rows, tokens, d)`.
        """
        instead = "this model is not supported. Choose a baseline that needs no states, such as 'rloo_pooled'."
        if len(found) != forwards:
            raise ValueError(
                f"The baseline expected one call of {self._layer_name} per forward and saw {len(found)} calls in "
                f"{forwards} forwards: {instead}"
            )
        if odd := [tuple(states.shape) for states in found if states.dim() != 3]:
            raise ValueError(
                f"{self._layer_name} returned hidden states of shape {odd[0]}, projected to {odd[0][-1]} numbers, "
                f"instead of (rows, tokens, numbers): {instead}"
            )


def projection(size: int) -> Tensor:
    """`(size, k)` a fixed random projection of hidden states, float32."""
    random = torch.randn(
        size, min(size, NUMBERS), generator=torch.Generator().manual_seed(0), dtype=torch.float32, device="cpu"
    )
    return random / math.sqrt(size)


def _layers_of(decoder: Any) -> torch.nn.ModuleList | None:
    """The longest list of modules among the decoder's own."""
    lists = [child for child in decoder.children() if isinstance(child, torch.nn.ModuleList) and len(child)]
    return max(lists, key=len, default=None)


def _check_lm_head(model: PreTrainedModel) -> None:
    """The fused head multiplies by the LM head's weight directly, and TRL does not check for packed numbers."""
    head = model.get_output_embeddings()
    if not head.weight.is_floating_point():
        raise ValueError(
            f"The LM head of the policy is quantized (a {type(head).__name__} whose weight is {head.weight.dtype}). "
            "Its log-probs and energies would be wrong, since TRL's fused LM head reads the weight as stored. Do not "
            "quantize the head: `BitsAndBytesConfig(..., llm_int8_skip_modules=['lm_head'])`, also for 4 bits."
        )


def values_of_batch(trainer: Any, batch: dict[str, Any], mask: Tensor, recording: Recording) -> TokenValues | None:
    """
    The values of TRL's `batch` from where they cost least, as `trainer.energy_source` then says; `None` if nothing
    needs them.
    """
    source = values = None
    if (logps := batch.get("old_per_token_logps")) is not None:
        # By identity, so never those of a reference model
        own = next((forward for forward in recording.forwards if forward.logps is logps), None)
        if own is None:
            what = "the old log-probs of the rollout are not those that any forward of the policy returned"
            trainer.fail(what, "_get_per_token_logps_and_entropies", "_generate_and_score_completions")
        source, values = "the no-gradient forward that GRPOTrainer runs anyway", own.values()
    elif not trainer.needs_forward:
        return None
    elif recording.turns is not None:
        source, values = "the forwards that sampled", recording.turns.of_batch(batch, mask)
    missing = torch.tensor([values is None], device=mask.device)
    if trainer.accelerator.gather(missing).any():  # all processes take part in the forward
        source, values = "one extra no-gradient forward", extra_forward(trainer, batch, recording.states)
    if trainer.energy_source != source:
        trainer.energy_source = source
        logger.info(f"Energies come from {source}.")
    return values


def scores_anyway(trainer: Any) -> bool:
    """Whether GRPOTrainer itself scores a generation batch without gradient."""
    args = trainer.args
    reused = args.gradient_accumulation_steps % (args.steps_per_generation * args.num_iterations) != 0
    return reused or (trainer.use_vllm and args.vllm_importance_sampling_correction)


@torch.no_grad()
def extra_forward(trainer: Any, batch: dict[str, Any], states: bool) -> TokenValues:
    """The values of TRL's `batch` from one more no-gradient forward of the trainer's policy."""
    args = trainer.args
    checkpointing = trl_models.disable_gradient_checkpointing(trainer.model, args.gradient_checkpointing_kwargs)
    with checkpointing, trainer.recorder.recording(states=states) as recording:
        trainer._get_per_token_logps_and_entropies(
            trainer.model,
            input_ids=torch.cat([batch["prompt_ids"], batch["completion_ids"]], dim=1),
            attention_mask=torch.cat([batch["prompt_mask"], batch["completion_mask"]], dim=1),
            logits_to_keep=batch["completion_ids"].size(1),
            batch_size=min(args.per_device_train_batch_size, args.per_device_eval_batch_size),
            **{key: batch[key] for key in FORWARD_KWARGS if key in batch},
        )
    if not recording.forwards:
        trainer.fail("the forward that yields energies is not taken", "_get_per_token_logps_and_entropies")
    return recording.forwards[0].values()
