"""Baselines that are a weighted mean of their group's returns, B = Σ_i ω_i G_i / Σ_i ω_i, and none at all."""

import torch

from .groups import Completions, Groups
from .registry import built_in


@built_in(per_token=True, uses_energy=True, zero_tail=True, unbiased="leave_one_out")
def otb(group: Groups) -> torch.Tensor:
    """Per token: the mean weighted by the energy that each completion has realized up to that token.

    The Optimal Token Baseline, Theorem 4.1 of https://arxiv.org/abs/2602.07078:

        B_t = Σ_i W_{t,i} G_{t,i} / Σ_i W_{t,i}   over the completions i that have a t-th generated token.

    Assumes that scores of different tokens are uncorrelated, which holds in expectation, and that the logit-gradient
    proxy stands for the score's norm. With known expectations it minimises the variance of the gradient; estimated
    from a group of N it need not, since few completions reach a late token.

    Biased for finite N: the completion's own return is in B, so that A_i = (1 − W_i/ΣW) (G_i − B_{(−i)}), which damps
    completions of large energy, above all a lone improbable success (recipes/reference.md); `leave_one_out` removes
    the bias and adds variance.

    Degenerate cases: where only the longest completion still generates, B would be its own return; `zero_tail`
    (default) sets B = 0 there, as the reference implementation does, so that A = G, also in a group whose returns are
    all equal. With `zero_tail=False`, A = 0 there. Where all energies are 0, the plain mean.

    Use it to follow the paper, and with rewards per turn or token where prompts per step are few. In small groups of
    completions of very unequal length prefer `otb_shrunk` or `ogb`.
    """
    return group.mean(group.energy.cumsum(-1) * group.present)


@built_in(per_token=True, uses_energy=True, unbiased="leave_one_out")
def otb_shrunk(group: Groups, kappa: float = 2.0) -> torch.Tensor:
    """Per token: weights W_T + κ w_t, a baseline per token shrunk towards `ogb`, for small groups.

        B_t = Σ_i (W_{T,i} + κ w_{t,i}) G_{t,i} / Σ_i (W_{T,i} + κ w_{t,i})   over all completions, also ended ones.

    This project's own. If scores of different tokens were orthogonal, the power of the gradient under baselines b_t
    would be Σ_t Σ_i w_{t,i} (G_{t,i} − b_t)², least at the mean weighted by w_t; a separate estimate for every token
    is mostly noise where few completions reach it. So the power is minimised with a penalty (Σ_i W_{T,i} / κ) (b_t −
    b)² at every t that pulls b_t towards one number for the group, b = Σ_i W_{T,i} G_{t,i} / Σ_i W_{T,i}; setting the
    derivative to 0 gives the weights above. κ = 2 was chosen on half of the prompts of recipes/studies and measured on
    the others.

    Assumes what `otb` assumes. Biased for finite N in the same way; much of its gain at N = 4 and 8 is the damping by
    a completion's own weight: one left out and with one reward at the end, it is little better than `ogb`.

    Degenerate cases: a completion that has ended stays in the mean with W_T and the reward-to-go of its last token,
    which for a terminal reward is the return, so there is no lone tail. Where all energies are 0, the plain mean.

    Use it for N of 4 or 8 and few prompts per generation batch; with 4 or more, `ogb_pooled_damped` was more efficient
    in recipes/studies. Where the gradient must be unbiased use `ogb_pooled`, `rloo`, or `ogb` with `leave_one_out`.
    """
    # 1e-20: where nobody has energy, ended completions weigh as much as others
    return group.mean(group.total_energy + kappa * group.energy + 1e-20)


@built_in(per_token=False, uses_energy=True, totals_only=True, unbiased="leave_one_out")
def ogb(group: Completions) -> torch.Tensor:
    """Per completion: the mean weighted by total energy W_T.

        B = Σ_i W_{T,i} R_i / Σ_i W_{T,i}

    The optimal global baseline: among constants per group, the one that minimises the variance of the gradient for
    known expectations (with E‖S‖² = E W_T, S the completion's score and the proxy exact).

    Biased for finite N by the completion's own weight, as `otb` is, so that rare successes teach little;
    `leave_one_out` removes that. Where all energies are 0, the plain mean.

    Use it where rewards come at the end and `otb`'s baselines per token rest on too few completions.
    """
    return group.mean(group.total_energy)


@built_in(per_token=False, uses_energy=False, totals_only=True, unbiased="leave_one_out")
def opo(group: Completions) -> torch.Tensor:
    """Per completion: the mean weighted by length, in generated tokens.

        B = Σ_i T_i R_i / Σ_i T_i

    OPO, https://arxiv.org/abs/2505.23585. Assumes that a completion's squared score norm grows with its length alone.
    Biased for finite N by the completion's own weight; `leave_one_out` removes that. Equal lengths reduce it to
    `group_mean`. Where long completions are the careful ones, it is noisier than the group mean.
    """
    return group.mean(group.lengths)


@built_in(per_token=False, uses_energy=False, leaves_one_out=True, totals_only=True, unbiased=True)
def rloo(group: Completions) -> torch.Tensor:
    """Per completion: the mean of the other completions' returns.

        B_i = Σ_{j≠i} R_j / (N − 1)

    RLOO, https://arxiv.org/abs/2402.14740. Unbiased: B does not look at the completion's own return. Its advantages
    are N/(N−1) times those of `group_mean`. With no other scorable completion, B = 0.
    """
    return group.mean(torch.ones_like(group.returns), leave_one_out=True)


@built_in(per_token=False, uses_energy=False, totals_only=True, unbiased="leave_one_out")
def group_mean(group: Completions) -> torch.Tensor:
    """Per completion: the mean of the group's returns, GRPO's own baseline.

        B = Σ_i R_i / N

    GRPO, https://arxiv.org/abs/2402.03300. Treats all completions and tokens as equally noisy. Biased by the factor
    (N−1)/N only. Under it, and with equal `scale_rewards`, a run has GRPOTrainer's weights to the bit.
    """
    return group.mean(torch.ones_like(group.returns))


@built_in(per_token=False, uses_energy=False, leaves_one_out=True, totals_only=True, unbiased=True, compares=False)
def none(group: Completions) -> torch.Tensor:
    """Per completion: nothing.

        B = 0

    REINFORCE (Williams, 1992), A = G. Unbiased. As a control: what a baseline must beat where rewards are of one sign
    and most tokens of a right completion are sure. `scale_rewards="group"` is refused, as it divides by a deviation
    from a mean that nobody subtracts.
    """
    return torch.zeros_like(group.returns)
