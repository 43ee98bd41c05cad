"""Energies, log-probs and hidden states from forwards of the policy that run anyway, or from one more."""

import functools
import inspect
import math
import types
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any
from unittest.mock import patch

import torch
from accelerate.logging import get_logger
from accelerate.utils import is_peft_model
from torch import Tensor
from transformers import PreTrainedModel
from transformers.generation import TemperatureLogitsWarper
from trl import GRPOTrainer

from ..baselines.prefix import projection, state_layer
from ..energy import TokenValues, token_energy
from .contract import trl_models
from .older_trl import add_fused_lm_head, call_on, scoring_method
from .sampled import SampledTurn, SampledTurns
from .subclasses import contract_broken


logger = get_logger(__name__)

SAMPLED = "the forwards that sampled"  # sources of energies
EXTRA = "one extra no-gradient forward"
BY_CONFIG = ", as by a generation config"


@dataclass
class Recording:
    """What is recorded: scoring forwards without gradient, turns that are sampled, hidden states in both."""

    needed: bool = True
    states: bool = False
    turns: SampledTurns | None = None
    values: list[TokenValues] = field(default_factory=list)  # with the log-probs that TRL got
    processor: str | None = None  # what made `generate` sample from another distribution than energies are of, and why

    def lack_states(self, values: TokenValues) -> bool:
        """Whether values have no states, and are to."""
        return self.states and values.states is None


def policy_of(model: Any) -> PreTrainedModel:
    """The model without the PEFT wrapper."""
    return model.get_base_model() if is_peft_model(model) else model


class PolicyRecorder:
    """
    Records what forwards of the policy, the model without the PEFT wrapper, compute. While a scoring forward is
    recorded, a fused LM head that also returns log Σπ² takes the place of GRPOTrainer's. A `ValueError` is raised if
    the LM head is quantized.
    """

    def __init__(self, model: Any, temperature: float, cast_lm_head_to_fp32: bool) -> None:
        policy = policy_of(model)
        head = policy.get_output_embeddings()
        if not head.weight.is_floating_point():  # TRL's fused head multiplies by the weight as it is stored
            raise ValueError(
                f"The LM head of the policy is quantized (a {type(head).__name__} of {head.weight.dtype}), "
                "and TRL's fused head would read it as stored: log-probs would be wrong. Do not quantize it: "
                "`BitsAndBytesConfig(..., llm_int8_skip_modules=['lm_head'])`, also for 4 bits."
            )
        self.policy, self.temperature = policy, temperature
        self.projection: Tensor | None = None  # kept in checkpoints: what a baseline learns depends on it
        self._recording: Recording | None = None
        policy.trl_otb_energies, without = False, policy.forward  # of the policy, as several trainers may share it
        outputs = ("log_probs", "entropy", "log_sum_sq_probs")
        add_fused_lm_head(policy, temperature, cast_lm_head_to_fp32, outputs)
        with_energies = policy.forward

        @functools.wraps(type(policy).forward)  # `generate` validates its arguments against the signature
        def forward(module: Any, *args: Any, **kwargs: Any) -> Any:
            # Called on `module`, which is another model where the policy was copied
            return call_on(module, with_energies if module.trl_otb_energies else without, *args, **kwargs)

        policy.forward = types.MethodType(forward, policy)
        decoder = (policy.get_decoder() if hasattr(policy, "get_decoder") else None) or policy.base_model
        self._layer = state_layer(decoder)
        self._layer_name = f"{type(self._layer).__name__} of {type(decoder).__name__}"

    @contextmanager
    def recording(
        self, needed: bool = True, states: bool = False, turns: SampledTurns | None = None
    ) -> Iterator[Recording]:
        """Context in which forwards of the policy are recorded, see [`Recording`]."""
        before, self._recording = self._recording, Recording(needed, states, turns)
        try:
            yield self._recording
        finally:
            self._recording = before

    @contextmanager
    def scoring(self, model: torch.nn.Module) -> Iterator[Callable[[Tensor], bool]]:
        """
        Context of a scoring forward of `model`, policy or reference. The yielded function takes its log-probs, and
        returns whether there are the energies that are needed.
        """
        to = self._recording
        if to is None or torch.is_grad_enabled() or all(m is not self.policy for m in model.modules()):
            yield lambda logps: True
            return
        chunks: list[Any] = []

        def keep(logps: Tensor) -> bool:
            if not chunks or any(chunk is None for chunk in chunks):
                return not to.needed
            length, of_tokens = logps.size(1), None
            if to.states:
                read = [of[:, -length - 1 : -1] for of in self.checked(states, len(chunks))]
                of_tokens = torch.cat(read).to(logps.device)
            energy = token_energy(logps, torch.cat(chunks)[:, -length:])
            to.values.append(TokenValues(energy, logps, of_tokens))
            return True

        hook = model.register_forward_hook(
            lambda module, args, outputs: chunks.append(getattr(outputs, "log_sum_sq_probs", None))
        )
        try:
            with self.reading(to.states) as states:
                yield keep
        finally:
            hook.remove()

    @contextmanager
    def reading(self, states: bool) -> Iterator[list[Tensor]]:
        """Context of forwards that also return log Σπ²; projected `states` are appended to the yielded list."""
        self.policy.trl_otb_energies = True
        try:
            with self._recording_states(states) as recorded:
                yield recorded
        finally:
            self.policy.trl_otb_energies = False

    @contextmanager
    def sampling(self) -> Iterator[Callable[[list[list[int]], list[list[int]]], None]]:
        """Context of one `generate` of the policy; the yielded function takes the ids of prompts and completions."""
        to = self._recording
        if to is None or (turns := to.turns) is None:
            with self._watching_processors(to):
                yield lambda prompt_ids, completion_ids: None
            return
        turn = SampledTurn(self.temperature)

        def keep(prompt_ids: list[list[int]], completion_ids: list[list[int]]) -> None:
            # Generation that calls the model in other ways, as with soft prompts or guidance, needs the extra forward
            readable = to.states and _one_call_each(states, turn.calls)
            turns.add(turn.rows(prompt_ids, completion_ids, states if readable else None), prompt_ids, completion_ids)

        hook = self.policy.register_forward_hook(turn.on_forward, with_kwargs=True)
        try:
            with self._watching_processors(to), self._recording_states(to.states, last_only=True) as states:
                yield keep
        finally:
            hook.remove()

    @contextmanager
    def _watching_processors(self, to: Recording | None) -> Iterator[None]:
        """Context in which `generate` tells `to` which processor of logits it has, beside that of the temperature."""
        prepare = getattr(self.policy, "_get_logits_processor", None)  # of all that have a `generate`, see `parts.py`
        if to is None or prepare is None:
            yield
            return

        def watched(generation_config: Any, *args: Any, **kwargs: Any) -> Any:
            processors = prepare(generation_config, *args, **kwargs)
            warpers = [of for of in processors if isinstance(of, TemperatureLogitsWarper)]
            # With a `min_p` of 0 nothing is cut
            others = [
                processor_and_cause(of, self.policy)
                for of in processors
                if of not in warpers and getattr(of, "min_p", 1) != 0
            ]
            if math.prod(of.temperature for of in warpers) != self.temperature:
                others.append(f"a temperature that is not {self.temperature}{BY_CONFIG}")
            to.processor = next(iter(others), None if generation_config.do_sample else f"do_sample=False{BY_CONFIG}")
            return processors

        with patch.object(self.policy, "_get_logits_processor", watched):
            yield

    @contextmanager
    def _recording_states(self, wanted: bool, last_only: bool = False) -> Iterator[list[Tensor]]:
        """Context in which calls of the layer append projected states, `(b, P + T, k)`, to the yielded list."""
        recorded: list[Tensor] = []

        def record(module: Any, args: Any, output: Any) -> None:
            states = (output if isinstance(output, Tensor) else output[0]).detach()
            states = (states[:, -1:] if last_only and states.dim() == 3 else states).float()
            if self.projection is None or self.projection.size(0) != states.size(-1):
                self.projection = projection(states.size(-1))
            self.projection = self.projection.to(states.device)
            with torch.autocast(states.device.type, enabled=False):
                recorded.append(states @ self.projection)

        hook = self._layer.register_forward_hook(record) if wanted else None
        try:
            yield recorded
        finally:
            if hook is not None:
                hook.remove()

    def reads_sampling(self, trainer: GRPOTrainer) -> bool:
        """Whether the forwards that sample are read."""
        return not scores_anyway(trainer)

    def values_of_batch(
        self, trainer: GRPOTrainer, batch: dict[str, Any], mask: Tensor, recording: Recording
    ) -> tuple[TokenValues | None, str | None]:
        """The values of TRL's `batch` from where they cost least, and their source; `None` if nothing is needed."""
        source = values = None
        if (logps := batch.get("old_per_token_logps")) is not None:
            source = "the no-gradient forward that GRPOTrainer runs anyway"
            # By identity, so never those of a reference model
            values = next((of_forward for of_forward in recording.values if of_forward.logps is logps), None)
            if values is None and not recording.needed:
                return None, None
            if values is None:
                what = "the old log-probs of the rollout are not those that any forward of the policy returned"
                methods = ("_get_per_token_logps_and_entropies", "_generate_and_score_completions")
                raise contract_broken(trainer, what, *methods)
        elif not recording.needed:
            return None, None
        elif recording.turns is not None:
            source, values = SAMPLED, recording.turns.of_batch(batch, mask)
        missing = torch.tensor([values is None or recording.lack_states(values)], device=mask.device)
        if trainer.accelerator.gather(missing).any():  # all processes take part in the forward
            source, values = EXTRA, extra_forward(trainer, batch, recording.states)
        return values, source

    def checked(self, states: list[Tensor], forwards: int) -> list[Tensor]:
        """`states`; a `ValueError` if the layer was not called once in each forward, or returned no `(b, T, d)`."""
        if not _one_call_each(states, forwards):
            shapes = [tuple(of.shape) for of in states]
            odd = next((f", of shape {shape[:-1]} and more" for shape in shapes if len(shape) != 3), "")
            raise ValueError(
                f"The baseline expected one call of {self._layer_name} per forward, with hidden states for rows and "
                f"tokens, and saw {len(states)} calls in {forwards} forwards{odd}: this model is not supported, or was "
                "compiled by hand (set `torch_compile`). Choose a baseline that needs no states, such as 'rloo_pooled'."
            )
        return states


def processor_and_cause(processor: Any, policy: Any) -> str:
    """What a processor of logits is, and what it comes from."""
    suppressed, image = getattr(processor, "suppress_tokens", None), getattr(policy.config, "image_token_id", None)
    if image is not None and suppressed is not None and suppressed.flatten().tolist() == [image]:
        return f"{type(processor).__name__}: TRL lets a vision model sample no image token (id {image})"
    return f"{type(processor).__name__}{BY_CONFIG}"


def _one_call_each(states: list[Tensor], forwards: int) -> bool:
    return len(states) == forwards and all(of.dim() == 3 for of in states)


def scores_anyway(trainer: GRPOTrainer) -> bool:
    """Whether GRPOTrainer itself scores a generation batch without gradient."""
    args = trainer.args
    reused = args.gradient_accumulation_steps % (args.steps_per_generation * args.num_iterations) != 0
    return reused or (trainer.use_vllm and args.vllm_importance_sampling_correction)


def no_energies(trainer: GRPOTrainer, forward: Callable) -> Exception:
    """What to raise where a scoring forward, TRL's or a user's, returned log-probs without energies."""
    name = "_get_per_token_logps_and_entropies"
    if forward is getattr(GRPOTrainer, name):
        return RuntimeError(
            "The policy's forward returned no log Σπ²: something replaced the fused LM head of the model after "
            "OTBGRPOTrainer was constructed. Construct the trainer last."
        )
    what = f"`baseline` is {trainer.baseline.entry.name!r}, which needs energies, and the log-probs of a rollout "
    return contract_broken(trainer, f"{what}come from another forward than GRPOTrainer's", name)


@torch.no_grad()
def extra_forward(trainer: GRPOTrainer, batch: dict[str, Any], states: bool) -> TokenValues:
    """The values of TRL's `batch` from one more no-gradient forward of the trainer's policy."""
    args = trainer.args
    checkpointing = trl_models.disable_gradient_checkpointing(trainer.model, args.gradient_checkpointing_kwargs)
    with checkpointing, trainer._trl_otb.recorder.recording(states=states) as recording:
        score(trainer, batch, min(args.per_device_train_batch_size, args.per_device_eval_batch_size))
    if not recording.values:
        what = "the forward that yields energies is not taken"
        raise contract_broken(trainer, what, "_get_per_token_logps_and_entropies")
    return recording.values[0]


def score(trainer: GRPOTrainer, batch: dict[str, Any], batch_size: int, forward: Callable | None = None) -> Tensor:
    """`(B, T)` log-probs of TRL's `batch`, by the trainer's training forward or another."""
    named = {"input_ids", "attention_mask", "logits_to_keep", "batch_size"}
    taken = inspect.signature(scoring_method(GRPOTrainer)).parameters.keys() - named
    logps, *_ = (forward or trainer._get_per_token_logps_and_entropies)(
        trainer.model,
        input_ids=torch.cat([batch["prompt_ids"], batch["completion_ids"]], dim=1),
        attention_mask=torch.cat([batch["prompt_mask"], batch["completion_mask"]], dim=1),
        logits_to_keep=batch["completion_ids"].size(1),
        batch_size=batch_size,
        **{key: batch[key] for key in taken if key in batch},  # as of images
    )
    return logps
