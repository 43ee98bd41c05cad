"""Baselines that are a weighted mean of the group's returns, B = Σ_i ω_i G_i / Σ_i ω_i, and B = 0."""

import torch

from .groups import Completions, Groups
from .registry import built_in


@built_in(per_token=True, uses_energy=True, zero_tail=True, unbiased="leave_one_out")
def otb(group: Groups) -> torch.Tensor:
    """Per token: the group's mean return, weighted by each completion's realized energy up to that token.

        B_t = Σ_i W_{t,i} G_{t,i} / Σ_i W_{t,i}   over the completions i that have a t-th generated token.

    Source: the Optimal Token Baseline, Theorem 4.1 of https://arxiv.org/abs/2602.07078.

    Assumptions: scores of different tokens are uncorrelated (true in expectation), and w_t approximates the squared
    score norm. With known expectations it minimizes the variance of the gradient. Estimated from N completions it need
    not, since few of them reach a late token.

    Bias: biased for finite N, because B contains the completion's own return: A_i = (1 − W_i/ΣW) (G_i − B_{(−i)}).
    This damps completions of high energy, most of all a lone improbable success (recipes/reference.md).
    `leave_one_out` removes the bias and adds variance.

    Special cases: where only the longest completion still generates, B would be its own return. `zero_tail` (default)
    sets B = 0 there, as the reference implementation does, so A = G, even if all returns of the group are equal; with
    `zero_tail=False`, A = 0 there. If all energies are 0, B is the plain mean.

    Use it to follow the paper, and with rewards per turn or token when a step has few prompts. Do not use it for long
    completions with one reward at the end, for small groups of very unequal lengths (`otb_shrunk` and `ogb` are less
    noisy) or for rare successes.

    Evidence: at N = 4 it has 0.91, 0.95 and 1.04 of the group mean's noise on toy answers of 10, 30 and 100 tokens,
    and 0.98 to 0.99 with one left out (recipes/studies/value.md); 0.58 to 0.75 with SmolLM2 copying a text
    (language.md); with one left out 0.66 to 0.82 with rewards per turn, and 1.10 to 1.27 with one reward at the end
    (turns.md).
    """
    return group.mean(group.energy.cumsum(-1) * group.present)


@built_in(per_token=True, uses_energy=True, unbiased="leave_one_out")
def otb_shrunk(group: Groups, kappa: float = 2.0) -> torch.Tensor:
    """Per token: the mean weighted by W_T + κ w_t, which shrinks a baseline per token towards `ogb`.

        B_t = Σ_i (W_{T,i} + κ w_{t,i}) G_{t,i} / Σ_i (W_{T,i} + κ w_{t,i})   over all completions, also ended ones.

    Source: this project. If scores of different tokens were orthogonal, the power of the gradient under baselines b_t
    would be Σ_t Σ_i w_{t,i} (G_{t,i} − b_t)², minimal at the mean weighted by w_t. But a separate estimate for every
    token is mostly noise when few completions reach it. A penalty (Σ_i W_{T,i} / κ) (b_t − b)² pulls b_t towards one
    number for the group, b = Σ_i W_{T,i} G_{t,i} / Σ_i W_{T,i}; the minimum is at the weights above. κ = 2 was chosen
    on half of the prompts of recipes/studies/shrinkage.md and measured on the others.

    Assumptions: those of `otb`.

    Bias: biased for finite N, like `otb`. Much of its gain at N = 4 and 8 is the damping by a completion's own weight:
    with one left out and one reward at the end it is little better than `ogb`.

    Special cases: an ended completion stays in the mean with W_T and the reward-to-go of its last token (its return,
    if the reward is at the end), so there is no lone tail. If all energies are 0, B is the plain mean.

    Use it for N of 4 or 8 and few prompts per generation batch. Do not use it with 4 or more prompts per batch, where
    `ogb_pooled_damped` was more efficient, or if the gradient must be unbiased: use `value` or `ogb_pooled` then.

    Evidence: at N = 4 it has 0.12 to 0.44 of the group mean's noise in five settings, at a cosine to the true gradient
    of 0.985 to 0.996 (recipes/studies/shrinkage.md), and 0.41 to 0.52 with SmolLM2 copying a text (language.md).
    """
    # 1e-20: if all energies are 0, ended completions have the same weight as others
    return group.mean(group.total_energy + kappa * group.energy + 1e-20)


@built_in(per_token=False, uses_energy=True, totals_only=True, unbiased="leave_one_out")
def ogb(group: Completions) -> torch.Tensor:
    """Per completion: the mean weighted by total energy W_T.

        B = Σ_i W_{T,i} R_i / Σ_i W_{T,i}

    Source: the optimal global baseline. Among constants per group it minimizes the variance of the gradient for known
    expectations.

    Assumptions: E‖S‖² = E W_T, where S is the completion's score.

    Bias: biased for finite N by the completion's own weight, like `otb`, so rare successes teach little;
    `leave_one_out` removes that. If all energies are 0, B is the plain mean.

    Use it with one reward at the end, when the per-token means of `otb` rest on too few completions. Do not use it for
    rare successes. If the gradient must be unbiased and a step has several prompts, `ogb_pooled` had less noise than
    `ogb` with `leave_one_out`.

    Evidence: at N = 4, with SmolLM2 copying a text, it has 0.42 to 0.54 of the group mean's noise, and 0.80 to 0.82
    with one left out (recipes/studies/language.md). In games of 6, 14, 30 and 46 turns with one reward at the end it
    has 0.79, 0.87, 0.96 and 1.01, and 1.00 to 1.07 with one left out (turns.md).
    """
    return group.mean(group.total_energy)


@built_in(per_token=False, uses_energy=False, totals_only=True, unbiased="leave_one_out")
def opo(group: Completions) -> torch.Tensor:
    """Per completion: the mean weighted by length, in generated tokens.

        B = Σ_i T_i R_i / Σ_i T_i

    Source: OPO, https://arxiv.org/abs/2505.23585.

    Assumptions: the squared score norm of a completion is proportional to its length.

    Bias: biased for finite N by the completion's own weight; `leave_one_out` removes that. With equal lengths it is
    `group_mean`.

    Use it for comparison. Do not use it when long completions are the careful ones: it is noisier than the group mean
    then.

    Evidence: noisier than the group mean on arithmetic policies, less noisy on SmolLM2 (recipes/studies/variance.md).
    """
    return group.mean(group.lengths)


@built_in(per_token=False, uses_energy=False, leaves_one_out=True, totals_only=True, unbiased=True)
def rloo(group: Completions) -> torch.Tensor:
    """Per completion: the mean of the other completions' returns.

        B_i = Σ_{j≠i} R_j / (N − 1)

    Source: RLOO, https://arxiv.org/abs/2402.14740.

    Assumptions: none.

    Bias: unbiased, since B_i does not depend on the completion's own return. Its advantages are N/(N−1) times those of
    `group_mean`. If no other completion has a reward, B = 0.

    Use it if the gradient must be unbiased and a step has one or two prompts. Do not use it with more prompts:
    `rloo_pooled` is unbiased too and had less noise on most tasks (recipes/studies/value.md).
    """
    return group.mean(torch.ones_like(group.returns), leave_one_out=True)


@built_in(per_token=False, uses_energy=False, totals_only=True, unbiased="leave_one_out")
def group_mean(group: Completions) -> torch.Tensor:
    """Per completion: the mean of the group's returns, GRPO's own baseline.

        B = Σ_i R_i / N

    Source: GRPO, https://arxiv.org/abs/2402.03300.

    Assumptions: all completions and tokens are equally noisy.

    Bias: biased by the factor (N−1)/N only.

    Use it as the control: with equal `scale_rewards`, a run has GRPOTrainer's weights to the bit. Do not use it if a
    step has several prompts and N is small, where `value` and the pooled baselines had less noise on most tasks
    (recipes/studies/value.md).
    """
    return group.mean(torch.ones_like(group.returns))


@built_in(per_token=False, uses_energy=False, leaves_one_out=True, totals_only=True, unbiased=True, compares=False)
def none(group: Completions) -> torch.Tensor:
    """Per completion: nothing.

        B = 0

    Source: REINFORCE (Williams, 1992), A = G.

    Bias: unbiased.

    Use it as a control, which a baseline must beat if all rewards have one sign and most tokens of a correct
    completion are certain. Do not use it for training when most completions succeed. `scale_rewards="group"` is
    rejected: it would divide by a deviation from a mean that is not subtracted.

    Evidence: at N = 4 it has 0.78 to 0.98 of the group mean's noise on toy answers of 10 to 100 tokens
    (recipes/studies/value.md), but 2.19 to 4.63 with SmolLM2 telling stories (language.md).
    """
    return torch.zeros_like(group.returns)
