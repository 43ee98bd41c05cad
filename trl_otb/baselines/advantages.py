"""Computes advantages from scored completions and a baseline."""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..energy import check_energies, importance_weighted
from .completions import ALIGNMENTS, Completions, put_back, squeeze
from .registry import Baseline, find_baseline


BLOCK = 2**18  # tokens of whole groups of which advantages are computed at once, to keep intermediate results small


class Advantages(NamedTuple):
    """What [`subtract`] returns, each `(B, T)`; T is 1 under a baseline per completion."""

    advantages: Tensor  # A = G − B; 0 for completions without a reward and where there is no token
    baselines: Tensor
    b0: Tensor  # what calling the baseline returned, before its `adjust`; may be `(B, 1)`


def subtract(
    baseline: Baseline,
    local: Completions,
    gather_batch: Callable[[Completions, bool], Completions] | None = None,
    rows: slice = slice(None),
    b0: Tensor | None = None,
) -> Advantages:
    """
    The advantages of `local`, this process's completions, which hold all that `baseline.needs`.

    Args:
        gather_batch: Adds other rows that the baseline compares, as those of other processes. Its second argument says
            whether tokens are compared.
        rows: The place of `local` in what `gather_batch` returns.
        b0: B0, if it is known: then the baseline is not called.

    Raises:
        ValueError: A user's baseline returned values that are not finite or of the wrong shape.
    """
    if not baseline.per_token:
        local = local.totals()
    if baseline.scope == "group" and gather_batch is None and baseline.per_token and b0 is None:
        parts = [_subtract(baseline, block, _b0(baseline, block)) for block in local.blocks(BLOCK)]
        return parts[0] if len(parts) == 1 else Advantages(*map(torch.cat, zip(*parts, strict=True)))
    if b0 is None:
        batch = local if gather_batch is None else gather_batch(local, not baseline.adjusts)
        b0 = _b0(baseline, batch)[rows][:, : local.mask.size(1)]
    return _subtract(baseline, local, b0)


def _b0(baseline: Baseline, batch: Completions) -> Tensor:
    if batch.num_generations == 1 and baseline.scope == "group":
        return torch.zeros_like(batch.scored)  # there is nothing to compare
    return _checked(baseline.estimator(batch), baseline, batch)


def _subtract(baseline: Baseline, local: Completions, b0: Tensor) -> Advantages:
    subtracted = _checked(baseline.estimator.adjust(local, b0), baseline, local) if baseline.adjusts else b0
    present = local.mask if baseline.per_token else local.scored
    return Advantages((local.returns - subtracted) * present, subtracted, b0)


def _checked(result: Any, baseline: Baseline, x: Completions) -> Tensor:
    """The result of a user's function, broadcast to `(B, T)` or `(B, 1)`; only values at tokens must be finite."""
    if baseline.built_in:
        return result
    length = max(x.mask.size(1), x.returns.size(1))  # of other processes there may be returns per token alone
    shape = (len(x), length if baseline.per_token else 1)
    try:
        result = torch.as_tensor(result, dtype=torch.float32, device=x.returns.device)
        result = result if result.shape == (len(x), 1) else result.expand(shape)
    except (RuntimeError, TypeError, ValueError) as error:
        what = f"shape {tuple(result.shape)}" if isinstance(result, Tensor) else f"type {type(result).__name__}"
        raise ValueError(
            f"The baseline {baseline.name!r} returned a result of {what}: it must be a tensor of real numbers that can "
            f"be broadcast to {'(B, T)' if baseline.per_token else '(B, 1)'} = {shape}."
        ) from error
    present = x.mask if baseline.per_token else x.scored
    broken = ~result.isfinite() & present.bool()
    if broken.any():
        row, token = broken.nonzero()[0].tolist()
        value = result.expand(shape)[row, token].item()
        raise ValueError(
            f"The baseline {baseline.name!r} returned {value} for completion {row}, token {token}: it must be finite "
            "wherever there is a token. Where all weights of a mean are 0, `x.mean` takes the plain mean."
        )
    return result.nan_to_num(nan=0.0, posinf=0.0, neginf=0.0)


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
    Advantages A_{t,i} = G_{t,i} − B_{t,i}, B by the formula in the baseline's docstring.

    Args:
        rewards (`(B,)` or `(B, T)`): One return per completion, or one reward per token, of which a baseline per token
            takes the reward-to-go, a baseline per completion the sum, as GRPO does. NaN marks a completion without a
            reward: its group's baseline excludes it, and its advantage is 0.
        energy (`(B, T)`): w_t, see [`~trl_otb.energy.token_energy`]; may be NaN where `mask` is 0.
        mask (`(B, T)`): 1 on tokens that the policy generated.
        num_generations (`int`): N. The N rows of a group are adjacent.
        baseline (`str` or `Callable`, *optional*, defaults to `"otb"`): A name in `BASELINES`, `"module:function"`, or
            a function of [`Completions`]. A name gives a new instance of a baseline that learns; an instance keeps
            what it has learned.
        importance_weights (`(B, T)` or `(B, 1)`, *optional*): Ratios ρ, which scale every w_j, not G, by ρ_j².
        alignment (`str`, *optional*, defaults to `"generated"`): Whether t counts generated tokens, or positions of
            the completion (`"position"`, the reference's single-turn form), which differs around tool output.
        more: What else the baseline needs, by name, such as `logps`: see [`Completions`].

    Returns:
        `(B, T)`, always float32; 0 where `mask` is 0.

    Raises:
        ValueError: An option is unknown, shapes disagree, or an energy or a user's baseline is not finite.
    """
    _check_shapes(rewards, energy, mask, num_generations, importance_weights)
    if alignment not in ALIGNMENTS:
        raise ValueError(f"`alignment` is {alignment!r}: it must be one of {', '.join(map(repr, ALIGNMENTS))}.")
    entry, mask = find_baseline(baseline).instance(), mask.bool()
    energies: dict[str, Tensor] = {}
    if "energy" in entry.needs:
        energies["energy"] = energy
        if importance_weights is not None:
            energies["loss_energy"] = importance_weighted(energy, importance_weights)
        check_energies(energies.get("loss_energy", energy), mask)
    options: dict[str, Any] = {"alignment": alignment, **energies, **more}
    x = squeeze(rewards, mask, num_generations, **options)
    advantages = subtract(entry, x).advantages
    return put_back(advantages, mask) if alignment == "generated" else advantages.expand(mask.shape) * mask


def _check_shapes(rewards: Tensor, energy: Tensor, mask: Tensor, n: int, ratios: Tensor | None) -> None:
    shape, rows = tuple(mask.shape), len(mask)
    shapes: dict[str, Any] = {"energy": (energy, [shape]), "rewards": (rewards, [(rows,), shape])}
    shapes["importance_weights"] = ratios, [shape, (rows, 1)]
    for name, (values, expected) in shapes.items():
        if values is not None and (tuple(values.shape) not in expected or mask.dim() != 2):
            raise ValueError(
                f"`{name}` has shape {tuple(values.shape)} and `mask` {shape}: they must be "
                f"{' or '.join(map(str, expected))} and (B, T)."
            )
    if n < 1 or len(mask) % n != 0:
        raise ValueError(f"`num_generations` is {n} and there are {len(mask)} rows: the batch must hold whole groups.")
