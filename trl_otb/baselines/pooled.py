"""Baselines that also use other prompts: partial pooling of leave-one-out means."""

import torch

from .groups import LEAST_WEIGHT, Completions, Groups
from .registry import Baseline, built_in


@built_in(per_token=False, uses_energy=True, leaves_one_out=True, across_prompts=True, totals_only=True, unbiased=True)
def ogb_pooled(group: Completions) -> torch.Tensor:
    """Per completion: the others' mean weighted by total energy W_T, pooled with the other prompts' mean.

        B_i = (1 − λ) b_(−i) + λ m,   b_(−i) = Σ_{j≠i} W_{T,j} R_j / Σ_{j≠i} W_{T,j}

    m is the mean of the other prompts' b; λ compares the noise of b_(−i) with the differences between prompts, see
    [`partial_pooling`].

    Source: this project, after https://arxiv.org/abs/2511.03710, which pools plain means ([`rloo_pooled`]).

    Assumptions: the prompts of a batch are similar enough to predict each other. If they are not, it gains and loses
    little: Σ (R − B)² relative to `ogb` with one left out, for 4 completions of equal energy, is 1.00 with 4 and 0.97
    with 16 prompts of U-shaped success rates, and 0.85 and 0.77 with similar prompts (tests/maths/test_pooling.py).

    Bias: unbiased, since b_(−i), λ and m do not depend on completion i.

    Special cases: with fewer than 3 prompts in a generation batch, λ = 0. The only completion of a prompt with a
    reward gets m. `scale_rewards="group"` is rejected: groups of equal returns have advantages here, which it would
    divide by almost nothing. All prompts' energies are needed at once, which costs an extra no-grad forward if TRL
    runs none before the loss.

    Use it for N of 2 to 8 and 4 or more prompts per generation batch. Do not use it where high energy marks success,
    as in long games (`rloo_pooled` does as well), or where hidden states predict the return (`value` has less noise).

    Evidence: at N = 4 it has less noise than `ogb` with one left out on all ten toy tasks; relative to the group mean
    0.71, 0.75 and 0.79 on answers of 10, 30 and 100 tokens, 0.45 on the calculator, 0.92 on mixed lengths
    (recipes/studies/value.md); 0.62 with SmolLM2 copying, 0.95 (0.91–1.01) telling stories (language.md).
    """
    return _pooled(group, group.total_energy)


@built_in(per_token=False, uses_energy=True, leaves_one_out=True, across_prompts=True, totals_only=True)
def ogb_pooled_damped(group: Completions) -> torch.Tensor:
    """Per completion: `ogb_pooled`, with advantages damped by the completion's share of its group's energy.

        A_i = d_i² (R_i − B_i),   d_i = (1 − ω_i) N / (N − 1),   ω_i = W_{T,i} / Σ_j W_{T,j}

    B_i is the baseline of [`ogb_pooled`]. The noise of a completion's term is about W_T A², so d² gives noisy terms
    less weight. `ogb` damps once, by the completion's own return: (1 − ω_i) (R_i − b_(−i)). The factor N / (N − 1)
    makes d = 1 if all energies are equal.

    Source: this project. The power 2 was chosen among 1/2, 1 and 2, and among other factors, as the most efficient one
    with a cosine of at least 0.99 to the true gradient.

    Assumptions: those of `ogb_pooled`.

    Bias: biased, since d depends on the completion: improbable completions teach less, and a lone improbable success
    almost nothing (recipes/reference.md). The bias shrinks with N.

    Special cases: if no energy is above 0, d = 1. The only completion of a prompt with a reward has A = 0.
    `scale_rewards="group"` is rejected, as for [`ogb_pooled`].

    Use it instead of `ogb_pooled` for N of 4 or more if a small bias is acceptable. Do not use it at N = 2, where it
    was less efficient on one task, or for rare successes.

    Evidence: at N = 4, cosine 0.993 to 1.000; more efficient than `ogb_pooled` except on the longest tasks, 300 tokens
    and 46 turns, where they are equal (recipes/studies/shrinkage.md). Noise relative to the group mean: 0.59, 0.68 and
    0.78 on answers of 10, 30 and 100 tokens (value.md), 0.26 with SmolLM2 copying (language.md). In learning curves
    the two do not differ significantly.
    """
    weights = torch.add(group.total_energy, _members(group), alpha=LEAST_WEIGHT)
    size = _members(group).sum(dim=1, keepdim=True)
    of_others = 1 - weights / weights.sum(dim=1, keepdim=True).clamp(min=LEAST_WEIGHT)
    damping = (of_others * size / (size - 1).clamp(min=1)).square()
    return group.returns - damping * (group.returns - _pooled(group, group.total_energy))


@built_in(
    per_token=False, uses_energy=False, leaves_one_out=True, across_prompts=True, totals_only=True, unbiased=True
)
def rloo_pooled(group: Completions) -> torch.Tensor:
    """Per completion: the mean of the others' returns, pooled with the other prompts' mean.

        B_i = (1 − λ) b_(−i) + λ m,   b_(−i) = Σ_{j≠i} R_j / (N − 1)

    λ and m are as in [`ogb_pooled`].

    Source: a James–Stein estimator, after https://arxiv.org/abs/2511.03710.

    Assumptions and special cases: those of `ogb_pooled`. Needs no energies.

    Bias: unbiased.

    Use it if the energies of `ogb_pooled` would cost a forward, or as its control. Do not use it where wrong tokens
    are improbable, as in arithmetic: `ogb_pooled` has less noise there.

    Evidence: at N = 4 it has 0.79, 0.81 and 0.80 of the group mean's noise on answers of 10, 30 and 100 tokens
    (recipes/studies/value.md), and 0.76 to 0.80 in games of 6 to 46 turns (turns.md).
    """
    return _pooled(group, _members(group))


def _rewards_to_go_pooled(group: Groups) -> torch.Tensor:
    """Per token: `rloo_pooled` of the reward-to-go; an ended completion keeps that of its last token."""
    return _pooled(group, _members(group).expand(group.shape))


# `rloo_pooled` for rewards per token; `rloo_pooled` itself sums them
REWARDS_TO_GO_POOLED = Baseline(
    "rewards_to_go_pooled",
    _rewards_to_go_pooled,
    uses_energy=False,
    leaves_one_out=True,
    across_prompts=True,
    unbiased=True,
    built_in=True,
)


def _members(group: Completions) -> torch.Tensor:
    """`(G, N, 1)` 1 for completions with a reward that are not masked: truncated ones say little about a prompt."""
    return group.scorable * (group.lengths > 0)


def _pooled(group: Completions, weights: torch.Tensor) -> torch.Tensor:
    members = _members(group)
    # If all weights are 0: the members' plain mean, or without members that of all completions with a reward
    left_one_out = group.mean(torch.add(weights, members, alpha=1e10 * LEAST_WEIGHT), leave_one_out=True)
    share, target = partial_pooling(left_one_out, members)
    return left_one_out + share * (target - left_one_out)


def partial_pooling(left_one_out: torch.Tensor, members: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """
    The share λ of the other prompts' mean in a completion's baseline, and that mean, m.

        λ = v / (v + τ² + (τ² + u) / k + 2 S² / k)

        v = mean of Σ_j (b_(−j) − b)²,   u = mean of (n − 1) / n Σ_j (b_(−j) − b)²,   τ² = max(0, s² − u)

    Means and s², the variance of the prompts' b, are over the k other prompts; b is the mean of a prompt's b_(−j). v
    is the jackknife variance of b_(−i), σ² / (n − 1) for the plain mean; τ² is the true variance between prompts, and
    τ² + (τ² + u) / k the squared error of m: with these terms alone λ minimizes the squared error of the mixture.
    2 S² / k allows for the error of τ², which is estimated from k prompts; S² is the variance of the k others' b and
    b_(−i), so a prompt unlike the others is pooled less. b_(−i), λ and m do not depend on completion i. Prompts with a
    single member are ignored.

    https://arxiv.org/abs/2511.03710 uses v / (v + s²), the same for all prompts of a batch: about a half at most.

    Args:
        left_one_out (`torch.Tensor` of shape `(G, N, 1)` or `(G, N, T)`):
            b_(−j), the baseline with completion j left out; tokens are independent of each other.
        members (`torch.Tensor` of shape `(G, N, 1)`):
            1 for completions to count, else 0.

    Returns:
        `tuple[torch.Tensor, torch.Tensor]`: λ, with the shape of `left_one_out`, and m, with 1 instead of N.
    """
    size = members.sum(dim=1, keepdim=True)
    known = (size > 1).float()
    others = known.sum() - known  # k

    def of_others(values: torch.Tensor) -> torch.Tensor:
        values = values * known
        return (values.sum(dim=0) - values) / others.clamp(min=1)

    centre = (left_one_out * members).sum(dim=1, keepdim=True) / size.clamp(min=1)
    noise = ((left_one_out - centre).square() * members).sum(dim=1, keepdim=True)
    # Relative to their mean, so that squares do not cancel
    origin = (centre * known).sum(dim=0) / known.sum().clamp(min=1)
    target, square = of_others(centre - origin), of_others((centre - origin).square())
    of_one, of_mean = of_others(noise), of_others(noise * (size - 1) / size.clamp(min=1))  # v and u
    about_target = (square - target.square()).clamp(min=0)
    between = (about_target * others / (others - 1).clamp(min=1) - of_mean).clamp(min=0)  # τ²
    with_own = about_target + (left_one_out - origin - target).square() / (others + 1)  # S²
    of_target = (between + of_mean + 2 * with_own) / others.clamp(min=1)
    share = of_one / (of_one + between + of_target).clamp(min=1e-20)
    share = torch.where(known > 0, share, 1.0)  # a single completion has no baseline of its own
    return share * (others > 1), target + origin
