"""Energies of the Optimal Token Baseline, from forward probabilities only, in pure torch.

Notation of this package: B rows (completions), N completions per prompt, G = B / N groups, T positions of the
completion, V vocabulary; `mask` is 1 on tokens that the policy generated and 0 on padding and tool output. Equations
are from *The Optimal Token Baseline*, https://arxiv.org/abs/2602.07078.
"""

from typing import NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor


TOKENS_AT_ONCE = 128  # of which numbers for the whole vocabulary exist in float32


class TokenValues(NamedTuple):
    """What a forward computes for completions."""

    energy: Float[Tensor, "B T"]  # w_t, at the sampling temperature
    logps: Float[Tensor, "B T"]  # log π(y_t)
    states: Float[Tensor, "B T k"] | None  # projected hidden states at the positions that predict the tokens


def log_sum_sq_probs(logits: Float[Tensor, "*shape V"], temperature: float = 1.0) -> Float[Tensor, "*shape"]:
    """log Σ_v π(v)² at the temperature, float32, of one row or several, without a copy of the logits."""
    rows = logits if logits.dim() > 2 else logits.unsqueeze(0)
    blocks = (block.float() / temperature for row in rows for block in row.split(TOKENS_AT_ONCE))
    sums = [torch.logsumexp(2 * z, dim=-1) - 2 * torch.logsumexp(z, dim=-1) for z in blocks]
    return torch.cat(sums).view(logits.shape[:-1])


def token_energy(logps: Float[Tensor, "*shape"], log_sum_sq_probs: Float[Tensor, "*shape"]) -> Float[Tensor, "*shape"]:
    """
    The squared norm of each token's score with respect to the logits: the logit-gradient proxy (Proposition 4.2).

        w_t = ‖e_{y_t} − π_t‖² = 1 − 2·π_t(y_t) + Σ_v π_t(v)²

    Computed as (1 − π_t(y_t))² + Σ_{v≠y_t} π_t(v)², which rounding cannot make negative; float32, in [0, 2]: near 0 for
    a token that the policy was sure of, near 2 for a confident mistake. `logps` and `log_sum_sq_probs` are log π_t(y_t)
    and log Σ_v π_t(v)² at the sampling temperature. Where both are 0, as TRL leaves masked positions, w_t is 0.
    """
    logps, log_sum_sq_probs = logps.float(), log_sum_sq_probs.float()
    probs_of_others = (log_sum_sq_probs.exp() - (2 * logps).exp()).clamp_(min=0)
    return torch.expm1(logps).square_().add_(probs_of_others)


def importance_weighted(
    energy: Float[Tensor, "B T"], importance_weights: Float[Tensor, "B #T"] | None
) -> Float[Tensor, "B T"]:
    """ρ_t² w_t, float32, for importance ratios ρ_t = π(y_t) / μ(y_t) of policy π over sampler μ; 1 if `None`."""
    energy = energy.float()
    return energy if importance_weights is None else energy * importance_weights.float().square()


def check_energies(energy: Float[Tensor, "B T"], mask: Int[Tensor, "B T"] | Bool[Tensor, "B T"]) -> None:
    """Raise a `ValueError` that names row and token if an energy is not finite where `mask` is 1."""
    broken = ~energy.isfinite() & mask.bool()
    if broken.any():
        row, token = broken.nonzero()[0].tolist()
        raise ValueError(
            f"The energy of completion {row}, token {token}, is {energy[row, token].item()}: its log-probs or "
            "importance ratio are not finite, and it would spread to the whole group. Check the policy's weights, its "
            "precision (bfloat16 instead of float16) and the learning rate."
        )


def prefix_sums(x: Float[Tensor, "B T *more"]) -> Float[Tensor, "B T *more"]:
    """Sums along dimension 1; on the CPU under `full_determinism`, where PyTorch has none of floats on a GPU."""
    if x.is_cuda and torch.are_deterministic_algorithms_enabled():
        return x.cpu().cumsum(dim=1).to(x.device)
    return x.cumsum(dim=1)
