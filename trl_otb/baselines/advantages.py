"""Computes advantages from scored completions and a baseline."""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..energy import check_energies, importance_weighted
from .completions import ALIGNMENTS, Completions, put_back, squeeze
from .registry import Baseline, find_baseline


BLOCK = 2**18  # tokens of whole groups that are credited at once, to keep intermediate results small


class Credit(NamedTuple):
    """
    What [`credit`] returns; T is 1 under a baseline per completion.

    Args:
        advantages, baselines (`(B, T)`): A = G − B, which is 0 for completions without a reward and where there is no
            token; and B.
        base (`(B, T)` or `(B, 1)`): What calling the baseline returned, before its `adjust`.
    """

    advantages: Tensor
    baselines: Tensor
    base: Tensor


def credit(
    rule: Baseline,
    own: Completions,
    everyone: Callable[[Completions, bool], Completions] | None = None,
    rows: slice = slice(None),
) -> Credit:
    """
    The advantages of `own`, this process's completions, with all that `rule.needs`. If rows that the rule must see
    together are elsewhere, such as on other processes, `everyone` adds them to `own` (its second argument says whether
    the rule compares tokens), and `rows` is the place of `own` among all. A `ValueError` is raised if a user's
    baseline returned values that are not finite or of the wrong shape.
    """
    if not rule.per_token:
        own = own.totals()
    if rule.scope == "group" and everyone is None and rule.per_token:
        parts = [_credit(rule, block, block) for block in own.blocks(BLOCK)]
        return parts[0] if len(parts) == 1 else Credit(*map(torch.cat, zip(*parts, strict=True)))
    return _credit(rule, own, own if everyone is None else everyone(own, not rule.adjusts), rows)


def _credit(rule: Baseline, own: Completions, everyone: Completions, rows: slice = slice(None)) -> Credit:
    length = own.mask.size(1)
    if own.num_generations == 1 and rule.scope == "group":
        base = torch.zeros_like(own.scored)  # there is nothing to compare
    else:
        base = _checked(rule.rule(everyone), rule, everyone)[rows][:, :length]
    baseline = _checked(rule.rule.adjust(own, base), rule, own) if rule.adjusts else base
    present = own.mask if rule.per_token else own.scored
    return Credit((own.returns - baseline) * present, baseline, base)


def _checked(baseline: Any, rule: Baseline, x: Completions) -> Tensor:
    """The result of a user's function, broadcast to `(B, T)` or `(B, 1)`; only values at tokens must be finite."""
    if rule.built_in:
        return baseline
    length = max(x.mask.size(1), x.returns.size(1))  # of other processes there may be returns per token alone
    shape = (len(x), length if rule.per_token else 1)
    try:
        baseline = torch.as_tensor(baseline, dtype=torch.float32, device=x.returns.device)
        baseline = baseline if baseline.shape == (len(x), 1) else baseline.expand(shape)
    except (RuntimeError, TypeError, ValueError) as error:
        what = f"shape {tuple(baseline.shape)}" if isinstance(baseline, Tensor) else f"type {type(baseline).__name__}"
        raise ValueError(
            f"The baseline {rule.name!r} returned a result of {what}: it must be a tensor of real numbers that can be "
            f"broadcast to {'(B, T)' if rule.per_token else '(B, 1)'} = {shape}."
        ) from error
    present = x.mask if rule.per_token else x.scored
    broken = ~baseline.isfinite() & present.bool()
    if broken.any():
        row, token = broken.nonzero()[0].tolist()
        value = baseline.expand(shape)[row, token].item()
        raise ValueError(
            f"The baseline {rule.name!r} returned {value} for completion {row}, token {token}: it must be finite "
            "wherever there is a token. A weighted mean whose weights are all 0 is a usual cause; `x.mean` takes the "
            "plain mean there."
        )
    return baseline.nan_to_num(nan=0.0, posinf=0.0, neginf=0.0)


def compute_advantages(
    rewards: Tensor,
    energy: Tensor,
    mask: Tensor,
    num_generations: int,
    *,
    baseline: str | Callable | Baseline = "otb",
    importance_weights: Tensor | None = None,
    alignment: str = "generated",
    **more: Tensor,
) -> Tensor:
    """
    Advantages A_{t,i} = G_{t,i} − B_{t,i}; for `"otb"` (Theorem 4.1)

        B_t = Σ_i W_{t,i} G_{t,i} / Σ_i W_{t,i}   over the completions i of the group with a t-th generated token.

    Args:
        rewards (`(B,)` or `(B, T)`): One return per completion, or one reward per token, of which a baseline per token
            takes the reward-to-go, a baseline per completion the sum, as GRPO does. NaN marks a completion without a
            reward: its group's baseline excludes it, and its advantage is 0.
        energy (`(B, T)`): w_t, see [`~trl_otb.energy.token_energy`]; may be NaN where `mask` is 0.
        mask (`(B, T)`): 1 on tokens that the policy generated.
        num_generations (`int`): N. The N rows of a group are adjacent.
        baseline (`str` or `Callable`, *optional*, defaults to `"otb"`): A name in `BASELINES`, `"module:function"`, or
            a function of [`Completions`]. For a baseline that learns, a name gives a new instance; pass an instance to
            use what it has learned.
        importance_weights (`(B, T)` or `(B, 1)`, *optional*): Rollout importance ratios ρ, which scale every w_j by
            ρ_j². They do not weight the returns.
        alignment (`str`, *optional*, defaults to `"generated"`): Whether t counts generated tokens, or positions of
            the completion (`"position"`, the reference's single-turn form), which differs around tool output.
        more: What else the baseline needs, by name, such as `logps`: see [`Completions`].

    Returns:
        `(B, T)`, always float32; 0 where `mask` is 0.

    Raises:
        ValueError: An option is unknown, the shapes disagree, an energy is not finite, or a user's baseline returned
            values that are not finite or of the wrong shape.
    """
    _check_shapes(rewards, energy, mask, num_generations, importance_weights)
    if alignment not in ALIGNMENTS:
        raise ValueError(f"`alignment` is {alignment!r}: it must be one of {', '.join(map(repr, ALIGNMENTS))}.")
    rule, mask, weights = find_baseline(baseline).instance(), mask.bool(), None
    if "energy" in rule.needs:
        weights = None if importance_weights is None else importance_weighted(energy, importance_weights)
        check_energies(energy if weights is None else weights, mask)
    options: dict[str, Any] = {"alignment": alignment, "weights": weights, **more}
    x = squeeze(rewards, mask, num_generations, energy=energy if "energy" in rule.needs else None, **options)
    advantages = credit(rule, x).advantages
    return put_back(advantages, mask) if alignment == "generated" else advantages.expand(mask.shape) * mask


def _check_shapes(rewards: Tensor, energy: Tensor, mask: Tensor, n: int, ratios: Tensor | None) -> None:
    shape, one = tuple(mask.shape), (len(mask), 1)
    tensors: dict[str, tuple[Tensor, tuple[Any, ...]]]
    tensors = {"energy": (energy, (shape,)), "rewards": (rewards, (one[:1], shape))}
    tensors |= {} if ratios is None else {"importance_weights": (ratios, (shape, one))}
    for name, (values, expected) in tensors.items():
        if tuple(values.shape) not in expected or mask.dim() != 2:
            raise ValueError(
                f"`{name}` has shape {tuple(values.shape)} and `mask` {shape}: they must be "
                f"{' or '.join(map(str, expected))} and (B, T)."
            )
    if n < 1 or len(mask) % n != 0:
        raise ValueError(f"`num_generations` is {n} and there are {len(mask)} rows: the batch must hold whole groups.")
