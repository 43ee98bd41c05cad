"""Baselines that also use other prompts: partial pooling of leave-one-out means."""

import torch
from jaxtyping import Float
from torch import Tensor

from .completions import NOT_ZERO, Completions


def ogb_pooled(x: Completions) -> Float[Tensor, "B 1"]:
    """Per completion: the others' mean weighted by total energy W_T, pooled with the other prompts' mean.

        B_i = (1 − λ) b_(−i) + λ m,   b_(−i) = Σ_{j≠i} W_{T,j} R_j / Σ_{j≠i} W_{T,j}

    m is the mean of the other prompts' b; λ compares the noise of b_(−i) with the differences between prompts, see
    [`partial_pooling`].

    Source: this project, after https://arxiv.org/abs/2511.03710, which pools plain means ([`rloo_pooled`]). It assumes
    that the prompts of a batch predict each other; if they do not, it gains and loses little. Unbiased, since b_(−i), λ
    and m do not depend on completion i. With fewer than 3 prompts λ = 0; a prompt's only scored completion gets m.
    """
    return pooled(x, x.whole_returns, x.total_energy)


def rloo_pooled(x: Completions) -> Float[Tensor, "B 1"]:
    """Per completion: the mean of the others' returns, pooled with the other prompts' mean.

        B_i = (1 − λ) b_(−i) + λ m,   b_(−i) = Σ_{j≠i} R_j / (N − 1)

    λ, m, source, assumption and special cases are those of [`ogb_pooled`]; a James–Stein estimator. Needs no energies.
    Unbiased.
    """
    return pooled(x, x.whole_returns, torch.ones_like(x.scored))


def pooled(x: Completions, returns: Float[Tensor, "B T"], weights: Float[Tensor, "B 1"]) -> Float[Tensor, "B T"]:
    """
    The mean of the others' `returns`, pooled with the other prompts' mean; each column by itself.

    `weights` are those of completions; masked ones have none. If all are 0, the mean is plain.
    """
    weights, members = (weights * x.members).expand(returns.shape), x.grouped(x.members)
    left_one_out = x.grouped(x.weighted_mean(weights, returns, x.members, leave_one_out=True))
    alone = members * (members.sum(dim=1, keepdim=True) == 1)
    left_one_out = torch.where(alone > 0, x.grouped(returns.expand(weights.shape)), left_one_out)
    share, target = partial_pooling(left_one_out, members)
    return (left_one_out + share * (target - left_one_out)).reshape(returns.shape)


def partial_pooling(
    left_one_out: Float[Tensor, "G N T"], members: Float[Tensor, "G N 1"]
) -> tuple[Float[Tensor, "G N T"], Float[Tensor, "G 1 T"]]:
    """
    The share λ of the other prompts' mean in a completion's baseline, and that mean, m.

        λ = v / (v + τ² + (τ² + u) / k + 2 S² / k)

        v = mean of Σ_j (b_(−j) − b)²,   u = mean of (n − 1) / n Σ_j (b_(−j) − b)²,   τ² = max(0, s² − u)

    Means and s², the variance of the prompts' b, are over the k other prompts; b is the mean of a prompt's b_(−j). v
    is the jackknife variance of b_(−i), σ² / (n − 1) for the plain mean; τ² is the true variance between prompts, and
    τ² + (τ² + u) / k the squared error of m: with these terms alone λ minimizes the squared error of the mixture.
    2 S² / k allows for the error of τ²; S² is the variance of the k others' b and b_(−i), so a prompt unlike the others
    is pooled less (what other factors than 2 leave is a table of recipes/studies/ablations.md).

    A prompt with a single member, as all are for N = 1, has λ = 1. To the others its return is its b, with the u of one
    of their completions; it does not determine v. With no other prompt m = 0. `left_one_out` holds b_(−j), and for a
    single member its return; `members` is 1 for completions to count, else 0.
    """
    _, exponent = torch.frexp(left_one_out.abs().amax())
    unit = torch.ldexp(torch.ones_like(left_one_out[:1, :1, :1]), exponent)  # a power of 2: squares stay finite
    left_one_out = left_one_out / unit
    size = members.sum(dim=1, keepdim=True)
    has_member, has_pair = (size > 0).float(), (size > 1).float()
    other_prompts = has_member.sum() - has_member  # k

    def mean_of_other_prompts(values: torch.Tensor, kind: torch.Tensor = has_member) -> torch.Tensor:
        values = values * kind
        return (values.sum(dim=0) - values) / (kind.sum() - kind).clamp(min=1)

    centre = (left_one_out * members).sum(dim=1, keepdim=True) / size.clamp(min=1)
    noise = ((left_one_out - centre).square() * members).sum(dim=1, keepdim=True)
    # Relative to their mean, so that squares do not cancel
    origin = (centre * has_member).sum(dim=0) / has_member.sum().clamp(min=1)
    target = mean_of_other_prompts(centre - origin)
    square = mean_of_other_prompts((centre - origin).square())
    variance_of_one = mean_of_other_prompts(noise, has_pair)  # v
    # u, and of single members that of one completion
    variance_of_mean = mean_of_other_prompts(noise * (size - 1) / size.clamp(min=1))
    of_pairs = mean_of_other_prompts(noise * (size - 1).clamp(min=0), has_pair)
    variance_of_mean = variance_of_mean + mean_of_other_prompts(has_member - has_pair) * of_pairs
    about_target = (square - target.square()).clamp(min=0)
    between = (about_target * other_prompts / (other_prompts - 1).clamp(min=1) - variance_of_mean).clamp(min=0)  # τ²
    with_own = about_target + (left_one_out - origin - target).square() / (other_prompts + 1)  # S²
    variance_of_target = (between + variance_of_mean + 2 * with_own) / other_prompts.clamp(min=1)
    share = variance_of_one / (variance_of_one + between + variance_of_target).clamp(min=NOT_ZERO)
    # Of one other prompt no variance is known
    share = torch.where(has_pair > 0, share * (other_prompts > 1), 1.0)
    return share, torch.where(other_prompts > 0, target + origin, 0.0) * unit
