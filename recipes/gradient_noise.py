"""
How noisy is my run? A trainer that logs the gradient noise scale, measured from the micro-batches of its steps.

    from recipes.gradient_noise import NoiseScaleTrainer      # or copy this file; in the place of OTBGRPOTrainer

It needs one process without fp16, `gradient_accumulation_steps` of at least 2, and whole groups in a micro-batch:
`per_device_train_batch_size` is a multiple of `num_generations`. Of whole groups, another order of rows is trained;
measuring changes nothing. `trl_otb.compare_baselines` measures noise under other baselines, too, in any run.
"""

import math
from typing import Any
from unittest.mock import patch

import torch
from transformers import TrainerCallback
from trl.trainer import grpo_trainer

from trl_otb import OTBGRPOTrainer


def noise_and_signal(mean_square_of_parts: float, square_of_mean: float, parts: int) -> tuple[float, float]:
    """
    Unbiased estimates of S and ‖g‖² from the gradients h_1 … h_K of K ≥ 2 parts of a batch and their mean G: from
    Σ_k ‖h_k‖² / K and ‖G‖². S is the trace of the covariance of a part's gradient, g the true gradient (McCandlish et
    al., appendix A.1, https://arxiv.org/abs/1812.06162). A single estimate may be negative.

        E‖h‖² = ‖g‖² + S,   E‖G‖² = ‖g‖² + S / K
    """
    noise = (mean_square_of_parts - square_of_mean) / (1 - 1 / parts)
    return noise, square_of_mean - noise / parts


def square_of(gradient: torch.Tensor) -> torch.Tensor:
    return torch.linalg.vector_norm(gradient, dtype=torch.float64).square()


class GradientNoiseCallback(TrainerCallback):
    """
    Logs, from exponential averages of noise and signal, with gradients before clipping:

    - `noise/scale`: the number of prompts per step at which the gradient's noise equals its signal. Far more prompts
      hardly improve a step; with far fewer it is mostly noise.
    - `noise/batch_over_scale`: the run's prompts per step over this number, the inverse of a step's noise to signal.

    The completions of a prompt share a baseline, so prompts are the independent units, and the parts of a batch that
    are compared, its micro-batches, hold whole groups: [`NoiseScaleTrainer`] adds this callback and keeps them whole.
    Each gradient is read once per micro-batch and not stored.
    """

    decay_per_step = 0.9

    def __init__(self, trainer: OTBGRPOTrainer) -> None:
        self.trainer, self._hooks, self._in_step = trainer, [], False
        self._averages = torch.zeros(3, dtype=torch.float64)  # of noise, signal, and 1, each from 0

    @property
    def scale(self) -> float | None:
        """The noise scale in prompts; `None` if it is not yet known, or the signal is lost in noise."""
        noise, signal, weight = self._averages.tolist()
        return noise / signal if weight > 0 and signal > 0 else None

    def on_train_begin(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        self.on_train_end(args, state, control)  # of a training that an error ended
        for parameter in (parameter for parameter in model.parameters() if parameter.requires_grad):
            self._hooks.append(parameter.register_hook(self._add_part))
            self._hooks.append(parameter.register_post_accumulate_grad_hook(self._add_accumulated))

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        while self._hooks:
            self._hooks.pop().remove()
        self._in_step = False

    # One optimizer step; between steps, as in a comparison of baselines, gradients are not the run's

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._in_step, self._micro_batch = True, 0
        self._parts = self._total = torch.zeros((), dtype=torch.float64)  # Σ_k ‖h_k‖² / K², ‖G‖²

    def _add_part(self, gradient: torch.Tensor) -> None:
        """Add a parameter's gradient of one micro-batch, before it is accumulated."""
        if self._in_step:
            self._parts = self._parts.to(gradient.device) + square_of(gradient)

    def _add_accumulated(self, parameter: Any) -> None:
        """Add a parameter whose `grad` is the sum over all micro-batches."""
        if self._in_step and self._micro_batch == self.trainer.args.gradient_accumulation_steps - 1:
            self._total = self._total.to(parameter.device) + square_of(parameter.grad)

    def on_substep_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._micro_batch += 1

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._in_step, parts = False, args.gradient_accumulation_steps
        # The gradient of a step sums 1/K of each part's own
        squares = self._parts.item() * parts, self._total.item()
        if self._micro_batch < parts - 1 or not all(map(math.isfinite, squares)):
            return
        noise, signal = noise_and_signal(*squares, parts)
        prompts_per_part = args.per_device_train_batch_size / args.num_generations
        new = torch.tensor([noise * prompts_per_part, signal, 1.0], dtype=torch.float64)
        self._averages = self.decay_per_step * self._averages + (1 - self.decay_per_step) * new
        if self.scale is not None:
            metrics = self.trainer._metrics["train"]
            metrics["noise/scale"].append(self.scale)
            metrics["noise/batch_over_scale"].append(parts * prompts_per_part / self.scale)


class NoiseScaleTrainer(OTBGRPOTrainer):
    """An [`OTBGRPOTrainer`] whose micro-batches hold whole groups, with the gradient noise scale in its log."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        size, parts, n = (
            self.args.per_device_train_batch_size,
            self.args.gradient_accumulation_steps,
            self.num_generations,
        )
        if size % n > 0:
            raise ValueError(
                f"`per_device_train_batch_size` is {size}: whole groups need a multiple of `num_generations`, {n}."
            )
        if parts < 2:
            raise ValueError(
                f"`gradient_accumulation_steps` is {parts}: the noise is that of micro-batches. Set 2 or more, and a "
                "smaller `per_device_train_batch_size`."
            )
        if self.accelerator.num_processes > 1 or self.args.fp16:
            raise ValueError(
                f"The noise scale is measured in one process without fp16; here are {self.accelerator.num_processes} "
                f"and fp16={self.args.fp16}. `trl_otb.compare_baselines` supports both."
            )
        self.gradient_noise = GradientNoiseCallback(self)
        self.add_callback(self.gradient_noise)

    def _prepare_inputs(self, generation_batch: Any) -> dict[str, Any]:
        with patch.object(grpo_trainer, "shuffle_sequence_dict", self._shuffled_by_groups):
            return super()._prepare_inputs(generation_batch)

    def _shuffled_by_groups(self, batch: dict[str, Any], shuffle: Any = grpo_trainer.shuffle_sequence_dict) -> Any:
        n = self.num_generations
        order = torch.randperm(len(batch["completion_ids"]))  # draws as many random numbers as GRPOTrainer
        rows = (order[order % n == 0].unsqueeze(1) + torch.arange(n)).flatten()
        with patch.object(torch, "randperm", lambda size: rows):
            return shuffle(batch)
