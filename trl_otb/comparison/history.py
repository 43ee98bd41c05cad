"""Baselines on top of another, after some generation batches, and their predictions for a pool's tokens."""

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from itertools import cycle, islice
from typing import Any

import torch
from datasets.fingerprint import Hasher

from ..baselines import Baseline, Tokens, find_baseline
from ..baselines.advantages import assign_credit_by_totals, totals_of_tokens
from ..baselines.groups import turns_of
from ..rewards import last_tokens
from ..rollout import Rollout
from ..seam.sampling import sample_batch
from ..seam.trainer import prompt_keys
from ..trainer import OTBGRPOTrainer
from .estimators import Pool, stacked


BATCHES = 8  # generation batches that a baseline with memory sees before it is measured


def with_history(
    trainer: OTBGRPOTrainer, names: list[str], examples: list[dict[str, Any]], prompts_per_batch: int, seed: int
) -> dict[str, Baseline]:
    """
    The baselines `names`, ready to predict: the trainer's own as trained, others after `BATCHES` batches of
    `examples`, sampled with the trainer's N.
    """
    found, fresh = {}, []
    for name in names:
        if (own := _trained(trainer, name)) is not None:
            found[name] = replace(own, function=copy.deepcopy(own.function))
            continue
        found[name] = rule = find_baseline(name).instance()
        if rule.remembers:
            fresh.append(rule)
    some = cycle(examples)
    for batch in range(BATCHES if fresh else 0):
        of_batch = list(islice(some, prompts_per_batch))
        parts = sample_batch(trainer, of_batch, trainer.num_generations, (seed + 7919 * (batch + 1)) % 2**32)
        pool, beside = pool_of(parts), beside_of(parts, [e for e in of_batch for _ in range(trainer.num_generations)])
        if pool.rewards.dim() == 2:
            raise ValueError(no_turns(fresh[0].name))
        totals, n = totals_of_tokens(pool.energy, pool.mask), trainer.num_generations
        for rule in fresh:
            below = assign_credit_by_totals(pool.rewards, *totals, n, baseline=rule.on_top_of or "")
            prompt, base = torch.arange(len(pool)) // n, below.returns - below.advantages
            with torch.autocast("cpu", enabled=False):
                rule.learn(Tokens(pool.rewards, base, rule.declared(pool.energy), pool.mask, prompt, beside))
    return found


def history_of(trainer: OTBGRPOTrainer, names: list[str]) -> dict[str, Any]:
    """What the baselines `names` have seen: sampled batches, or the trainer's own training."""
    return {
        name: BATCHES if _trained(trainer, name) is None else Hasher.hash(trainer.state_to_save()) for name in names
    }


def _trained(trainer: OTBGRPOTrainer, name: str) -> Baseline | None:
    """The trainer's own baseline, if it has this name and has learned."""
    own = trainer.trained_baseline
    return own if own is not None and own.name == find_baseline(name).name else None


def no_turns(name: str) -> str:
    return (
        f"`baselines` names {name!r}, which is on top of another: with rewards per turn or token it cannot be "
        "measured. Drop it."
    )


def pool_of(parts: list[Rollout]) -> Pool:
    """The completions of several rollouts, padded to the longest, on the CPU."""
    return Pool(
        rewards=stacked(_alike(parts)).float(),
        energy=stacked([rollout.energy for rollout in parts]).nan_to_num(0.0),
        mask=stacked([rollout.mask for rollout in parts]),
    )


def beside_of(parts: list[Rollout], examples: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
    """What else a baseline may read of these rollouts; `examples` has one per completion."""
    found = {
        name: stacked([getattr(rollout, name) for rollout in parts])
        for name in ("logps", "states", "completion_ids")
        if getattr(parts[0], name) is not None
    }
    return found | {"turn": turns_of(stacked([r.mask for r in parts])), "prompt_key": prompt_keys(examples)}


@torch.autocast("cpu", enabled=False)
def prediction(rule: Baseline, pool: Pool, beside: dict[str, torch.Tensor]) -> tuple[float, torch.Tensor]:
    """
    a, and `(M, T)` p_t, where B_t = a B0 + p_t. Bounds of B, as `value` has, are those at B0 = the mean return of the
    pool's other half.

    Raises:
        ValueError: B, without bounds, is not of this form.
    """
    if pool.rewards.dim() == 2:
        raise ValueError(no_turns(rule.name))

    def at(base: torch.Tensor) -> torch.Tensor:
        energy, prompt = rule.declared(pool.energy), torch.zeros(len(pool)).long()
        tokens = Tokens(pool.rewards, base, energy, pool.mask, prompt, beside)
        return (rule.of(tokens) * tokens.mask).double()

    with _without_bounds(rule):
        none, one, two = (at(torch.full((len(pool), 1), base)) for base in (0.0, 1.0, 2.0))
    slopes, present = one - none, pool.mask > 0
    slope = slopes[present].mean().item() if present.any() else 1.0
    off = max((slopes - slope)[present].abs().amax().item(), (two - one - slopes).abs().amax().item())
    if off > 1e-3 * max(1.0, none.abs().amax().item()):
        raise ValueError(
            f"`baselines` names {rule.name!r}, which is not a constant times the baseline below plus a prediction: "
            "only such baselines can be measured. Drop it."
        )
    first, second = torch.arange(len(pool)).chunk(2)
    expected = torch.empty(len(pool), 1)
    for half, other in ((first, second), (second, first)):
        expected[half] = pool.rewards[other].nanmean().nan_to_num(nan=0.0)
    return slope, (at(expected) - slope * expected * pool.mask).float()


@contextmanager
def _without_bounds(rule: Baseline) -> Iterator[None]:
    if not hasattr(rule.function, "bounded"):
        yield
        return
    before, rule.function.bounded = rule.function.bounded, False
    try:
        yield
    finally:
        rule.function.bounded = before


def _alike(parts: list[Rollout]) -> list[torch.Tensor]:
    """The rewards of these rollouts: all `(b, T)` if any has rewards per turn or token, else `(b,)`."""
    if all(part.rewards.dim() == 1 for part in parts):
        return [part.rewards for part in parts]
    return [
        part.rewards if part.rewards.dim() == 2 else last_tokens(part.mask) * part.rewards.unsqueeze(1)
        for part in parts
    ]
