"""The gradient noise scale of a run, measured from the micro-batches of its steps."""

import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from accelerate.logging import get_logger
from transformers import TrainerCallback


logger = get_logger(__name__)


def noise_and_signal(mean_square_of_parts: float, square_of_mean: float, parts: int) -> tuple[float, float]:
    """
    Unbiased estimates of S and ‖g‖² from the gradients h_1 … h_K of K ≥ 2 parts of a batch and their mean G: from
    Σ_k ‖h_k‖² / K and ‖G‖². S is the trace of the covariance of a part's gradient, g the true gradient (McCandlish et
    al., appendix A.1, https://arxiv.org/abs/1812.06162). A single estimate may be negative.

        E‖h‖² = ‖g‖² + S,   E‖G‖² = ‖g‖² + S / K
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
    Logs the gradient noise scale of a run of [`OTBGRPOTrainer`] in one process.

    The completions of a prompt share a baseline, so prompts are the independent units, and the parts of a batch that
    are compared, its micro-batches, must hold whole groups: set `keep_groups_together=True` in [`OTBGRPOConfig`], and
    `gradient_accumulation_steps` to 2 or more. Otherwise one warning says why nothing is measured. Training does not
    change.

    Logged, from exponential averages of noise and signal, with gradients before clipping:

    - `noise/scale`: the number of prompts per step at which the gradient's noise equals its signal. Far more prompts
      hardly improve a step; with far fewer it is mostly noise.
    - `noise/batch_over_scale`: the run's prompts per step over this number, the inverse of a step's noise to signal.

    The callback reads each gradient once per micro-batch and stores none.
    """

    decay = 0.9  # of the averages, per step

    def __init__(self) -> None:
        self.trainer: Any = None  # during its training
        self.paused = False  # while gradients are not those of a step, as in a comparison
        self._averages = torch.zeros(3, dtype=torch.float64)  # of noise, signal, and 1, each from 0
        self._hooks: list[Any] = []
        self._begin()

    @staticmethod
    @contextmanager
    def set_in(trainer: Any, /, **attributes: Any) -> Iterator[None]:
        """Context in which the meters among `trainer`'s callbacks have these attributes."""
        meters = [cb for cb in trainer.callback_handler.callbacks if isinstance(cb, GradientNoiseCallback)]
        before = [{name: getattr(meter, name) for name in attributes} for meter in meters]
        try:
            for meter in meters:
                meter.__dict__.update(attributes)
            yield
        finally:
            for meter, values in zip(meters, before, strict=True):
                meter.__dict__.update(values)
                while meter.trainer is None and meter._hooks:  # after training, also if it was taken away meanwhile
                    meter._hooks.pop().remove()

    @property
    def scale(self) -> float | None:
        """The noise scale in prompts; `None` if it is not yet known, or the signal is lost in noise."""
        noise, signal, weight = self._averages.tolist()
        return noise / signal if weight > 0 and signal > 0 else None

    def on_train_begin(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        self._averages, reason = torch.zeros(3, dtype=torch.float64), None
        if self.trainer is None or not self.trainer.keeps_groups_together or args.gradient_accumulation_steps < 2:
            reason = (
                "it compares micro-batches of whole groups. Use OTBGRPOTrainer with `keep_groups_together=True` and "
                "`gradient_accumulation_steps` of 2 or more, at equal batch size"
            )
        elif args.world_size > 1 or args.fp16:
            reason = "it measures one process, without fp16, whose factor changes. `compare_baselines` takes any"
        if reason is not None:
            logger.warning(f"The gradient noise scale cannot be measured: {reason}.")
            return
        self._begin()
        for parameter in (parameter for parameter in model.parameters() if parameter.requires_grad):
            self._hooks.append(parameter.register_hook(self._add_part))
            self._hooks.append(parameter.register_post_accumulate_grad_hook(self._add_accumulated))

    # One optimizer step

    def _begin(self) -> None:
        self._micro_batch, self._parts, self._total = 0, torch.zeros(()), torch.zeros(())  # Σ_k ‖h_k‖² / K², ‖G‖²

    def _add_part(self, gradient: torch.Tensor) -> None:
        """Add a parameter's gradient of one micro-batch, before it is accumulated."""
        if not self.paused:
            self._parts = self._parts.to(gradient.device) + norm_of(gradient).square()

    def _add_accumulated(self, parameter: Any) -> None:
        """Add a parameter whose `grad` is the sum over the micro-batches so far."""
        if not self.paused and self._micro_batch == self.trainer.args.gradient_accumulation_steps - 1:
            self._total = self._total.to(parameter.device) + norm_of(parameter.grad).square()

    def on_substep_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._micro_batch += 1

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        parts, complete = args.gradient_accumulation_steps, self._micro_batch == args.gradient_accumulation_steps - 1
        # The gradient of a step sums 1/K of each part's own
        squares = self._parts.item() * parts, self._total.item()
        self._begin()
        if not (self._hooks and complete and all(map(math.isfinite, squares))):
            return
        noise, signal = noise_and_signal(*squares, parts)
        prompts_per_part = args.per_device_train_batch_size / args.num_generations
        new = torch.tensor([noise * prompts_per_part, signal, 1.0], dtype=torch.float64)
        self._averages = self.decay * self._averages + (1 - self.decay) * new
        if self.scale is not None:
            prompts, metrics = parts * prompts_per_part, self.trainer._metrics["train"]
            metrics["noise/scale"].append(self.scale)
            metrics["noise/batch_over_scale"].append(prompts / self.scale)
