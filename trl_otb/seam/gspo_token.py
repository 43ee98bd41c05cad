"""GSPO-token: the sequence's importance ratio for every token, which allows one advantage per token.

GSPO (`importance_sampling_level="sequence"`) weights a completion by s = exp(mean_t log π(y_t)/π_old(y_t)), one ratio
for all tokens, so every token gets the completion's advantage. GSPO-token (https://arxiv.org/abs/2507.18071, section
4.3) uses sg[s] · π(y_t) / sg[π(y_t)], where sg stops the gradient: its value is s, its gradient the token's own. With
one advantage per completion the two have the same gradient.

TRL's loss with ratios per token computes this if the old log-probs are sg[log π(y_t)] − log s.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from ..rollout import generated_mask


@contextmanager
def ratios_per_token(trainer: Any) -> Iterator[None]:
    """Context in which the loss uses ratios per token."""
    trainer.importance_sampling_level = "token"
    try:
        yield
    finally:
        trainer.importance_sampling_level = "sequence"


def spread_sequence_ratio(inputs: dict[str, Any], logps: torch.Tensor) -> None:
    """Set the micro-batch's old log-probs so that each token's ratio is its sequence's."""
    old_logps = inputs.get("old_per_token_logps")
    if old_logps is None:  # on-policy: all ratios are 1
        return
    mask, logps = generated_mask(inputs), logps.detach()
    log_ratio = ((logps - old_logps) * mask).sum(-1, keepdim=True) / mask.sum(-1, keepdim=True).clamp(min=1)
    inputs["old_per_token_logps"] = logps - log_ratio
