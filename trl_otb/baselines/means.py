"""Baselines that are a weighted mean of the group's returns, B = Σ_i ω_i G_i / Σ_i ω_i, and B = 0."""

import torch
from jaxtyping import Float
from torch import Tensor

from ..energy import prefix_sums
from .completions import Completions


def otb(x: Completions, zero_tail: bool = True) -> Float[Tensor, "B T"]:
    """Per token: the group's mean return, weighted by each completion's realized energy up to that token.

        B_t = Σ_i W_{t,i} G_{t,i} / Σ_i W_{t,i}   over the completions i that have a t-th generated token.

    Source: the Optimal Token Baseline, Theorem 4.1 of https://arxiv.org/abs/2602.07078. With known expectations it
    minimizes the variance of the gradient if scores of different tokens are uncorrelated and w_t is the squared score
    norm. Estimated from N completions it need not, since few of them reach a late token.

    Biased for finite N, because B contains the completion's own return: A_i = (1 − W_i/ΣW) (G_i − B_{(−i)}). This
    damps completions of high energy, most of all a lone improbable success.

    Where only the longest completion still generates, B = 0, as in the reference implementation, so A = G, even if all
    returns of the group are equal. (With `zero_tail=False`, A = 0.) If all energies are 0, B is the plain mean.
    """
    baseline = x.mean(prefix_sums(x.need("loss_energy")).mul_(x.mask))
    if not zero_tail:
        return baseline
    columns = torch.arange(1, x.mask.size(1) + 1, device=x.mask.device)
    # Not lengths: aligned by position, there are columns of tool output between
    ends = x.grouped((x.mask * columns).amax(dim=1, keepdim=True))
    second = ends.sort(dim=1).values[:, -2:-1]
    return x.grouped(baseline).masked_fill(columns > second, 0.0).reshape(baseline.shape)


def otb_loo(x: Completions) -> Float[Tensor, "B T"]:
    """Per token: `otb` without the completion's own return.

        B_{t,i} = Σ_{j≠i} W_{t,j} G_{t,j} / Σ_{j≠i} W_{t,j}   over the others that have a t-th token; 0 if none has.

    Unbiased, since B does not depend on the completion it is subtracted from.
    """
    return x.mean(prefix_sums(x.need("loss_energy")).mul_(x.mask), leave_one_out=True)


def ogb(x: Completions) -> Float[Tensor, "B 1"]:
    """Per completion: the mean weighted by total energy W_T.

        B = Σ_i W_{T,i} R_i / Σ_i W_{T,i}   the plain mean if all energies are 0.

    Source: the optimal global baseline. Among constants per group it minimizes the variance of the gradient for known
    expectations, if E‖S‖² = E W_T, where S is the completion's score. Biased for finite N, like `otb`.
    """
    return x.completion_mean(x.total_energy)


def ogb_loo(x: Completions) -> Float[Tensor, "B 1"]:
    """Per completion: `ogb` without the completion's own return.

        B_i = Σ_{j≠i} W_{T,j} R_j / Σ_{j≠i} W_{T,j}   0 if no other completion has a reward.

    Unbiased.
    """
    return x.completion_mean(x.total_energy, leave_one_out=True)


def rloo(x: Completions) -> Float[Tensor, "B 1"]:
    """Per completion: the mean of the other completions' returns.

        B_i = Σ_{j≠i} R_j / (N − 1)   0 if no other completion has a reward.

    Source: RLOO, https://arxiv.org/abs/2402.14740. Unbiased; its advantages are N/(N−1) times those of `group_mean`.
    """
    return x.completion_mean(torch.ones_like(x.scored), leave_one_out=True)


def group_mean(x: Completions) -> Float[Tensor, "B 1"]:
    """Per completion: the mean of the group's returns, GRPO's own baseline.

        B = Σ_i R_i / N

    Source: GRPO, https://arxiv.org/abs/2402.03300. Biased by the factor (N−1)/N only.
    """
    return x.completion_mean(torch.ones_like(x.scored))


def none(x: Completions) -> Float[Tensor, "B 1"]:
    """Per completion: nothing.

    B = 0, so A = G. Source: REINFORCE (Williams, 1992). Unbiased.
    """
    return torch.zeros_like(x.scored)
