"""Baselines that look at other prompts too: partial pooling of leave-one-out means."""

import torch

from .groups import LEAST_WEIGHT, Completions, Groups
from .registry import Baseline, built_in


@built_in(per_token=False, uses_energy=True, leaves_one_out=True, across_prompts=True, totals_only=True, unbiased=True)
def ogb_pooled(group: Completions) -> torch.Tensor:
    """Per completion: the others' mean weighted by total energy W_T, pooled with that of the other prompts.

        B_i = (1 − λ) b_(−i) + λ m,   b_(−i) = Σ_{j≠i} W_{T,j} R_j / Σ_{j≠i} W_{T,j}

    m is the mean of the other prompts' b, and λ says how much of b_(−i) is noise, beside how far prompts differ: see
    [`partial_pooling`]. This project's own; the idea is that of https://arxiv.org/abs/2511.03710, there for the plain
    mean ([`rloo_pooled`]).

    Assumes that the prompts of a batch are alike enough for one to say something about another. Where they are not, it
    neither gains nor loses: with success rates spread as a U (Beta(0.3, 0.3)), 4 completions of equal energy and 4
    prompts, Σ (R − B)² is 1.00 of that of `ogb` with one left out, with 16 prompts 0.97; of alike prompts 0.85 and
    0.77 (tests/maths/test_pooling.py). Unbiased: neither b_(−i) nor λ and m look at completion i. The fewer the
    completions per prompt, the more it gains: in recipes/studies, at N = 4, it had less noise than `ogb` with one
    left out on all ten tasks; on prompts of mixed lengths and difficulty, and on a language model's stories, whose
    prompts are very unequal, it gains a tenth or less. `value` has less noise where states tell something.

    Degenerate cases: with fewer than 3 prompts in a generation batch, λ = 0. A completion that is the only scorable
    one of its prompt gets m. `scale_rewards="group"` is refused: a group whose returns are all equal has advantages
    here, and they would be divided by almost nothing.

    Energies of all prompts are needed at once: where TRL runs no forward before the loss, one extra no-gradient
    forward is run. Use it for small N and 4 or more prompts per generation batch. Where energy marks success rather
    than mistakes, as in long games, `rloo_pooled` does as well.
    """
    return _pooled(group, group.total_energy)


@built_in(per_token=False, uses_energy=True, leaves_one_out=True, across_prompts=True, totals_only=True)
def ogb_pooled_damped(group: Completions) -> torch.Tensor:
    """Per completion: as `ogb_pooled`, its advantages damped by the completion's share of the group's energy.

        A_i = d_i² (R_i − B_i),   d_i = (1 − ω_i) N / (N − 1),   ω_i = W_{T,i} / Σ_j W_{T,j}

    B_i is that of [`ogb_pooled`], whose assumptions it shares. The noise of a completion's term is about W_T A², so
    terms of large energy are noisy: like the weights of measurements of unequal variance, d² lets them count for less.
    A completion's own return in its baseline damps too, once: `ogb` is (1 − ω_i) (R_i − b_(−i)). The factor
    N / (N − 1) makes d = 1 where all energies are equal. This project's own.

    Biased, as d depends on the completion: improbable completions teach less, and a lone improbable success nearly
    nothing (recipes/reference.md). The bias shrinks with N. In
    recipes/studies the gradient's expectation had a cosine of 0.993 to 1.000 to the true one at N = 4, and its
    efficiency was above that of `ogb_pooled` but on the longest tasks, 300 tokens and 46 turns, where they were equal;
    at N = 2 it was below on one. In learning the two are not told apart. The power 2 was chosen among 1/2, 1 and 2,
    and among other factors, as the most efficient with a cosine of at least 0.99.

    Degenerate cases: where no energy is above 0, d = 1. A completion that is the only scorable one of its prompt has
    all of its energy, so A = 0. `scale_rewards="group"` is refused, as for [`ogb_pooled`].

    Use it instead of `ogb_pooled` for N of 4 or more, where a small bias is fine.
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
    """Per completion: the mean of the others' returns, pooled with that of the other prompts.

        B_i = (1 − λ) b_(−i) + λ m,   b_(−i) = Σ_{j≠i} R_j / (N − 1)

    A James–Stein estimator in the manner of https://arxiv.org/abs/2511.03710; λ and m as in [`ogb_pooled`], whose
    assumptions and degenerate cases it shares. Unbiased, as that is. Needs no energies. Use it where those of
    `ogb_pooled` would cost a forward, or as its control.
    """
    return _pooled(group, _members(group))


def _rewards_to_go_pooled(group: Groups) -> torch.Tensor:
    """Per token: `rloo_pooled` of the reward-to-go, a completion that has ended keeping that of its last token."""
    return _pooled(group, _members(group).expand(group.shape))


# What `rloo_pooled` is for rewards per token; by itself it sums them
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
    """`(G, N, 1)` 1 for completions that can be scored and are not masked: one cut off says little of its prompt."""
    return group.scorable * (group.lengths > 0)


def _pooled(group: Completions, weights: torch.Tensor) -> torch.Tensor:
    members = _members(group)
    # Where all weights are 0: the members' plain mean and, without any, that of all who can be scored
    left_one_out = group.mean(torch.add(weights, members, alpha=1e10 * LEAST_WEIGHT), leave_one_out=True)
    share, target = partial_pooling(left_one_out, members)
    return left_one_out + share * (target - left_one_out)


def partial_pooling(left_one_out: torch.Tensor, members: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """
    How much of the other prompts' mean to mix into a completion's baseline, λ, and that mean, m.

        λ = v / (v + τ² + (τ² + u) / k + 2 S² / k)

        v = mean of Σ_j (b_(−j) − b)²,   u = mean of (n − 1) / n Σ_j (b_(−j) − b)²,   τ² = max(0, s² − u)

    Means and s², the variance of the prompts' b, are over the k other prompts; b is the mean of a prompt's b_(−j). v,
    by the jackknife, is what b_(−i) is off by, σ² / (n − 1) for the plain mean; τ² is what prompts truly differ by,
    and τ² + (τ² + u) / k what m is off by: with these alone λ makes the mixture's squared error least. 2 S² / k is for
    the error of τ², which k prompts leave; S² is the variance of the k others' b and b_(−i), so that a prompt unlike
    the others is pooled less. b_(−i) does not look at completion i, and nor do λ and m. Prompts with a single member
    say nothing.

    https://arxiv.org/abs/2511.03710 has v / (v + s²), the same for all prompts of a batch: about a half at most.

    Args:
        left_one_out (`torch.Tensor` of shape `(G, N, 1)` or `(G, N, T)`):
            b_(−j), the baseline with completion j left out; per token, tokens do not look at each other.
        members (`torch.Tensor` of shape `(G, N, 1)`):
            1 for completions that count, else 0.

    Returns:
        `tuple[torch.Tensor, torch.Tensor]`: λ, of the shape of `left_one_out`, and m, with 1 instead of N.
    """
    size = members.sum(dim=1, keepdim=True)
    known = (size > 1).float()
    others = known.sum() - known  # k

    def of_others(values: torch.Tensor) -> torch.Tensor:
        values = values * known
        return (values.sum(dim=0) - values) / others.clamp(min=1)

    centre = (left_one_out * members).sum(dim=1, keepdim=True) / size.clamp(min=1)
    noise = ((left_one_out - centre).square() * members).sum(dim=1, keepdim=True)
    # About their mean, so that squares do not cancel
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
