"""The gradient noise scale of a run, measured from micro-batches and processes."""

import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from accelerate.logging import get_logger
from accelerate.state import AcceleratorState
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments


logger = get_logger(__name__)


def noise_and_signal(mean_square_of_parts: float, square_of_mean: float, parts: int) -> tuple[float, float]:
    """
    Unbiased estimates from the gradients h_1 … h_K of K parts of a batch and their mean G (McCandlish et al., appendix
    A.1, https://arxiv.org/abs/1812.06162).

        E‖h‖² = ‖g‖² + S,   E‖G‖² = ‖g‖² + S / K

    Args:
        mean_square_of_parts (`float`):
            Σ_k ‖h_k‖² / K.
        square_of_mean (`float`):
            ‖G‖².
        parts (`int`):
            K, at least 2.

    Returns:
        `tuple[float, float]`: S, the trace of the covariance of a part's gradient, and ‖g‖², the squared norm of the
        true gradient. A single estimate may be negative.
    """
    noise = (mean_square_of_parts - square_of_mean) / (1 - 1 / parts)
    return noise, square_of_mean - noise / parts


def norm_of(gradient: torch.Tensor) -> torch.Tensor:
    """‖gradient‖ in float32, read once and not copied. Long sums are split, to keep their precision."""
    if gradient.dim() > 1 and gradient.numel() > 2**18:
        along = min(range(gradient.dim()), key=gradient.stride)  # lines as they lie in memory
        gradient = torch.linalg.vector_norm(gradient, dim=along, dtype=torch.float32)
    return torch.linalg.vector_norm(gradient, dtype=torch.float32)


class GradientNoiseCallback(TrainerCallback):
    """
    Logs the gradient noise scale of a run, in [`OTBGRPOTrainer`] and [`~trl.GRPOTrainer`].

    The completions of a prompt share a baseline, so prompts are the independent units, and the compared parts of a
    batch must hold whole groups: the micro-batches of an accumulation, if rows are shuffled group by group
    (`keep_groups_together` in [`OTBGRPOConfig`]); else the processes of a data-parallel run. Without either, one
    warning says why nothing is measured. Training does not change.

    Logged, from exponential averages of noise and signal, with gradients before clipping:

    - `noise/scale`: the number of prompts per step at which the gradient's noise equals its signal. Far more prompts
      hardly improve a step; with far fewer it is mostly noise.
    - `noise/batch_over_scale`: the run's prompts per step over this number, the inverse of a step's noise to signal.

    The callback reads each gradient once per micro-batch and stores none. Values go to `state.log_history` and to
    callbacks that follow; in an [`OTBGRPOTrainer`] they are logged like its metrics, also to trackers.

    Args:
        decay (`float`, *optional*, defaults to 0.9):
            Decay of the averages per step, at least 0 and below 1.

    Raises:
        ValueError: `decay` is no number, or out of range.
    """

    def __init__(self, decay: float = 0.9) -> None:
        if not isinstance(decay, int | float) or not 0 <= decay < 1:
            raise ValueError(f"`decay` is {decay!r}: it must be a number, at least 0 and below 1.")
        self.decay = decay
        self._trainer: Any = None  # an OTBGRPOTrainer during its training, whose log then holds the values
        self._averages = torch.zeros(3, dtype=torch.float64)  # of noise, signal, and 1, each from 0
        self._hooks: list[Any] = []
        self._step: _StepGradients | None = None

    @staticmethod
    @contextmanager
    def connected(trainer: Any) -> Iterator[None]:
        """Context in which `trainer` trains: its meters log like its metrics, and know whether groups stay together."""
        meters = [cb for cb in trainer.callback_handler.callbacks if isinstance(cb, GradientNoiseCallback)]
        try:
            for meter in meters:
                meter._trainer = trainer
            yield
        finally:
            for meter in meters:
                meter._trainer = None
                meter._remove_hooks()  # also if it was taken from the trainer meanwhile

    @staticmethod
    @contextmanager
    def all_paused(trainer: Any) -> Iterator[None]:
        """Context in which the gradients of `trainer`'s model are not those of a step."""
        meters = [cb for cb in trainer.callback_handler.callbacks if isinstance(cb, GradientNoiseCallback)]
        hooked = [meter for meter in meters if meter._hooks]
        for meter in hooked:
            meter._remove_hooks()
        try:
            yield
        finally:
            for meter in hooked:
                meter._add_hooks(trainer.model)

    @property
    def _keeps_groups_together(self) -> bool:
        return self._trainer is not None and self._trainer.keeps_groups_together

    @property
    def scale(self) -> float | None:
        """The noise scale in prompts; `None` if it is not yet known, or the signal is lost in noise."""
        noise, signal, weight = self._averages.tolist()
        return noise / signal if weight > 0 and signal > 0 else None

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, model: Any = None, **kwargs: Any
    ) -> None:
        self._remove_hooks()  # of an interrupted run
        self._averages, self._step = torch.zeros(3, dtype=torch.float64), None
        processes, accumulated = args.world_size, args.gradient_accumulation_steps
        reason = self._why_not(args, processes, accumulated)
        if reason is not None:
            logger.warning(f"The gradient noise scale cannot be measured: {reason}.")
            return
        trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
        smallest = min(trained, key=torch.Tensor.numel)
        self._step = _StepGradients(args, self._keeps_groups_together and accumulated > 1, smallest)
        self._add_hooks(model)

    def _add_hooks(self, model: torch.nn.Module) -> None:
        if self._step is None:
            return
        for parameter in (parameter for parameter in model.parameters() if parameter.requires_grad):
            self._hooks.append(parameter.register_hook(self._step.add_micro_batch))
            self._hooks.append(parameter.register_post_accumulate_grad_hook(self._step.add_accumulated))

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        self._remove_hooks()

    def _remove_hooks(self) -> None:
        while self._hooks:
            self._hooks.pop().remove()

    def _why_not(self, args: Any, processes: int, accumulated: int) -> str | None:
        state = AcceleratorState()  # also aware of `accelerate launch`
        if state.deepspeed_plugin is not None or getattr(state, "fsdp_plugin", None) is not None:
            return "DeepSpeed and FSDP hold gradients in partitions"
        if args.fp16:
            return "fp16 scales gradients by a factor that changes. Use bf16"
        per_process = args.per_device_train_batch_size * accumulated
        if processes > 1 and per_process % args.num_generations == 0:
            return None
        if self._keeps_groups_together and accumulated > 1:
            return None
        if accumulated == 1 and processes == 1:
            return "a step has one micro-batch. Set `gradient_accumulation_steps` to 2 or more, at equal batch size"
        if processes > 1:
            return "a group's rows lie on several processes. Give each process whole groups"
        return (
            "the rows of a group are spread over micro-batches. Use OTBGRPOTrainer with `per_device_train_batch_size` "
            "a multiple of `num_generations` and `keep_groups_together=True`, or several processes"
        )

    def on_substep_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        if self._step is not None:
            self._step.next_micro_batch()

    def on_pre_optimizer_step(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, model: Any = None, **kwargs: Any
    ) -> None:
        if self._step is None:
            return
        squares = self._step.finish(model)
        if squares is None or not all(map(math.isfinite, squares)):
            return
        noise, signal = noise_and_signal(*squares, self._step.parts)
        new = torch.tensor([noise * self._step.prompts_per_part, signal, 1.0], dtype=torch.float64)
        self._averages = self.decay * self._averages + (1 - self.decay) * new
        for name, value in self._values().items() if self._trainer is not None else ():
            self._trainer._metrics["train"][name].append(value)

    def on_log(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        logs: dict[str, Any] | None = None,
        **kwargs: Any,
    ) -> None:
        if self._trainer is None and logs is not None and "loss" in logs:
            logs.update(self._values())
            state.log_history[-1].update(self._values())

    def _values(self) -> dict[str, float]:
        if self._step is None or self.scale is None:
            return {}
        prompts = self._step.parts * self._step.prompts_per_part
        return {"noise/scale": self.scale, "noise/batch_over_scale": prompts / self.scale}


class _StepGradients:
    """
    Sums of squared gradients of one optimizer step, collected during its backward passes.

    Args:
        args (`TrainingArguments`):
            The arguments of the run.
        by_micro_batch (`bool`):
            Whether the parts are the micro-batches of each process, or the processes.
        clipped_parameter (`torch.nn.Parameter`):
            A small parameter, which shows by what factor all gradients were clipped.
    """

    def __init__(self, args: Any, by_micro_batch: bool, clipped_parameter: torch.nn.Parameter) -> None:
        self.processes, self.accumulated = args.world_size, args.gradient_accumulation_steps
        self.by_micro_batch = by_micro_batch
        self.parts = self.processes * (self.accumulated if by_micro_batch else 1)
        rows_per_part = args.per_device_train_batch_size * (1 if by_micro_batch else self.accumulated)
        self.prompts_per_part = rows_per_part / args.num_generations
        self.clipped_parameter = clipped_parameter
        self._device = args.device
        self._begin()

    def _begin(self) -> None:
        self._micro_batch = 0
        self._parts, self._total = (torch.zeros((), device=self._device) for _ in range(2))
        self._before_clipping: torch.Tensor | None = None

    def add_micro_batch(self, gradient: torch.Tensor) -> None:
        """Add a parameter's gradient of one micro-batch, before it is accumulated."""
        if self.by_micro_batch:
            norm = norm_of(gradient)
            self._parts.addcmul_(norm, norm)

    def add_accumulated(self, parameter: torch.nn.Parameter) -> None:
        """Add a parameter whose `grad` is the sum over this process's micro-batches so far."""
        if self._micro_batch == self.accumulated - 1 and parameter.grad is not None:
            norm = norm_of(parameter.grad)
            self._total.addcmul_(norm, norm)
            if parameter is self.clipped_parameter:
                self._before_clipping = parameter.grad.detach().float().clone()

    def next_micro_batch(self) -> None:
        self._micro_batch += 1

    def finish(self, model: torch.nn.Module) -> tuple[float, float] | None:
        """Σ_k ‖h_k‖² / K and ‖G‖²; `None` for an incomplete step."""
        complete = self._micro_batch == self.accumulated - 1
        # The gradient of a step sums 1/k of each part's own
        parts = self._parts * self.accumulated if self.by_micro_batch else self._total
        total = self._total
        if complete and self.processes > 1:
            torch.distributed.all_reduce(parts)
            parts = parts / self.processes
            total = self._square_of_mean(model)
        self._begin()
        return (parts.item(), total.item()) if complete else None

    def _square_of_mean(self, model: torch.nn.Module) -> torch.Tensor:
        """
        ‖G‖² over all processes, from the clipped gradients and the clipping factor of one parameter.
        """
        before = self._before_clipping
        before = torch.zeros_like(self.clipped_parameter, dtype=torch.float32) if before is None else before
        torch.distributed.all_reduce(before)
        before /= self.processes
        gradients = [(p, p.grad) for p in model.parameters() if p.grad is not None]
        clipped = torch.stack([norm_of(gradient) for _, gradient in gradients]).square().sum()
        if self.clipped_parameter.grad is None or before.count_nonzero() == 0:
            # This step cannot be measured; the next one uses a better parameter.
            candidates = [p for p, gradient in gradients if gradient.count_nonzero() > 0]  # the same on all processes
            self.clipped_parameter = min(candidates, key=torch.Tensor.numel, default=self.clipped_parameter)
            return torch.full((), torch.nan)
        factor = (before * self.clipped_parameter.grad.float()).sum() / before.square().sum()
        return clipped / factor.square()
