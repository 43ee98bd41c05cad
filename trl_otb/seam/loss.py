"""The loss for advantages per token, and a check that TRL's loss takes them."""

import copy
from collections.abc import Callable
from functools import partial
from typing import Any
from unittest.mock import patch

import torch
from trl import GRPOTrainer

from ..rollout import generated_mask
from .contract import incompatible_trl


class TokenLoss(GRPOTrainer):
    """
    A [`~trl.GRPOTrainer`] whose loss takes one advantage per token, `(B, T)`, with all of its options.

    GSPO (`importance_sampling_level="sequence"`) weights a completion by s = exp(mean_t log π(y_t)/π_old(y_t)), one
    ratio for all tokens, so every token gets the completion's advantage. GSPO-token (https://arxiv.org/abs/2507.18071,
    section 4.3) uses sg[s] · π(y_t) / sg[π(y_t)], where sg stops the gradient: its value is s, its gradient the
    token's own. With one advantage per completion the two have the same gradient. TRL's loss with ratios per token
    computes this if the old log-probs are sg[log π(y_t)] − log s.
    """

    loss_is_known = False  # to take advantages per token

    def _compute_loss(self, model: Any, inputs: dict[str, Any]) -> torch.Tensor:
        per_token = inputs["advantages"].dim() > 1
        if per_token and not self.loss_is_known:
            self.loss_is_known = check_token_loss(self, inputs)
        if self.importance_sampling_level != "sequence" or not per_token:
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


def check_token_loss(trainer: GRPOTrainer, inputs: dict[str, Any]) -> bool:
    """
    Raise an `ImportError` unless TRL's loss of a micro-batch weights each token by its own advantage. One forward
    without gradient; trainer and random numbers stay as they are. False if no completion has two tokens.
    """
    probe = copy.copy(trainer)  # which gets the metrics, and the state of controllers
    probe._metrics, probe.importance_sampling_level = copy.deepcopy(trainer._metrics), "token"
    computed, mask = list[Any](), generated_mask(inputs)

    def gradient(advantages: torch.Tensor) -> torch.Tensor:
        def forward(*args: Any, **kwargs: Any) -> Any:
            if not computed:
                with torch.no_grad(), torch.random.fork_rng([mask.device] if mask.is_cuda else []):
                    computed.extend(trainer._get_per_token_logps_and_entropies(*args, **kwargs))
                computed[0] = computed[0].detach().requires_grad_()
            return computed

        probe._get_per_token_logps_and_entropies = forward
        loss = GRPOTrainer._compute_loss(probe, trainer.model, inputs | {"advantages": advantages})
        return torch.autograd.grad(loss, computed[0])[0] * mask

    low = 1 + torch.arange(len(mask), device=mask.device) / len(mask)
    at_first = torch.arange(mask.size(1), device=mask.device) < mask.sum(dim=1, keepdim=True) // 2
    mixed = torch.where(at_first, low.unsqueeze(1), 2 * low.unsqueeze(1))
    found = check_product("GRPOTrainer._compute_loss", gradient, (low, 2 * low, mixed), at_first)
    return bool(trainer.accelerator.gather(found).all())  # for all processes, as the loss calls collectives


def check_product(
    loss: str,
    gradient: Callable[[torch.Tensor], torch.Tensor],
    advantages: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    at_first: torch.Tensor,
) -> torch.Tensor:
    """
    Raise an `ImportError` unless the `gradient` of the `loss` with respect to log-probs is, for advantages that differ
    within completions, where `at_first` that for the first of three `advantages`, and elsewhere that for the second.
    Returns whether some were different, `(1,)`.
    """
    try:
        with torch.enable_grad():
            first, second, mixed = map(gradient, advantages)
        expected = torch.where(at_first, first, second)
        same = torch.allclose(mixed, expected, rtol=1e-3, atol=1e-3 * expected.abs().max().item())
        problem = "" if same else f": gradients differ by {(mixed - expected).abs().max().item():.3g}"
    except Exception as error:  # of shapes, of all kinds
        problem = f": {type(error).__name__}: {error}"
    if problem:
        raise incompatible_trl(f"`{loss}` does not weight each token by its own advantage{problem}")
    return ((first * at_first).any() & (second * ~at_first).any()).long().view(1)
