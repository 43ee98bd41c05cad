"""
Three more baselines: `opo`, for comparison, and two that this project tried, `otb_shrunk` and `ogb_pooled_damped`.

    OTBGRPOConfig(baseline="recipes.more_baselines:ogb_pooled_damped")

Importing this module registers them, by these names. All three are biased: `value` and the pooled baselines are not,
and had less noise on most tasks (recipes/studies/value.md).
"""

import torch

import trl_otb
from trl_otb.baselines import Completions, pooled


@trl_otb.register_baseline("opo", needs=(), per_token=False, scalable=True)
def opo(x: Completions) -> torch.Tensor:
    """Per completion: the mean weighted by length, in generated tokens.

        B = Σ_i T_i R_i / Σ_i T_i

    Source: OPO, https://arxiv.org/abs/2505.23585.

    Assumptions: the squared score norm of a completion is proportional to its length.

    Bias: biased for finite N by the completion's own weight. With equal lengths it is `group_mean`.

    Use it for comparison. Do not use it when long completions are the careful ones: it is noisier than the group mean
    then.

    Evidence: noisier than the group mean on arithmetic policies, less noisy on SmolLM2's short sums
    (recipes/studies/variance.md of release 0.5.0).
    """
    return x.completion_mean(x.lengths)


@trl_otb.register_baseline("otb_shrunk", scalable=True)
def otb_shrunk(x: Completions, kappa: float = 2.0) -> torch.Tensor:
    """Per token: the mean weighted by W_T + κ w_t, which shrinks a baseline per token towards `ogb`.

        B_t = Σ_i (W_{T,i} + κ w_{t,i}) G_{t,i} / Σ_i (W_{T,i} + κ w_{t,i})   over all completions, also ended ones.

    Source: this project. If scores of different tokens were orthogonal, the power of the gradient under baselines b_t
    would be Σ_t Σ_i w_{t,i} (G_{t,i} − b_t)², minimal at the mean weighted by w_t. But a separate estimate for every
    token is mostly noise when few completions reach it. A penalty (Σ_i W_{T,i} / κ) (b_t − b)² pulls b_t towards one
    number for the group, b = Σ_i W_{T,i} G_{t,i} / Σ_i W_{T,i}; the minimum is at the weights above. κ = 2 was chosen
    on half of the prompts of recipes/studies/variance.md of release 0.5.0, and measured on the others.

    Assumptions: those of `otb`.

    Bias: biased for finite N, like `otb`. Much of its gain at N = 4 and 8 is the damping by a completion's own weight:
    with one left out and one reward at the end it is little better than `ogb`.

    Special cases: an ended completion stays in the mean with W_T and the reward-to-go of its last token (its return,
    if the reward is at the end), so there is no lone tail. If all energies are 0, B is the plain mean.

    Use it for N of 4 or 8 and few prompts per generation batch. Do not use it with 4 or more prompts per batch, where
    `ogb_pooled_damped` was more efficient, or if the gradient must be unbiased: use `value` or `ogb_pooled` then.

    Evidence: at N = 4 it has 0.12 to 0.44 of the group mean's noise in five settings, at a cosine to the true gradient
    of 0.985 to 0.996 (the same page), and 0.41 to 0.52 with SmolLM2 copying a text (results/language.json).
    """
    # 1e-20: if all energies are 0, ended completions have the same weight as others
    return x.mean(x.total_energy + kappa * x.loss_energy + 1e-20)


@trl_otb.register_baseline("ogb_pooled_damped", per_token=False, scope="batch")
def ogb_pooled_damped(x: Completions) -> torch.Tensor:
    """Per completion: `ogb_pooled`, with advantages damped by the completion's share of its group's energy.

        A_i = d_i² (R_i − B_i),   d_i = (1 − ω_i) N / (N − 1),   ω_i = W_{T,i} / Σ_j W_{T,j}

    B_i is the baseline of `ogb_pooled`. The noise of a completion's term is about W_T A², so d² gives noisy terms less
    weight. `ogb` damps once, by the completion's own return: (1 − ω_i) (R_i − b_(−i)). The factor N / (N − 1) makes
    d = 1 if all energies are equal.

    Source: this project. The power 2 was chosen among 1/2, 1 and 2, and among other factors, as the most efficient one
    with a cosine of at least 0.99 to the true gradient.

    Assumptions: those of `ogb_pooled`.

    Bias: biased, since d depends on the completion: improbable completions teach less, and a lone improbable success
    almost nothing (recipes/reference.md). The bias shrinks with N.

    Special cases: if no energy is above 0, d = 1. The only completion of a prompt with a reward has A = 0, unless
    N = 1. `scale_rewards="group"` is rejected, as for `ogb_pooled`.

    Use it instead of `ogb_pooled` for N of 4 or more if a small bias is acceptable. Do not use it at N = 2, where it
    was less efficient on one task, or for rare successes.

    Evidence: at N = 4, cosine 0.993 to 1.000; more efficient than `ogb_pooled` except on the longest tasks, 300 tokens
    and 46 turns, where they are equal (shrinkage.md of release 0.5.0). Noise relative to the group mean: 0.59, 0.68 and
    0.78 on answers of 10, 30 and 100 tokens (results/value.json), 0.26 with SmolLM2 copying (results/language.json).
    In learning curves the two do not differ significantly.
    """
    returns, members = x.returns[:, :1], x.grouped(x.members)
    baseline = pooled(x, returns, x.total_energy)
    if x.num_generations == 1:
        return baseline
    weights, size = x.grouped(x.total_energy) + 1e-30 * members, members.sum(dim=1, keepdim=True)
    of_others = 1 - weights / weights.sum(dim=1, keepdim=True).clamp(min=1e-30)
    damping = (of_others * size / (size - 1).clamp(min=1)).square().view_as(returns)
    return returns - damping * (returns - baseline)
