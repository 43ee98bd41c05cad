"""
Everything that relies on private parts of TRL, and nothing else.

[`EnergyGRPOTrainer`] is a [`~trl.GRPOTrainer`] with two openings for a subclass, which sees no private part of TRL:

- [`~EnergyGRPOTrainer.score_rollout`] is called once completions are generated and rewarded;
- [`~EnergyGRPOTrainer.score_micro_batch`] is called in every loss that wants energies, between the policy's forward and
  the first use of the advantages.

Log Σπ² comes out of TRL's own fused LM head, in the forwards that TRL runs anyway; (B, T, V) logits never exist. What is
relied on is checked when a trainer is constructed, so that a TRL in which it moved fails there and says so.
"""

import functools
import inspect
import types
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import trl
from accelerate.utils import is_peft_model
from trl import GRPOTrainer

from .energy import token_energy
from .rewards import RewardRecorder


WORKING_VERSIONS = "trl>=1.16,<1.17"

try:
    from trl.extras.profiling import profiling_decorator
    from trl.models import utils as trl_models
    from trl.trainer import utils as trl_utils
except ImportError as error:
    raise ImportError(
        f"trl_otb relies on parts of TRL that have moved in trl {trl.__version__}: {error}. "
        f"Install a version that works: pip install '{WORKING_VERSIONS}'."
    ) from error

# The leading parameters of each method that is overridden or called, as the overrides below use them.
_METHODS = {
    "_calculate_rewards": ("self", "inputs", "prompts", "completions", "completion_ids_list"),
    "_compute_loss": ("self", "model", "inputs"),
    "_generate_and_score_completions": ("self", "inputs"),
    "_generate_single_turn": ("self", "prompt_ids", "images", "multimodal_fields", "num_generations"),
    "_get_per_token_logps_and_entropies": ("self", "model", "input_ids", "attention_mask", "logits_to_keep"),
    "_prepare_inputs": ("self", "generation_batch"),
    "_tool_call_loop": ("self", "prompts", "prompt_ids"),
    "get_gamma_weights": ("advantages", "log_ratio_per_token", "mask"),
    "get_off_policy_mask": (
        "advantages",
        "per_token_logps",
        "sampling_per_token_logps",
        "mask",
        "off_policy_threshold",
    ),
}
_FUNCTIONS = {
    "add_fused_lm_head": ("model", "temperature", "cast_lm_head_to_fp32", "outputs"),
    "FusedCausalLMOutput": ("loss", "log_probs", "entropy", "log_sum_sq_probs"),
    "get_config_model_id": ("config",),
    "is_async_callable": ("func",),
    "nanstd": ("tensor", "dim"),
    "split_pixel_values_by_grid": ("batch",),
    "split_tensor_dict": ("tensor_dict", "num_chunks"),
    "unsplit_pixel_values_by_grid": ("batch",),
    "shuffle_sequence_dict": ("seq_dict",),
}
_MODEL_FUNCTIONS = {"disable_gradient_checkpointing": ("model", "gradient_checkpointing_kwargs")}
_ATTRIBUTES = (
    "_buffered_inputs",
    "_logs",
    "_metrics",
    "_step",
    "multi_objective_aggregation",
    "num_generations",
    "num_generations_eval",
    "num_iterations",
    "reward_func_names",
    "reward_funcs",
    "reward_weights",
    "scale_rewards",
    "temperature",
    "use_vllm",
    "vllm_mode",
    "vllm_tensor_parallel_size",
)
# What `_compute_loss` passes on to the forward, beside ids and masks.
_FORWARD_KWARGS = (
    "pixel_values",
    "image_grid_thw",
    "num_images",
    "pixel_attention_mask",
    "spatial_shapes",
    "num_tiles",
    "image_sizes",
    "token_type_ids",
    "mm_token_type_ids",
    "image_position_ids",
)


def check_trl(attributes_of: GRPOTrainer | None = None) -> None:
    """
    Check that what this module relies on inside TRL is there.

    Args:
        attributes_of (`GRPOTrainer`, *optional*):
            A constructed trainer, whose attributes are checked too.

    Raises:
        ImportError: Something moved. The message names it, the installed version and the versions that work.
    """
    moved = []
    for owner, expected in ((GRPOTrainer, _METHODS), (trl_utils, _FUNCTIONS), (trl_models, _MODEL_FUNCTIONS)):
        for name, parameters in expected.items():
            function = getattr(owner, name, None)
            if function is None:
                moved.append(f"`{owner.__name__}.{name}` is gone")
            elif tuple(inspect.signature(function).parameters)[: len(parameters)] != parameters:
                moved.append(f"`{owner.__name__}.{name}` no longer takes ({', '.join(parameters)})")
    forward = getattr(GRPOTrainer, "_get_per_token_logps_and_entropies", None)
    if forward is not None:
        known = inspect.signature(forward).parameters
        moved += [
            f"`{forward.__name__}` no longer takes `{name}`"
            for name in ("batch_size", *_FORWARD_KWARGS)
            if name not in known
        ]
    if attributes_of is not None:
        moved += [f"`GRPOTrainer.{name}` is gone" for name in _ATTRIBUTES if not hasattr(attributes_of, name)]
    if moved:
        raise ImportError(
            f"trl_otb relies on parts of TRL that have moved in trl {trl.__version__}: {'; '.join(moved)}. "
            f"Install a version that works: pip install '{WORKING_VERSIONS}'."
        )


@dataclass
class Rollout:
    """
    One generation batch of this process, as [`EnergyGRPOTrainer.score_rollout`] gets it.

    Args:
        returns (`torch.Tensor` of shape `(B_all,)`):
            Weighted reward of every completion on all processes, in order of process; NaN where no reward function
            could score it. Of `multi_objective_aggregation="normalize_then_sum"`, the sum of normalised rewards.
        scale (`torch.Tensor` of shape `(B_all,)`):
            What `scale_rewards` divides advantages by; 1 for `"none"`.
        token_rewards (`torch.Tensor` of shape `(B, T)`, *optional*):
            Where this process's completions earned their returns, if any reward function, on any process, credited single
            turns or tokens; each row sums to its return.
        energy (`torch.Tensor` of shape `(B, T)`, *optional*):
            w_t of this process's completions, if TRL ran a forward of the policy over them.
        micro_batch_holds_groups (`bool`):
            Whether rows can be dealt to micro-batches such that each micro-batch holds whole groups.
    """

    returns: torch.Tensor
    scale: torch.Tensor
    token_rewards: torch.Tensor | None
    energy: torch.Tensor | None
    micro_batch_holds_groups: bool


class _RecordingModel:
    """Calls the model and keeps the log Σπ² of each call, whatever wraps the model."""

    def __init__(self, model):
        self._model = model
        self.log_sum_sq_probs = []

    def __call__(self, *args, **kwargs):
        outputs = self._model(*args, **kwargs)
        self.log_sum_sq_probs.append(outputs.log_sum_sq_probs)
        return outputs

    def __getattr__(self, name):
        return getattr(self._model, name)


class EnergyGRPOTrainer(GRPOTrainer):
    """A [`~trl.GRPOTrainer`] whose policy forwards yield energies and whose advantages a subclass forms."""

    def __init__(self, *args, **kwargs):
        check_trl()
        self._forwards_of_rollout: list | None = None  # (logps, [log Σπ²]) of each forward while a rollout is scored
        self._inputs_of_loss: dict | None = None  # the micro-batch while its loss is computed
        self._rewards_per_func: torch.Tensor | None = None
        self._recorder = RewardRecorder()
        self._completion_lengths: list[int] = []  # tokens of the rollout's completions, tool output included
        self._prompt_of_idle_turn: list | None = None  # in a tool loop whose turns all processes must take together
        super().__init__(*args, **kwargs)
        check_trl(self)
        policy = self.model.get_base_model() if is_peft_model(self.model) else self.model
        _check_lm_head(policy)
        self._yield_energies = _add_energies_to_fused_lm_head(
            policy,
            temperature=self.temperature,
            cast_lm_head_to_fp32=self.args.cast_lm_head_to_fp32,
        )

    # Openings for a subclass

    def score_rollout(self, batch: dict[str, Any], rollout: Rollout) -> None:
        """
        Put advantages into `batch`, either final ones under `"advantages"`, `(B,)` or `(B, T)`, or whatever
        [`score_micro_batch`] needs to form them; tensors and lists with one entry a row are shuffled and split with it.
        With `batch["groups_whole"]` (a 0-dim tensor) set, rows are shuffled group by group.
        """
        raise NotImplementedError

    def wants_energy(self, inputs: dict[str, Any]) -> bool:
        """Whether [`score_micro_batch`] is to be called with this micro-batch; if not, its Σπ² is not computed."""
        raise NotImplementedError

    def score_micro_batch(self, inputs: dict[str, Any], energy: torch.Tensor) -> None:
        """Called with a micro-batch and its w_t, `(B, T)` without gradient, before its advantages are read."""
        raise NotImplementedError

    # What a subclass may use

    @property
    def mode(self) -> str:
        return "train" if self.model.training else "eval"

    @property
    def generations(self) -> int:
        """N in the current mode."""
        return self.num_generations if self.model.training else self.num_generations_eval

    @staticmethod
    def generated_mask(batch: dict[str, Any]) -> torch.Tensor:
        """`(B, T)` 1 on tokens that the policy generated and the loss sees."""
        mask = batch["completion_mask"]
        return mask * batch["tool_mask"] if "tool_mask" in batch else mask

    def own_rows(self, rows: int) -> slice:
        """Where this process's `rows` rows stand among those of all processes."""
        return slice(self.accelerator.process_index * rows, (self.accelerator.process_index + 1) * rows)

    @torch.no_grad()
    def energy_by_extra_forward(self, batch: dict[str, Any]) -> torch.Tensor:
        """`(B, T)` w_t of `batch` under the current policy, by one forward without gradient."""
        self._forwards_of_rollout = []
        try:
            with trl_models.disable_gradient_checkpointing(self.model, self.args.gradient_checkpointing_kwargs):
                logps, _, _ = self._get_per_token_logps_and_entropies(
                    self.model,
                    torch.cat([batch["prompt_ids"], batch["completion_ids"]], dim=1),
                    torch.cat([batch["prompt_mask"], batch["completion_mask"]], dim=1),
                    batch["completion_ids"].size(1),
                    batch_size=self.args.per_device_train_batch_size
                    if self.model.training
                    else self.args.per_device_eval_batch_size,
                    **{key: batch[key] for key in _FORWARD_KWARGS if key in batch},
                )
            return self._energy_of_forward(logps)
        finally:
            self._forwards_of_rollout = None

    def add_metrics(self, metrics: dict[str, float]) -> None:
        """Add values to the current mode's metrics, which TRL averages until the next log."""
        for name, value in metrics.items():
            self._metrics[self.mode][name].append(value)

    def replace_logged_advantages(self, advantages: list[float]) -> None:
        """Put a number for each completion of the last rollout, on all processes, into the completions table."""
        logged = self._logs["advantages"]
        for _ in range(min(len(advantages), len(logged))):
            logged.pop()
        logged.extend(advantages)

    # Overrides

    def _calculate_rewards(self, inputs, prompts, completions, completion_ids_list):
        self._recorder, functions = RewardRecorder(), self.reward_funcs
        self._completion_lengths = [len(ids) for ids in completion_ids_list]
        self.reward_funcs = [
            function
            if isinstance(function, torch.nn.Module)
            else self._recorder.wrap(i, self.reward_func_names[i], function, trl_utils.is_async_callable(function))
            for i, function in enumerate(functions)
        ]
        try:
            self._rewards_per_func = super()._calculate_rewards(inputs, prompts, completions, completion_ids_list)
        finally:
            self.reward_funcs = functions
        return self._rewards_per_func

    def _tool_call_loop(self, prompts, prompt_ids, *args, **kwargs):
        # Where a turn involves all processes, one that has no call left must take part in the turns of the others. TRL
        # lets it go ahead, whereupon processes wait for each other in different places, or take each other's completions.
        if not self._turns_are_collective():
            return super()._tool_call_loop(prompts, prompt_ids, *args, **kwargs)
        self._prompt_of_idle_turn = prompt_ids[0]
        try:
            result = super()._tool_call_loop(prompts, prompt_ids, *args, **kwargs)
            while self._generate_together([], None, {}) is not None:
                pass
            return result
        finally:
            self._prompt_of_idle_turn = None

    def _generate_single_turn(self, prompt_ids, images, multimodal_fields, num_generations, *args, **kwargs):
        if self._prompt_of_idle_turn is None:
            return super()._generate_single_turn(
                prompt_ids, images, multimodal_fields, num_generations, *args, **kwargs
            )
        return self._generate_together(prompt_ids, images, multimodal_fields, *args, **kwargs)

    def _get_per_token_logps_and_entropies(self, model, *args, **kwargs):
        in_rollout = self._forwards_of_rollout is not None
        wanted_by_loss = self._inputs_of_loss is not None and self.wants_energy(self._inputs_of_loss)
        recording_model = _RecordingModel(model)
        with self._yield_energies(in_rollout or wanted_by_loss):
            logps, entropies, aux_loss = super()._get_per_token_logps_and_entropies(recording_model, *args, **kwargs)
        log_sum_sq_probs = recording_model.log_sum_sq_probs
        if in_rollout:
            self._forwards_of_rollout.append((logps, log_sum_sq_probs))
        elif wanted_by_loss:
            with torch.no_grad():
                self.score_micro_batch(self._inputs_of_loss, _energy(logps, log_sum_sq_probs))
        return logps, entropies, aux_loss

    def _generate_and_score_completions(self, inputs):
        self._forwards_of_rollout = []
        try:
            batch = super()._generate_and_score_completions(inputs)
            old_logps = batch.get("old_per_token_logps")
            energy = None if old_logps is None else self._energy_of_forward(old_logps)
        finally:
            self._forwards_of_rollout = None
        returns, scale, factors = self._returns_and_scale(self.generations)
        micro_batches = self.args.steps_per_generation if self.model.training else 1
        rows = len(batch["completion_ids"])
        self.score_rollout(
            batch,
            Rollout(
                returns,
                scale,
                self._token_rewards(batch, returns, factors),
                energy,
                micro_batch_holds_groups=rows // micro_batches % self.generations == 0,
            ),
        )
        return batch

    @profiling_decorator
    def _prepare_inputs(self, generation_batch):
        # The parent's method with one change: rows are shuffled group by group if the rollout asks for it.
        if not self.model.training:
            return super()._prepare_inputs(generation_batch)
        generate_every = self.args.steps_per_generation * self.num_iterations
        if self._step % generate_every == 0 or self._buffered_inputs is None:
            batch = self._generate_and_score_completions(generation_batch)
            batch = trl_utils.split_pixel_values_by_grid(batch)
            if "groups_whole" in batch:
                batch = _shuffle_groups(batch, self.num_generations)
            else:
                batch = trl_utils.shuffle_sequence_dict(batch)
            micro_batches = trl_utils.split_tensor_dict(batch, self.args.steps_per_generation)
            self._buffered_inputs = [trl_utils.unsplit_pixel_values_by_grid(x) for x in micro_batches]
        return self._buffered_inputs[self._step % self.args.steps_per_generation]

    def _compute_loss(self, model, inputs):
        self._inputs_of_loss = inputs
        try:
            return super()._compute_loss(model, inputs)
        finally:
            self._inputs_of_loss = None

    # Both judge a whole completion by the sign of its advantage: give them one advantage a completion.

    @staticmethod
    def get_off_policy_mask(advantages, per_token_logps, sampling_per_token_logps, mask, off_policy_threshold):
        return GRPOTrainer.get_off_policy_mask(
            _completion_advantage(advantages, mask),
            per_token_logps,
            sampling_per_token_logps,
            mask,
            off_policy_threshold,
        )

    @staticmethod
    def get_gamma_weights(advantages, log_ratio_per_token, mask, *args, **kwargs):
        return GRPOTrainer.get_gamma_weights(
            _completion_advantage(advantages, mask), log_ratio_per_token, mask, *args, **kwargs
        )

    # Internals

    def _energy_of_forward(self, logps: torch.Tensor) -> torch.Tensor:
        """w_t of the forward that returned these very `logps`: a reference pass can never be mistaken for it."""
        for of_logps, log_sum_sq_probs in self._forwards_of_rollout:
            if of_logps is logps:
                return _energy(logps, log_sum_sq_probs)
        raise RuntimeError(
            "The old log-probs of the rollout are not those that any forward of the policy returned, so their energies are "
            f"unknown: something between TRL and trl_otb replaces them. trl_otb is known to work with {WORKING_VERSIONS}."
        )

    def _turns_are_collective(self) -> bool:
        if self.accelerator.num_processes == 1:
            return False
        if self.use_vllm:
            return self.vllm_mode == "server" or self.vllm_tensor_parallel_size > 1
        deepspeed = self.accelerator.state.deepspeed_plugin
        return self.is_fsdp_enabled or (deepspeed is not None and deepspeed.zero_stage == 3)

    def _generate_together(self, prompt_ids, images, multimodal_fields, *args, **kwargs):
        """A turn of all processes, in which those without prompts idle; None, and no turn, if none has any."""
        own = len(prompt_ids)
        most = self.accelerator.gather(torch.tensor([own], device=self.accelerator.device)).max().item()
        if most == 0:
            return None
        idle = most - own if self.use_vllm else int(own == 0)  # vLLM's slices are of equal length on every process
        prompt_ids = prompt_ids + [self._prompt_of_idle_turn] * idle
        images = None if images is None else images + [None] * idle
        ids, logprobs = super()._generate_single_turn(
            prompt_ids, images, multimodal_fields, *args, **{"num_generations": 1, **kwargs}
        )
        return ids[:own], None if logprobs is None else logprobs[:own]

    def _token_rewards(self, batch, returns, factors) -> torch.Tensor | None:
        """See [`Rollout`]."""
        credited = torch.tensor([bool(self._recorder)], device=returns.device)
        if not self.accelerator.gather(credited).any():
            return None
        mask = self.generated_mask(batch)
        own = self.own_rows(len(mask))
        rewards = self._recorder.on_tokens(mask, self._completion_lengths, factors[own])
        # The rest, which was given for the whole completion, is earned at its last generated token
        rest = returns[own] - rewards.sum(dim=1)
        positions = torch.arange(1, mask.size(1) + 1, device=mask.device)
        last = torch.nn.functional.one_hot((mask * positions).argmax(dim=1), mask.size(1))
        return rewards + last * rest.unsqueeze(1)

    def _returns_and_scale(self, num_generations: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """
        What GRPOTrainer forms its advantages from, before it subtracts a baseline, see [`Rollout`]; and by what each
        function's rewards were multiplied, `(B_all, F)`.
        """
        rewards_per_func, self._rewards_per_func = self._rewards_per_func, None
        weights = self.reward_weights.to(rewards_per_func.device)
        factors = weights.expand_as(rewards_per_func)
        unscorable = rewards_per_func.isnan().all(dim=1)
        normalize_first = self.multi_objective_aggregation == "normalize_then_sum"
        if normalize_first:
            grouped = rewards_per_func.view(-1, num_generations, rewards_per_func.size(1))
            std = _nanstd(grouped, dim=1)
            grouped = (grouped - grouped.nanmean(dim=1, keepdim=True)) / (std.unsqueeze(1) + 1e-4)
            factors = factors / (std + 1e-4).repeat_interleave(num_generations, dim=0)
            rewards_per_func = grouped.view_as(rewards_per_func)
        returns = (rewards_per_func * weights).nansum(dim=1)
        returns[unscorable] = torch.nan
        if normalize_first or self.scale_rewards == "batch":
            scale = _nanstd(returns, dim=0).expand_as(returns) + 1e-4
        elif self.scale_rewards == "group":
            std = _nanstd(returns.view(-1, num_generations), dim=1)
            scale = std.repeat_interleave(num_generations) + 1e-4
        else:
            scale = torch.ones_like(returns)
        return returns, scale, factors


def config_model_id(config) -> str:
    """Hub id or folder that a model was loaded from."""
    return trl_utils.get_config_model_id(config)


def _check_lm_head(model) -> None:
    """The fused head multiplies by the LM head's weight itself, and TRL does not notice if that holds packed numbers."""
    head = model.get_output_embeddings()
    if not head.weight.is_floating_point():
        raise ValueError(
            f"The LM head of the policy is quantized (a {type(head).__name__} whose weight is {head.weight.dtype}). Its "
            "log-probs and energies would be wrong, as TRL's fused LM head reads the weight as it is stored. Leave the head "
            "out: `BitsAndBytesConfig(..., llm_int8_skip_modules=['lm_head'])`, which holds for 4 bits too."
        )


def _add_energies_to_fused_lm_head(model, temperature, cast_lm_head_to_fp32):
    """
    Make the fused LM head that GRPOTrainer gave `model` yield log Σπ² too, on demand.

    GRPOTrainer asked its head for ("log_probs", "entropy"). A second head answers in its place while the returned context
    manager is entered with `True`; elsewhere, and for plain forwards, everything is as GRPOTrainer left it.
    """
    wanted = False
    without = model.forward
    trl_utils.add_fused_lm_head(
        model,
        temperature=temperature,
        cast_lm_head_to_fp32=cast_lm_head_to_fp32,
        outputs=("log_probs", "entropy", "log_sum_sq_probs"),
    )
    with_energies = model.forward

    @functools.wraps(type(model).forward)  # `generate` validates its arguments against the signature
    def forward(self, *args, **kwargs):
        return (with_energies if wanted else without)(*args, **kwargs)

    model.forward = types.MethodType(forward, model)

    @contextmanager
    def yield_energies(yes: bool):
        nonlocal wanted
        wanted = yes
        try:
            yield
        finally:
            wanted = False

    return yield_energies


def _energy(logps: torch.Tensor, log_sum_sq_probs: list[torch.Tensor | None]) -> torch.Tensor:
    """(B, T) w_t of a forward that was run in one or several chunks of rows."""
    if any(chunk is None for chunk in log_sum_sq_probs):
        raise RuntimeError(
            "The policy's forward returned no log Σπ²: something replaced the fused LM head of the model after "
            "OTBGRPOTrainer was constructed. Construct the trainer last."
        )
    return token_energy(logps.detach(), torch.cat(log_sum_sq_probs)[:, -logps.size(1) :])


def _nanstd(x: torch.Tensor, dim: int) -> torch.Tensor:
    """Standard deviation over what is not NaN; 0 for a single value, as GRPOTrainer has it."""
    return trl_utils.nanstd(x, dim=dim) if x.size(dim) > 1 else torch.zeros_like(x.select(dim, 0))


def _completion_advantage(advantages: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """(B, 1) mean advantage of a completion's generated tokens."""
    return (advantages * mask).sum(dim=1, keepdim=True) / mask.sum(dim=1, keepdim=True).clamp(min=1)


def _shuffle_groups(batch: dict[str, Any], num_generations: int) -> dict[str, Any]:
    """Permute whole groups of adjacent rows, in every tensor and list of the batch alike."""
    rows = torch.arange(len(batch["completion_ids"])).view(-1, num_generations)
    rows = rows[torch.randperm(len(rows))].flatten()

    def permute(value):
        if value is None or (isinstance(value, torch.Tensor) and value.dim() == 0):
            return value
        return value[rows] if isinstance(value, torch.Tensor) else [value[i] for i in rows.tolist()]

    return {key: permute(value) for key, value in batch.items()}
