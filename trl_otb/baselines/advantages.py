"""Computes the advantage of every token from rewards, energies and a baseline."""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from ..blocks import by_blocks
from ..energy import check_energies, importance_weighted
from .groups import Completions, Groups, completion_returns
from .pooled import REWARDS_TO_GO_POOLED
from .registry import READS, Baseline, check_options, find_baseline
from .tokens import Tokens


class Credit(NamedTuple):
    """
    The advantage of each generated token, and the return it is based on.

    Args:
        advantages (`torch.Tensor` of shape `(B, T)`, or `(B, 1)` under one number per completion):
            A = G − B; 0 for completions without a reward and, if of shape `(B, T)`, where nothing was generated.
        returns (`torch.Tensor` of shape `(B, T)` or `(B, 1)`):
            G; 0 for completions without a reward. G − A is the baseline.
        lone_tail_tokens (`torch.Tensor` of shape `(B, 1)`):
            The number of a completion's generated tokens on the lone tail.
        group ([`Completions`], *optional*):
            The baseline's argument.
    """

    advantages: torch.Tensor
    returns: torch.Tensor
    lone_tail_tokens: torch.Tensor
    group: Completions | None = None


def assign_credit(
    rewards: torch.Tensor,
    energy: torch.Tensor,
    mask: torch.Tensor,
    num_generations: int,
    *,
    baseline: str | Callable | Baseline = "otb",
    alignment: str = "generated",
    zero_tail: bool = True,
    leave_one_out: bool = False,
    beside: dict[str, torch.Tensor] | None = None,
) -> Credit:
    """
    The advantages together with the returns; arguments and errors are those of [`compute_advantages`]. `beside` holds
    what else the baseline reads, by name: see [`~trl_otb.baselines.Groups`].
    """
    check_options(baseline, alignment, zero_tail, leave_one_out)
    _check_shapes(rewards, energy, mask, num_generations)
    rule = find_baseline(baseline).instance()
    if rule.on_top_of is not None:
        below = compared_by(rule, rewards)
        aligned = alignment if below.per_token else "generated"
        found = assign_credit(rewards, energy, mask, num_generations, baseline=below, alignment=aligned)
        prompt = torch.arange(len(mask), device=mask.device) // num_generations
        tokens = Tokens(rewards, found.returns - found.advantages, rule.declared(energy), mask, prompt, beside)
        return Credit(advantages_on_top(rule, tokens), tokens.returns, found.lone_tail_tokens)
    if rule.totals_only:
        totals = completion_returns(rewards), *totals_of_tokens(energy, mask)
        return assign_credit_by_totals(
            *totals, num_generations, baseline=rule, leave_one_out=leave_one_out, beside=beside
        )
    groups = Groups(
        rewards,
        rule.declared(energy),
        mask,
        num_generations,
        per_token=rule.per_token,
        alignment=alignment,
        leave_one_out=leave_one_out,
        beside=beside,
    )
    return _credit(groups, rule, zero_tail)


def assign_credit_by_totals(
    returns: torch.Tensor,
    total_energy: torch.Tensor,
    lengths: torch.Tensor,
    num_generations: int,
    *,
    baseline: str | Callable | Baseline = "group_mean",
    leave_one_out: bool = False,
    beside: dict[str, torch.Tensor] | None = None,
) -> Credit:
    """[`assign_credit`] for a baseline that reads totals only; the arguments are those of [`Completions`]."""
    rule = find_baseline(baseline).instance()
    options: dict[str, Any] = {"leave_one_out": leave_one_out, "beside": beside}
    return _credit(Completions(returns, rule.declared(total_energy), lengths, num_generations, **options), rule)


def compared_by(rule: Baseline, rewards: torch.Tensor) -> Baseline:
    """
    The baseline that compares completions: `rule` itself, or the one below it. With `rewards` per token, the one below
    is the pooled mean of the others' reward-to-go.
    """
    if rule.on_top_of is None:
        return rule
    return find_baseline(rule.on_top_of) if rewards.dim() == 1 else REWARDS_TO_GO_POOLED


def advantages_on_top(rule: Baseline, tokens: Tokens) -> torch.Tensor:
    """`(B, T)` advantages under a baseline on top of another, which treats each completion by itself."""
    baseline = rule.of(tokens)
    if not rule.built_in:
        present = tokens.mask.unsqueeze(0)
        baseline = _checked(baseline, rule, present.shape, present).squeeze(0)
    return (tokens.returns - baseline) * tokens.mask


def totals_of_tokens(energy: torch.Tensor | None, mask: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """`(B,)` W_T, 0 without energies, and `(B,)` the number of generated tokens; float32."""
    lengths = mask.sum(dim=1).float()
    if energy is None:
        return torch.zeros_like(lengths), lengths
    return energy.float().masked_fill(mask == 0, 0.0).cumsum(dim=1)[:, -1], lengths


def _credit(groups: Completions, rule: Baseline, zero_tail: bool = True) -> Credit:
    """The credit of whole groups, for baselines that are not on top of another."""
    if groups.shape[1] == 1:  # no other completion
        baseline = torch.zeros_like(groups.returns)
    else:
        baseline = rule.of(groups)
        if not rule.built_in:
            shape = groups.shape if rule.per_token else (*groups.shape[:2], 1)
            compared = groups.present if rule.per_token and isinstance(groups, Groups) else groups.scorable
            baseline = _checked(baseline, rule, shape, compared)
        if rule.zero_tail and isinstance(groups, Groups):
            if zero_tail:
                baseline = baseline * (1 - groups.lone_tail)
            elif groups.leave_one_out:
                baseline = torch.where(groups.alone, groups.returns, baseline)
    advantages = groups.returns - baseline
    if rule.per_token and isinstance(groups, Groups):
        advantages = groups.in_place(advantages.expand(groups.shape))
    else:
        advantages = advantages.reshape(-1, 1) * groups.row_scorable
    return Credit(advantages, groups.row_returns, groups.lone_tail_tokens, groups)


def compute_advantages(
    rewards: torch.Tensor,
    energy: torch.Tensor,
    mask: torch.Tensor,
    num_generations: int,
    *,
    baseline: str | Callable | Baseline = "otb",
    alignment: str = "generated",
    zero_tail: bool = True,
    leave_one_out: bool = False,
    importance_weights: torch.Tensor | None = None,
    **beside: torch.Tensor,
) -> torch.Tensor:
    """
    Advantages A_{t,i} = G_{t,i} − B_{t,i}; for `"otb"` (Theorem 4.1)

        B_t = Σ_i W_{t,i} G_{t,i} / Σ_i W_{t,i}   over the completions i of the group with a t-th generated token.

    Args:
        rewards (`torch.Tensor` of shape `(B,)` or `(B, T)`):
            One return per completion, or one reward per token. From the latter a baseline per token takes the
            reward-to-go G_t ([`~trl_otb.baselines.reward_to_go`]), a baseline per completion the sum, as GRPO does.
            NaN marks a completion without a reward: its group's baseline excludes it, and its advantage is 0.
        energy (`torch.Tensor` of shape `(B, T)`):
            w_t, see [`~trl_otb.energy.token_energy`]. Values where `mask` is 0 are ignored and may be NaN.
        mask (`torch.Tensor` of shape `(B, T)`):
            1 on tokens that the policy generated.
        num_generations (`int`):
            N. The N rows of a group are adjacent. With N = 1 there is nothing to compare: B = 0, and under a
            baseline with memory what it predicts.
        baseline (`str` or `Callable`, *optional*, defaults to `"otb"`):
            A name in `BASELINES`, `"module:function"`, or a function of [`~trl_otb.baselines.Groups`]. For a baseline
            with memory, a name gives a new instance; pass an instance to use what it has learned.
        alignment (`str`, *optional*, defaults to `"generated"`):
            For a baseline per token, whether t counts generated tokens or positions of the completion (`"position"`,
            the reference's single-turn form). The two differ if tool output comes between generated tokens.
        zero_tail (`bool`, *optional*, defaults to `True`):
            For `"otb"`, whether B = 0, and so A = G, where only the group's longest completion still generates. If
            `False`, A = 0 there.
        leave_one_out (`bool`, *optional*, defaults to `False`):
            Remove a completion's own term from numerator and denominator, so that B does not depend on the completion
            it is subtracted from, and the gradient is unbiased. At a token where no other completion is left, B = 0
            (A = G, still unbiased), except that `"otb"` with `zero_tail=False` skips the token (A = 0).
        importance_weights (`torch.Tensor` of shape `(B, T)` or `(B, 1)`, *optional*):
            Rollout importance ratios ρ, which scale every w_j by ρ_j². They do not weight the returns. A baseline on
            top of another, such as `"value"`, does not see them.
        beside:
            What else the baseline reads, by name, such as `logps`: see [`~trl_otb.baselines.Groups`].

    Returns:
        `torch.Tensor` of shape `(B, T)`, always float32; 0 where `mask` is 0.

    Raises:
        ValueError: An option is unknown or ignored by `baseline`, the shapes disagree, an energy is not finite, or a
            user's baseline modified its argument, or returned values that are not finite or do not fit `(G, N, T)`.
    """
    if importance_weights is not None and importance_weights.shape not in (mask.shape, (len(mask), 1)):
        raise ValueError(
            f"`importance_weights` has shape {tuple(importance_weights.shape)}: it must be (B, T) = "
            f"{tuple(mask.shape)} for ratios per token, or (B, 1) for ratios per completion."
        )
    _check_shapes(rewards, energy, mask, num_generations)
    if unknown := [name for name in beside if name not in READS]:
        raise TypeError(f"compute_advantages() got an unexpected keyword argument {unknown[0]!r}")
    rule = find_baseline(baseline).instance()
    options: dict[str, Any] = {"alignment": alignment, "zero_tail": zero_tail, "leave_one_out": leave_one_out}

    # A ratio may depend on the whole completion, of which a baseline on top of another sees no more than the prefix
    ratios = None if rule.on_top_of is not None else importance_weights

    def advantages_of(rows: slice) -> tuple[torch.Tensor]:
        weighted = importance_weighted(energy[rows], None if ratios is None else ratios[rows])
        if rule.uses_energy:
            check_energies(weighted, mask[rows], torch.arange(len(mask))[rows])
        also = {name: values[rows] for name, values in beside.items()}
        credit = assign_credit(
            rewards[rows], weighted, mask[rows], num_generations, baseline=rule, **options, beside=also
        )
        return (credit.advantages if rule.per_token else credit.advantages * mask[rows].float(),)

    rows_together = rows_compared(compared_by(rule, rewards), len(mask), num_generations)
    return by_blocks(advantages_of, mask, rows_together)[0]


def rows_compared(rule: Baseline, rows: int, num_generations: int) -> int:
    """How many of `rows` a baseline reads together: a group, or all rows if it compares prompts."""
    return max(rows, 1) if rule.across_prompts else num_generations


def _check_shapes(rewards: torch.Tensor, energy: torch.Tensor, mask: torch.Tensor, num_generations: int) -> None:
    if mask.dim() != 2 or energy.shape != mask.shape:
        raise ValueError(
            f"`energy` has shape {tuple(energy.shape)} and `mask` {tuple(mask.shape)}: both must be (B, T)."
        )
    if rewards.shape not in (mask.shape, mask.shape[:1]):
        raise ValueError(
            f"`rewards` has shape {tuple(rewards.shape)}: it must be (B,) = ({len(mask)},), one return per "
            f"completion, or (B, T) = {tuple(mask.shape)}, one reward per token."
        )
    if num_generations < 1 or len(mask) % num_generations != 0:
        raise ValueError(
            f"`num_generations` is {num_generations} and there are {len(mask)} rows: the batch must hold whole groups."
        )


def _checked(baseline: Any, rule: Baseline, shape: tuple[int, ...], compared: torch.Tensor) -> torch.Tensor:
    """
    The result of a user's function, with three axes; only values where `compared` is not 0 are checked.
    """
    if not isinstance(baseline, torch.Tensor | float | int):
        raise ValueError(
            f"The baseline {rule.name!r} returned a {type(baseline).__name__}: it must return a tensor that can be "
            f"broadcast to {shape}."
        )
    baseline = torch.as_tensor(baseline, device=compared.device)
    if baseline.is_complex() or baseline.layout != torch.strided:
        raise ValueError(
            f"The baseline {rule.name!r} returned a tensor of {baseline.dtype} with layout {baseline.layout}: it must "
            "be one of real numbers, and dense."
        )
    baseline = baseline.float()
    try:
        baseline = baseline.expand(shape)
    except RuntimeError as error:
        kind = "(B, T)" if rule.on_top_of else "(G, N, T)" if rule.per_token else "(G, N, 1)"
        raise ValueError(
            f"The baseline {rule.name!r} returned a tensor of shape {tuple(baseline.shape)}: it must be one that can "
            f"be broadcast to {kind} = {shape[-kind.count(',') - 1 :]}."
        ) from error
    finite = baseline.isfinite()
    broken = ~finite & compared.bool()
    if broken.any():
        prompt, completion, token = broken.nonzero()[0].tolist()
        value = baseline[prompt, completion, token].item()
        raise ValueError(
            f"The baseline {rule.name!r} returned {value} for prompt {prompt}, completion {completion}, token "
            f"{token}: it must be finite wherever a completion is present. A weighted mean whose weights are all 0 is "
            "a usual cause; `group.mean` takes the plain mean there."
        )
    return baseline.where(finite, torch.zeros((), device=baseline.device))
