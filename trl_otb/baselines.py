"""Baselines and advantages from returns and energies. Pure torch; the notation is that of `trl_otb.energy`.

Every baseline is a weighted mean of the group's returns, B = Σ_i ω_i G_i / Σ_i ω_i; they differ in the weight ω:

| `baseline`     | ω_i                     | one B for    | source                                  |
|----------------|-------------------------|--------------|-----------------------------------------|
| `"group_mean"` | 1                       | a group      | GRPO, https://arxiv.org/abs/2402.03300   |
| `"rloo"`       | 1, own return left out  | a completion | RLOO, https://arxiv.org/abs/2402.14740   |
| `"opo"`        | generated tokens        | a group      | OPO, https://arxiv.org/abs/2505.23585    |
| `"ogb"`        | total energy W_T        | a group      | the constant that minimises variance    |
| `"otb"`        | realized energy W_t     | a position t | Theorem 4.1, https://arxiv.org/abs/2602.07078 |
"""

import torch

from .energy import realized_energy


BASELINES = ("otb", "ogb", "opo", "rloo", "group_mean")
ENERGY_BASELINES = ("otb", "ogb")  # the others never look at the energies
ALIGNMENTS = ("generated", "position")


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
        `torch.Tensor`, float32, of shape `(B, 1)` where one number serves a whole completion (every baseline but
        `"otb"`), else `(B, T)`. Meaningless where `mask` is 0 and for completions whose reward is NaN.

    Raises:
        ValueError: An option is unknown, or the shapes disagree.
    """
    check_options(baseline, alignment)
    _check(rewards, energy, mask, num_generations, importance_weights)
    mask = mask.bool()
    scorable = _scorable(rewards)  # (B,)
    if num_generations == 1:  # no group to estimate a baseline from, as in the reference
        return torch.zeros(len(rewards), 1, device=mask.device)

    if baseline == "otb":
        returns = _returns_to_go(rewards).masked_fill(~scorable.unsqueeze(1), 0.0)  # (B, 1) or (B, T)
        present = mask & scorable.unsqueeze(1)
        weights = realized_energy(energy, present, importance_weights)
        return _token_baseline(returns, weights, present, num_generations, alignment, zero_tail, leave_one_out)

    returns = _total_returns(rewards).unsqueeze(1)  # (B, 1)
    present = scorable.unsqueeze(1)
    if baseline == "opo":
        weights = mask.sum(dim=1, keepdim=True).float()
    elif baseline == "ogb":
        weights = realized_energy(energy, mask, importance_weights)[:, -1:]
    else:
        weights = torch.ones_like(returns)
    own_left_out = leave_one_out or baseline == "rloo"
    returns, weights, present = (
        x.view(-1, num_generations, 1) for x in (returns.nan_to_num(nan=0.0), weights * present, present)
    )
    mean = _weighted_group_mean(returns, weights, present, own_left_out)
    # With no other scorable return the mean is 0, the only baseline that does not look at the completion's own.
    return mean.expand(-1, num_generations, -1).reshape(-1, 1)


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
            One return a completion, or a reward a token. Of the latter `"otb"` forms the reward-to-go G_t
            ([`reward_to_go`]); the other baselines are defined on whole completions and use the sum, as GRPO does.
            A NaN marks an unscorable completion: it leaves its group's baseline and gets advantage 0.
        energy (`torch.Tensor` of shape `(B, T)`):
            w_t, see [`~trl_otb.energy.token_energy`]. Read by `"otb"` and `"ogb"` alone, and only where `mask` is 1.
        mask (`torch.Tensor` of shape `(B, T)`):
            1 on tokens that the policy generated.
        num_generations (`int`):
            N. The N rows of a group are adjacent. With N = 1 every baseline is 0.
        baseline (`str`, *optional*, defaults to `"otb"`):
            One of `BASELINES`.
        alignment (`str`, *optional*, defaults to `"generated"`):
            For `"otb"`, what t counts: generated tokens, or positions of the completion (`"position"`, the reference's
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
    baselines = compute_baselines(
        rewards,
        energy,
        mask,
        num_generations,
        baseline=baseline,
        alignment=alignment,
        zero_tail=zero_tail,
        leave_one_out=leave_one_out,
        importance_weights=importance_weights,
    )
    returns = _returns_to_go(rewards) if baseline == "otb" else _total_returns(rewards).unsqueeze(1)
    return torch.where(mask.bool() & _scorable(rewards).unsqueeze(1), returns - baselines, 0.0)


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


def _scorable(rewards: torch.Tensor) -> torch.Tensor:
    """(B,) False for completions with a NaN reward."""
    return ~(rewards.isnan() if rewards.dim() == 1 else rewards.isnan().any(dim=1))


def _total_returns(rewards: torch.Tensor) -> torch.Tensor:
    """(B,) return of the whole completion."""
    return rewards.float() if rewards.dim() == 1 else rewards.float().sum(dim=1)


def _returns_to_go(rewards: torch.Tensor) -> torch.Tensor:
    """(B, 1) or (B, T): a terminal return is the reward-to-go of every token."""
    return rewards.float().unsqueeze(1) if rewards.dim() == 1 else reward_to_go(rewards)


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


def _weighted_group_mean(returns, weights, present, own_left_out):
    """
    Mean of `returns` over the group's `present` completions, weighted by `weights`, or plain where all weights are 0.

    Shapes `(G, N, 1)` or `(G, N, T)`, broadcast against each other; `weights` is 0 where `present` is False. Returns the
    mean, `(G, 1, T)`, or `(G, N, T)` with each completion's own return left out, and 0 where nobody is present.
    """
    total = _sum_group(weights, own_left_out)
    mean = _sum_group(weights * returns, own_left_out) / total
    without_weight = total <= 0
    mean.masked_fill_(without_weight, 0.0)
    if (without_weight & present.any(dim=1, keepdim=True)).any():
        count = _sum_group(present.float(), own_left_out)
        plain = _sum_group(present * returns, own_left_out) / count
        mean = torch.where(without_weight & (count > 0), plain, mean)
    return mean


def _token_baseline(returns, weights, present, num_generations, alignment, zero_tail, leave_one_out):
    """(B, T) B_t of Theorem 4.1. `weights` is W_t; `present` (B, T) marks the generated tokens of scorable rows."""
    # Squeezing copies everything twice: skip it where every completion is one run of generated tokens.
    squeezed = alignment == "generated" and bool((present[:, 1:] & ~present[:, :-1]).any())
    aligned = present
    if squeezed:
        aligned = _positions(present) < present.sum(dim=1, keepdim=True)
        weights = _move(weights, present, aligned)
        if returns.size(1) > 1:
            returns = _move(returns, present, aligned)
    else:
        weights = weights.masked_fill_(~present, 0.0)

    def grouped(x):
        return x.view(-1, num_generations, x.size(1))

    baseline = _weighted_group_mean(grouped(returns), grouped(weights), grouped(aligned), leave_one_out)
    if zero_tail:
        ends = torch.where(aligned, _positions(aligned) + 1, 0).amax(dim=1)
        second_longest = grouped(ends.unsqueeze(1)).topk(2, dim=1).values[:, 1:]
        baseline.masked_fill_(_positions(aligned[:1]) >= second_longest, 0.0)
    baseline = baseline.expand(-1, num_generations, -1).reshape(present.shape)
    if leave_one_out and not zero_tail:
        alone = _sum_group(grouped(aligned).float(), own_left_out=True) == 0
        baseline = torch.where(alone.reshape(present.shape), returns, baseline)
    return _move(baseline, aligned, present) if squeezed else baseline


def _move(x: torch.Tensor, source: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """Put what `x` holds where `source` is True, row by row and in order, where `target` is True; 0 elsewhere."""
    return torch.zeros_like(x).masked_scatter_(target, x.masked_select(source))
