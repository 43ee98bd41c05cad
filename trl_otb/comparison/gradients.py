"""The gradient of one completion's log-probs, weighted per token, through the training forward."""

import re
from typing import Any

import torch

from ..seam.forwards import policy_of
from ..trainer import OTBGRPOTrainer
from .pools import logps_and_states


SMALL_MODEL = 2**22  # parameters; backward passes of a smaller model are taken together, as they wait for the calls
PROJECT_AT_ONCE = 2**26  # numbers of gradients that are projected together, a quarter of a GiB


def studied_parameters(trainer: OTBGRPOTrainer, pattern: str | None) -> list[torch.nn.Parameter]:
    """The trainable parameters whose name matches `pattern`, by default all; a `ValueError` if there is none."""
    named = {name: p for name, p in trainer.model.named_parameters() if p.requires_grad}
    if not (studied := [p for name, p in named.items() if re.search(pattern or "", name)]):
        raise ValueError(
            f"`parameters` is {pattern!r}, which none of {len(named)} trainable parameters holds: their names read "
            f"like {next(iter(named), None)!r}."
        )
    return studied


class Projection:
    """
    A random projection of gradients that keeps inner products: a count sketch, seeded, with nothing stored. ⟨Πa, Πb⟩ is
    unbiased for ⟨a, b⟩, with a standard error of at most ‖a‖ ‖b‖ √(2 / dimension). Π is the identity if `sizes`, the
    numbers of elements of parameters, sum to at most `dimension`.
    """

    def __init__(self, sizes: list[int], dimension: int, seed: int = 0) -> None:
        self.exact, self.seed = sum(sizes) <= dimension, seed
        self.dimension = sum(sizes) if self.exact else dimension

    def __call__(self, gradients: list[torch.Tensor]) -> torch.Tensor:
        """`(E, dimension)` float32 projections, on the CPU, of E gradients: one tensor `(E, …)` per parameter."""
        flat = [gradient.flatten(1).float() for gradient in gradients]
        if self.exact:
            return torch.cat(flat, dim=1).cpu()
        device = flat[0].device
        result = torch.zeros(len(flat[0]), self.dimension, device=device)
        for i, gradient in enumerate(flat):
            random = torch.Generator(device=device).manual_seed(self.seed * 1_000_003 + i)
            place = torch.randint(2 * self.dimension, gradient.shape[1:], generator=random, device=device)
            sign = 1 - 2 * (place % 2)  # its parity
            result.index_add_(1, place // 2, gradient * sign)
        return result.cpu()


class CompletionGradients:
    """
    Σ_t A_t ∇ log π(y_t) of one completion, for several A at once, with respect to the studied parameters. A token's
    log-prob depends on the model's body only through the LM head's input at its position: the head's backward pass runs
    once, and each A weights its result.
    """

    def __init__(self, trainer: OTBGRPOTrainer, parameters: list[torch.nn.Parameter], projection: Projection) -> None:
        self.trainer, self.parameters, self.projection = trainer, parameters, projection
        of_head = {id(p) for p in policy_of(trainer.model).get_output_embeddings().parameters()}
        self.in_head = [i for i, p in enumerate(parameters) if id(p) in of_head]
        self.is_small = sum(p.numel() for p in policy_of(trainer.model).parameters()) <= SMALL_MODEL
        self.together = max(1, PROJECT_AT_ONCE // sum(p.numel() for p in parameters))

    def __call__(self, row: dict[str, Any], weights: torch.Tensor) -> torch.Tensor:
        """`(E, dimension)` float32, for one of `single_rows` and `(E, T)` A of each estimator, 0 off the mask."""
        length = row["completion_ids"].size(1)
        if length == 0:  # masked, as `mask_truncated_completions` does
            return torch.zeros(len(weights), self.projection.dimension)
        weights = weights[:, :length].float()
        logps, leaf, body = logps_and_states(self.trainer, row)
        (score,) = torch.autograd.grad(logps.sum(), leaf, retain_graph=True)  # the last position has none
        padded = torch.nn.functional.pad(weights, (leaf.size(1) - 1 - length, 1))
        projected = []
        for some, padded_some in zip(weights.split(self.together), padded.split(self.together), strict=True):
            gradients = self._of_body(body, padded_some[:, None, :, None] * score)
            for i, of_head in zip(self.in_head, self._of_head(logps, some), strict=True):
                gradients[i] = gradients[i] + of_head
            projected.append(self.projection(gradients))
        return torch.cat(projected)

    def _of_body(self, body: torch.Tensor, pulls: torch.Tensor) -> list[torch.Tensor]:
        result = [p.new_zeros(len(pulls), *p.shape) for p in self.parameters]
        if not body.requires_grad:  # the head alone is trained
            return result
        pulls = pulls.to(body.dtype)
        how: dict[str, Any] = {"retain_graph": True, "allow_unused": True, "is_grads_batched": self.is_small}
        for at, pull in [(slice(None), pulls)] if self.is_small else enumerate(pulls):
            gradients = torch.autograd.grad(body, self.parameters, pull, **how)
            for of_parameter, gradient in zip(result, gradients, strict=True):
                if gradient is not None:
                    of_parameter[at] = gradient
        return result

    def _of_head(self, logps: torch.Tensor, weights: torch.Tensor) -> list[torch.Tensor]:
        parameters = [self.parameters[i] for i in self.in_head]
        if not parameters:
            return []
        each = [torch.autograd.grad(logps, parameters, a.unsqueeze(0).to(logps), retain_graph=True) for a in weights]
        return [torch.stack(of) for of in zip(*each, strict=True)]
