"""Baselines and advantages from returns and energies. Pure torch; the notation is that of `trl_otb.energy`.

Every baseline is a weighted mean of the group's returns, B = Σ_i ω_i G_i / Σ_i ω_i; they differ in the weight ω:

| `baseline`     | ω_i                     | one B for    | source                                  |
|----------------|-------------------------|--------------|-----------------------------------------|
| `"group_mean"` | 1                       | a group      | GRPO, https://arxiv.org/abs/2402.03300   |
| `"rloo"`       | 1, own return left out  | a completion | RLOO, https://arxiv.org/abs/2402.14740   |
| `"opo"`        | generated tokens        | a group      | OPO, https://arxiv.org/abs/2505.23585    |
| `"ogb"`        | total energy W_T        | a group      | the constant that minimises variance    |
| `"otb"`        | realized energy W_t     | a position t | Theorem 4.1, https://arxiv.org/abs/2602.07078 |
| `"otb_shrunk"` | W_T + κ w_t, κ = 2      | a position t | below                                   |

`"otb_shrunk"` is for small groups, where few completions reach a late token and a baseline of their own for every token is
mostly noise. If the scores of different tokens were orthogonal, the power of the gradient under baselines b_t would be
Σ_t Σ_i w_{t,i} (G_{t,i} − b_t)², least at the mean weighted by w_t. It is minimised here with a penalty (Σ_i W_{T,i} / κ) (b_t − b)²
at every t that pulls b_t towards one number for the group, b = Σ_i W_{T,i} G_{t,i} / Σ_i W_{T,i}; setting the derivative to 0
gives the weights above. Completions that have ended stay in the mean with W_T and the reward-to-go of their last token,
which for a terminal reward is the return, so there is no lone tail. κ was chosen, and the result measured, on exact
gradients: recipes/studies/README.md.
"""

import torch

from .energy import realized_energy


BASELINES = ("otb", "otb_shrunk", "ogb", "opo", "rloo", "group_mean")
ENERGY_BASELINES = ("otb", "otb_shrunk", "ogb")  # the others never look at the energies
TOKEN_BASELINES = ("otb", "otb_shrunk")  # of the reward-to-go of every token; the others are of whole completions
ALIGNMENTS = ("generated", "position")

_KAPPA = 2.0  # of `"otb_shrunk"`
_SOME = 1e-30  # weight added to everybody's: lost in rounding, unless all are 0, where it leaves the plain mean
_BLOCK = 2**18  # tokens whose intermediate results a processor core can keep in its cache


def reward_to_go(token_rewards: torch.Tensor) -> torch.Tensor:
    """
    G_t = Σ_{k≥t} r_k, undiscounted.

    Args:
        token_rewards (`torch.Tensor` of shape `(B, T)`):
            r_t. A reward counts wherever it stands, on tool output too; padding must hold 0.

    Returns:
        `torch.Tensor` of shape `(B, T)`, float32.
    """
    return token_rewards.float().flip(1).cumsum(dim=1).flip(1)


def returns_for(rewards: torch.Tensor, baseline: str) -> torch.Tensor:
    """
    What `baseline` is subtracted from.

    Args:
        rewards (`torch.Tensor` of shape `(B,)` or `(B, T)`):
            One return a completion, or a reward a token.
        baseline (`str`):
            One of `BASELINES`.

    Returns:
        `torch.Tensor`, float32: the reward-to-go, `(B, T)`, of token rewards under `TOKEN_BASELINES`, else the return of
        the whole completion, `(B, 1)`. A terminal return is the reward-to-go of every token.
    """
    if rewards.dim() == 1:
        return rewards.float().unsqueeze(1)
    return reward_to_go(rewards) if baseline in TOKEN_BASELINES else rewards.float().sum(dim=1, keepdim=True)


def lone_tail(mask: torch.Tensor, num_generations: int, alignment: str = "generated") -> torch.Tensor:
    """
    Positions of the group's longest completion after every other completion has ended.

    Args:
        mask (`torch.Tensor` of shape `(B, T)`):
            1 on generated tokens.
        num_generations (`int`):
            N; the rows of a group are adjacent. With N = 1 every generated token is on the lone tail.
        alignment (`str`, *optional*, defaults to `"generated"`):
            Whether ends are compared in generated tokens or, `"position"`, in positions of the completion.

    Returns:
        `torch.Tensor` of shape `(B, T)`, bool, False where `mask` is 0.
    """
    mask = mask.bool()
    steps = _generated_index(mask) if alignment == "generated" else _positions(mask)
    ends = torch.where(mask, steps + 1, 0).amax(dim=1)
    return mask & (steps >= _longest_other(ends, num_generations).unsqueeze(1))


def compute_baselines(
    rewards: torch.Tensor,
    energy: torch.Tensor,
    mask: torch.Tensor,
    num_generations: int,
    *,
    baseline: str = "otb",
    alignment: str = "generated",
    zero_tail: bool = True,
    leave_one_out: bool = False,
    importance_weights: torch.Tensor | None = None,
) -> torch.Tensor:
    """
    The baseline B that [`compute_advantages`] subtracts; same arguments.

    Returns:
        `torch.Tensor`, float32, of shape `(B, T)` for `TOKEN_BASELINES`, else `(B, 1)`, one number for a completion.
        Meaningless where `mask` is 0 and for completions whose reward is NaN.

    Raises:
        ValueError: An option is unknown, or the shapes disagree.
    """
    options = (baseline, alignment, zero_tail, leave_one_out)
    return _by_blocks(rewards, energy, mask, importance_weights, num_generations, *options, False)


def compute_advantages(
    rewards: torch.Tensor,
    energy: torch.Tensor,
    mask: torch.Tensor,
    num_generations: int,
    *,
    baseline: str = "otb",
    alignment: str = "generated",
    zero_tail: bool = True,
    leave_one_out: bool = False,
    importance_weights: torch.Tensor | None = None,
) -> torch.Tensor:
    """
    Advantages A_{t,i} = G_{t,i} − B_{t,i} under one of the baselines above; for `"otb"` (Theorem 4.1)

        B_t = Σ_i W_{t,i} G_{t,i} / Σ_i W_{t,i}   over the completions i of the group with a t-th generated token.

    Args:
        rewards (`torch.Tensor` of shape `(B,)` or `(B, T)`):
            One return a completion, or a reward a token. Of the latter the `TOKEN_BASELINES` form the reward-to-go G_t
            ([`reward_to_go`]); the others are defined on whole completions and use the sum, as GRPO does.
            A NaN marks an unscorable completion: it leaves its group's baseline and gets advantage 0.
        energy (`torch.Tensor` of shape `(B, T)`):
            w_t, see [`~trl_otb.energy.token_energy`]. Read by `ENERGY_BASELINES` alone, and only where `mask` is 1.
        mask (`torch.Tensor` of shape `(B, T)`):
            1 on tokens that the policy generated.
        num_generations (`int`):
            N. The N rows of a group are adjacent. With N = 1 every baseline is 0.
        baseline (`str`, *optional*, defaults to `"otb"`):
            One of `BASELINES`.
        alignment (`str`, *optional*, defaults to `"generated"`):
            For `TOKEN_BASELINES`, what t counts: generated tokens, or positions of the completion (`"position"`, the reference's
            single-turn form). The two differ where tool output stands between generated tokens.
        zero_tail (`bool`, *optional*, defaults to `True`):
            For `"otb"`, on the lone tail ([`lone_tail`]): B_t = 0, so A_t = G_t, as the reference does. If `False`,
            B_t is the lone completion's own return and A_t = 0.
        leave_one_out (`bool`, *optional*, defaults to `False`):
            Take a completion's own term out of numerator and denominator, which makes the baseline independent of the
            completion it is subtracted from and the gradient unbiased. At a token where no other completion is left
            nothing can be averaged; then B = 0, which keeps the gradient unbiased (A = G), except that `"otb"` with
            `zero_tail=False` skips the token (A = 0).
        importance_weights (`torch.Tensor` of shape `(B, T)` or `(B, 1)`, *optional*):
            Rollout importance ratios ρ; every w_j is scaled by ρ_j². They weigh the energies only, not the returns.

    Returns:
        `torch.Tensor` of shape `(B, T)`, float32 whatever the inputs, 0 where `mask` is 0.

        Where every completion has energy 0, which leaves the weighted mean undefined, B is the plain mean.

    Raises:
        ValueError: An option is unknown, or the shapes disagree.
    """
    options = (baseline, alignment, zero_tail, leave_one_out)
    return _by_blocks(rewards, energy, mask, importance_weights, num_generations, *options, True)


def check_options(baseline: str, alignment: str) -> None:
    """Raise a `ValueError` that names the choices if one of the two is not among them."""
    if baseline not in BASELINES:
        raise ValueError(f"`baseline` is {baseline!r}: it must be one of {', '.join(map(repr, BASELINES))}.")
    if alignment not in ALIGNMENTS:
        raise ValueError(f"`alignment` is {alignment!r}: it must be one of {', '.join(map(repr, ALIGNMENTS))}.")


def _check(rewards, energy, mask, num_generations, importance_weights) -> None:
    if mask.dim() != 2 or energy.shape != mask.shape:
        raise ValueError(
            f"`energy` has shape {tuple(energy.shape)} and `mask` {tuple(mask.shape)}: both must be (B, T)."
        )
    if rewards.shape not in (mask.shape, mask.shape[:1]):
        raise ValueError(
            f"`rewards` has shape {tuple(rewards.shape)}: it must be (B,) = ({len(mask)},), a return a completion, or "
            f"(B, T) = {tuple(mask.shape)}, a reward a token."
        )
    if num_generations < 1 or len(mask) % num_generations != 0:
        raise ValueError(
            f"`num_generations` is {num_generations} and there are {len(mask)} rows: the batch must hold whole groups."
        )
    if importance_weights is not None and importance_weights.shape not in (mask.shape, (len(mask), 1)):
        raise ValueError(
            f"`importance_weights` has shape {tuple(importance_weights.shape)}: it must be (B, T) = "
            f"{tuple(mask.shape)} for ratios of tokens, or (B, 1) for ratios of completions."
        )


def _by_blocks(rewards, energy, mask, importance_weights, num_generations, baseline, alignment, *other_options):
    """[`_block`] of the whole batch; on a CPU by blocks that fit its cache, as fresh memory is what costs there."""
    check_options(baseline, alignment)
    _check(rewards, energy, mask, num_generations, importance_weights)
    options = (baseline, alignment, *other_options)
    rows = max(_BLOCK // max(mask.size(1), 1) // num_generations, 1) * num_generations
    if mask.device.type != "cpu" or len(mask) <= rows:
        return _block(rewards, energy, mask, importance_weights, num_generations, *options)
    result = None
    for first in range(0, len(mask), rows):
        block = slice(first, first + rows)
        weights = None if importance_weights is None else importance_weights[block]
        part = _block(rewards[block], energy[block], mask[block], weights, num_generations, *options)
        if result is None:
            result = part.new_empty(len(mask), part.size(1))
        result[block] = part
    return result


def _block(
    rewards,
    energy,
    mask,
    importance_weights,
    num_generations,
    baseline,
    alignment,
    zero_tail,
    leave_one_out,
    subtracted,
):
    """Baselines of whole groups or, `subtracted` from the returns, advantages."""
    scorable = _scorable(rewards).unsqueeze(1)  # (B, 1)
    returns = returns_for(rewards, baseline).masked_fill(~scorable, 0.0)  # (B, 1) or (B, T)
    mask = mask.long() if scorable.all() else mask.long() * scorable
    if importance_weights is not None:
        energy = energy.float() * importance_weights.float().square()

    if num_generations == 1:  # no group to estimate a baseline from, as in the reference
        baselines = torch.zeros(len(rewards), 1, device=mask.device)
    elif baseline in TOKEN_BASELINES:
        shrunk = scorable if baseline == "otb_shrunk" else None
        return _token_baseline(
            returns, energy.float(), mask, num_generations, alignment, zero_tail, leave_one_out, subtracted, shrunk
        )
    else:
        if baseline == "opo":
            weights = mask.sum(dim=1, keepdim=True).float()
        elif baseline == "ogb":
            weights = realized_energy(energy, mask)[:, -1:]
        else:
            weights = torch.ones_like(returns)
        grouped_returns, weights = (x.view(-1, num_generations, 1) for x in (returns, (weights + _SOME) * scorable))
        mean = _weighted_group_mean(grouped_returns, weights, leave_one_out or baseline == "rloo")
        # With no other scorable return the mean is 0, the only baseline that does not look at the completion's own.
        baselines = mean.expand(-1, num_generations, -1).reshape(-1, 1)
    return (returns - baselines) * mask if subtracted else baselines


def _scorable(rewards: torch.Tensor) -> torch.Tensor:
    """(B,) False for completions with a NaN reward."""
    return ~(rewards.isnan() if rewards.dim() == 1 else rewards.isnan().any(dim=1))


def _positions(mask: torch.Tensor) -> torch.Tensor:
    return torch.arange(mask.size(1), device=mask.device).expand_as(mask)


def _generated_index(mask: torch.Tensor) -> torch.Tensor:
    """(B, T) how many generated tokens precede this one; the count so far, minus one, elsewhere."""
    return mask.cumsum(dim=1) - 1


def _longest_other(ends: torch.Tensor, num_generations: int) -> torch.Tensor:
    """(B,) -> (B,) the largest end among the other completions of the group, 0 in a group of one."""
    if num_generations == 1:
        return torch.zeros_like(ends)
    ends = ends.view(-1, num_generations)
    longest, second = ends.topk(2, dim=1).values.unbind(dim=1)
    is_longest = torch.nn.functional.one_hot(ends.argmax(dim=1), num_generations).bool()
    return torch.where(is_longest, second.unsqueeze(1), longest.unsqueeze(1)).reshape(-1)


def _sum_group(x: torch.Tensor, own_left_out: bool) -> torch.Tensor:
    """(G, N, T) -> (G, 1, T) sum over the group, or (G, N, T) sum over the others of the group."""
    if not own_left_out:
        return x.sum(dim=1, keepdim=True)
    # Sums before and after, rather than the total minus the own term, which would cancel where the own term dominates.
    before = x.cumsum(dim=1).roll(1, dims=1)
    after = x.flip(1).cumsum(dim=1).flip(1).roll(-1, dims=1)
    before[:, 0] = 0
    after[:, -1] = 0
    return before + after


def _weighted_group_mean(returns, weights, own_left_out):
    """
    Mean of `returns` over the group, weighted by `weights`, which are positive for whoever is present and else 0.

    Shapes `(G, N, 1)` or `(G, N, T)`, broadcast against each other. Returns `(G, 1, T)`, or `(G, N, T)` with each
    completion's own return left out, and 0 where nobody is present.
    """
    return _sum_group(weights * returns, own_left_out) / _sum_group(weights, own_left_out).clamp_(min=1e-38)


def _token_baseline(
    returns, energy, mask, num_generations, alignment, zero_tail, leave_one_out, subtracted, shrunk=None
):
    """
    (B, T) B_t of Theorem 4.1 or, `subtracted` from the returns, A_t; 0 where `mask` is 0. With `shrunk`, `(B, 1)` whether
    the completion is scorable, that of `"otb_shrunk"`.
    """
    positions = torch.arange(mask.size(1), device=mask.device)
    squeeze = alignment == "generated"
    if squeeze:
        slots = mask.cumsum(dim=1)  # 1, 2, … for generated tokens, and below 0, a column that is cut off, for others
        ends = slots[:, -1:].clone()
        slots &= -mask
        energy = _squeeze(energy, slots)
        returns = _squeeze(returns, slots) if returns.size(1) > 1 else returns
        present = (ends - positions.float()).clamp_(0, 1)
    else:
        energy = energy.masked_fill(mask == 0, 0.0)
        ends = (mask * (positions + 1)).amax(dim=1, keepdim=True)
        present = mask.float()
    if shrunk is None:
        weights = energy.cumsum(dim=1).add_(_SOME).mul_(present)
    else:
        weights = (energy.cumsum(dim=1)[:, -1:] + _KAPPA * energy).add_(_SOME).mul_(shrunk)
        zero_tail = False
        if returns.size(1) > 1:  # after its last token a completion keeps that token's reward-to-go
            returns = torch.where(positions < ends, returns, returns.gather(1, (ends - 1).clamp(min=0)))

    def grouped(x):
        return x.view(-1, num_generations, x.size(1))

    baseline = _weighted_group_mean(grouped(returns), grouped(weights), leave_one_out)
    if zero_tail:
        second_longest = grouped(ends).topk(2, dim=1).values[:, 1:]
        baseline.masked_fill_(positions >= second_longest, 0.0)
    elif leave_one_out and shrunk is None:
        alone = _sum_group(grouped(present), own_left_out=True) == 0
        baseline = torch.where(alone, grouped(returns), baseline)
    values = grouped(returns) - baseline if subtracted else baseline.expand(-1, num_generations, -1)
    if squeeze:
        values = torch.nn.functional.pad(values, (1, 0)).gather(2, grouped(slots))
    else:
        values = values * grouped(mask)
    return values.reshape(mask.shape)


def _squeeze(x: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
    """(B, T) each row's generated tokens side by side from the left, 0 after them."""
    return x.new_zeros(len(x), x.size(1) + 1).scatter_(1, slots, x)[:, 1:]
