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
    without gradient; trainer and random numbers stay as they are. False if no advantage has an effect.
    """
    probe = copy.copy(trainer)  # which gets the metrics, and the state of controllers
    probe._metrics, probe.importance_sampling_level = copy.deepcopy(trainer._metrics), "token"
    inputs = {key: value for key, value in inputs.items() if key != "old_per_token_logps"}  # so that nothing is clipped
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

    zeros = torch.zeros(len(mask), device=mask.device)  # and ones, as GRPOTrainer's own, one for each completion
    mixed = 1 + torch.arange(mask.numel(), device=mask.device).view_as(mask) / mask.numel()
    return check_product("GRPOTrainer._compute_loss", gradient, zeros, mixed, trainer.accelerator.gather)


def check_product(
    loss: str,
    gradient: Callable[[torch.Tensor], torch.Tensor],
    zeros: torch.Tensor,
    mixed: torch.Tensor,
    gather: Callable[[torch.Tensor], torch.Tensor],
) -> bool:
    """
    Raise an `ImportError`, on all processes, unless the `gradient` of the `loss` with respect to log-probs is linear in
    each token's own advantage, and falls with it: from the gradients for advantages of 0 and 1 that for the positive
    advantages `mixed` follows. Returns whether advantages have an effect on all processes.
    """
    problem, effect = "", False
    try:
        with torch.enable_grad():
            at_zero, at_one, at_mixed = map(gradient, (zeros, zeros + 1, mixed))
        slope = at_one - at_zero
        size, error = slope.abs().max(), (at_mixed - at_zero - mixed * slope).abs().max()
        effect = bool(size > 0)
        right = error <= 1e-3 * size and slope.max() <= 1e-3 * size and (effect or not at_zero.any())
        problem = "" if right else f": its gradient is off by {error.item():.3g} of {size.item():.3g}"
    except torch.OutOfMemoryError:
        raise
    except (AttributeError, IndexError, KeyError, RuntimeError, TypeError, ValueError) as error:  # as of shapes
        problem = f": {type(error).__name__}: {error}"
    failed, found = gather(torch.tensor([[problem != "", effect]], device=zeros.device).long()).unbind(dim=1)
    if failed.any():
        raise incompatible_trl(f"`{loss}` does not weight each token by its own advantage{problem}")
    return bool(found.all())
