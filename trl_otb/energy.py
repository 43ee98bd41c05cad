"""Energies of the Optimal Token Baseline, from forward probabilities only, in pure torch.

Notation of this package: B rows (completions), N completions per prompt, G = B / N groups, T positions of the
completion, V vocabulary; `mask` is 1 on tokens that the policy generated and 0 on padding and tool output. Equations
are from *The Optimal Token Baseline*, https://arxiv.org/abs/2602.07078.
"""

import torch


def token_energy(logps: torch.Tensor, log_sum_sq_probs: torch.Tensor) -> torch.Tensor:
    """
    The squared norm of each token's score with respect to the logits: the logit-gradient proxy (Proposition 4.2).

        w_t = ‖e_{y_t} − π_t‖² = 1 − 2·π_t(y_t) + Σ_v π_t(v)²

    Computed as (1 − π_t(y_t))² + Σ_{v≠y_t} π_t(v)², which rounding cannot make negative.

    Args:
        logps (`torch.Tensor` of shape `(B, T)`):
            log π_t(y_t), natural logarithm, at the sampling temperature.
        log_sum_sq_probs (`torch.Tensor` of shape `(B, T)`):
            log Σ_v π_t(v)² of the same distributions. Where both are 0, as TRL leaves masked positions, w_t is 0.

    Returns:
        `torch.Tensor` of shape `(B, T)`, always float32, in [0, 2]: near 0 for a token that the policy was sure of,
        near 2 for a confident mistake.

    Raises:
        ValueError: The two shapes differ.
    """
    if logps.shape != log_sum_sq_probs.shape:
        raise ValueError(
            f"`logps` has shape {tuple(logps.shape)} and `log_sum_sq_probs` {tuple(log_sum_sq_probs.shape)}: they "
            "must come from the same forward and agree."
        )
    logps, log_sum_sq_probs = logps.float(), log_sum_sq_probs.float()
    probs_of_others = (log_sum_sq_probs.exp() - (2 * logps).exp()).clamp_(min=0)
    return torch.expm1(logps).square_().add_(probs_of_others)


def importance_weighted(energy: torch.Tensor, importance_weights: torch.Tensor | None) -> torch.Tensor:
    """
    ρ_t² w_t: the energy of a token in a loss that multiplies the token by its importance ratio.

    Args:
        energy (`torch.Tensor` of shape `(B, T)`):
            w_t, see [`token_energy`].
        importance_weights (`torch.Tensor` of shape `(B, T)` or `(B, 1)`, *optional*):
            Rollout importance ratios ρ_t = π(y_t) / μ(y_t) of policy π over sampler μ, per token or per completion; 1
            if omitted.

    Returns:
        `torch.Tensor` of shape `(B, T)`, float32.
    """
    energy = energy.float()
    return energy if importance_weights is None else energy * importance_weights.float().square()


def check_energies(energy: torch.Tensor, mask: torch.Tensor, rows: torch.Tensor | None = None) -> None:
    """
    Args:
        energy (`torch.Tensor` of shape `(B, T)`):
            ρ_t² w_t. Values where `mask` is 0 are ignored.
        mask (`torch.Tensor` of shape `(B, T)`):
            1 on generated tokens.
        rows (`torch.Tensor` of shape `(B,)`, *optional*):
            Row numbers for the error message; by default 0, 1, ….

    Raises:
        ValueError: An energy is not finite. The message names its row and token.
    """
    broken = ~energy.isfinite() & mask.bool()
    if broken.any():
        row, token = broken.nonzero()[0].tolist()
        raise ValueError(
            f"The energy of completion {row if rows is None else int(rows[row])}, token {token}, is "
            f"{energy[row, token].item()}: its log-probs or importance ratio are not finite, and it would spread to "
            "the whole group. Check the policy's weights, its precision (bfloat16 instead of float16) and the "
            "learning rate."
        )


def realized_energy(
    energy: torch.Tensor, mask: torch.Tensor, importance_weights: torch.Tensor | None = None
) -> torch.Tensor:
    """
    Realized energy (Definition 3.1): W_t = Σ_{j≤t} ρ_j² w_j over the tokens that the policy generated.

    Args:
        energy (`torch.Tensor` of shape `(B, T)`):
            w_t, see [`token_energy`]. Values where `mask` is 0 are ignored and may be NaN.
        mask (`torch.Tensor` of shape `(B, T)`):
            1 on generated tokens.
        importance_weights (`torch.Tensor` of shape `(B, T)` or `(B, 1)`, *optional*):
            See [`importance_weighted`].

    Returns:
        `torch.Tensor` of shape `(B, T)`, float32, non-decreasing along T.
    """
    return importance_weighted(energy, importance_weights).masked_fill(~mask.bool(), 0.0).cumsum(dim=1)
