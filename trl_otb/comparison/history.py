"""Baselines on top of another, after some generation batches, and what they predict for a pool's tokens."""

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from itertools import cycle, islice
from typing import Any

import torch
from datasets.fingerprint import Hasher

from ..baselines import Baseline, Tokens, find_baseline
from ..baselines.advantages import (
    advantages_on_top,
    assign_credit,
    assign_credit_by_totals,
    compared_by,
    totals_of_tokens,
)
from ..baselines.groups import turns_of
from ..rewards import last_tokens
from ..rollout import Rollout
from ..seam.sampling import rows_at_once, sample_batch
from ..seam.trainer import prompt_keys
from ..trainer import OTBGRPOTrainer
from .estimators import Pool, joined, stacked


Example = tuple[str, dict[str, Any]]  # of the training data, with its hash
History = tuple[dict[str, Baseline], list[dict[str, Pool]]]  # see `with_history`
BATCHES = 8  # generation batches that a baseline with memory sees before it is measured


def with_history(
    trainer: OTBGRPOTrainer,
    names: list[str],
    examples: list[Example],
    prompts_per_batch: int,
    completions: int,
    seed: int,
) -> History:
    """
    The baselines `names`, ready to predict: the trainer's own as trained, others after `BATCHES` batches of
    `examples`, sampled with the trainer's N.

    Returns:
        `tuple`: the baselines by name; and, with rewards per turn or token, batches of prompts to pool a measured
        prompt with: for each prompt, by its example's hash, at least `completions` completions.
    """
    found, fresh = {}, []
    for name in names:
        if (own := _trained(trainer, name)) is not None:
            found[name] = replace(own, function=copy.deepcopy(own.function))
            continue
        found[name] = rule = find_baseline(name).instance()
        if rule.remembers:
            fresh.append(rule)
    some, n = cycle(examples), trainer.num_generations
    sampled: list[tuple[list[Example], int, Pool]] = []
    per_token = False
    for batch in range(BATCHES):
        if batch > 0 and not (fresh or per_token):
            break
        of_batch, of_seed = list(islice(some, min(prompts_per_batch, len(examples)))), seed + 7919 * (batch + 1)
        parts = sample_batch(trainer, [row for _, row in of_batch], n, of_seed % 2**32)
        pool, beside = pool_of(parts), beside_of(parts, [row for _, row in of_batch for _ in range(n)])
        prompt = torch.arange(len(pool)) // n
        for rule in fresh:
            below = _below(rule, pool, n, trainer.args.alignment)
            with torch.autocast("cpu", enabled=False):
                rule.learn(Tokens(pool.rewards, below, rule.declared(pool.energy), pool.mask, prompt, beside))
        sampled.append((of_batch, of_seed + 1, pool))
        per_token = per_token or pool.rewards.dim() == 2
    return found, [_enlarged(trainer, completions, *of) for of in sampled] if per_token else []


def _enlarged(
    trainer: OTBGRPOTrainer, completions: int, examples: list[Example], seed: int, pool: Pool
) -> dict[str, Pool]:
    """The pool of each example, with at least `completions` completions, and rewards per token."""
    pools, n, at_once = [pool], trainer.num_generations, rows_at_once(trainer)
    for first in range(n, completions, at_once):
        more = min(at_once, completions - first)
        pools.append(pool_of(sample_batch(trainer, [row for _, row in examples], more, (seed + first - n) % 2**32)))
    for some in pools:
        some.rewards = rewards_of_tokens(some.rewards, some.mask)
    by_example = [[some.rows(rows) for rows in torch.arange(len(some)).chunk(len(examples))] for some in pools]
    return {name: joined([of[i] for of in by_example]) for i, (name, _) in enumerate(examples)}


def _below(rule: Baseline, pool: Pool, n: int, alignment: str) -> torch.Tensor:
    """`(b, 1)`, or `(b, T)` with rewards per turn or token, B0 of whole groups of `n`."""
    if pool.rewards.dim() == 1:
        totals = totals_of_tokens(pool.energy, pool.mask)
        below = assign_credit_by_totals(pool.rewards, *totals, n, baseline=rule.on_top_of or "")
    else:
        compared = compared_by(rule, pool.rewards)
        below = assign_credit(pool.rewards, pool.energy, pool.mask, n, baseline=compared, alignment=alignment)
    return below.returns - below.advantages


def advantages_among(
    rule: Baseline,
    pool: Pool,
    beside: dict[str, torch.Tensor],
    example: str,
    batches: list[dict[str, Pool]],
    alignment: str,
) -> Callable[[torch.Tensor, int], torch.Tensor]:
    """
    A function from rows of the example's pool, whole groups, and their size to `(b, T)` advantages. Each group
    replaces the same example, or else the last one, in one of `batches`, in turn.
    """
    turns = cycle(batches)

    @torch.autocast("cpu", enabled=False)
    def of(rows: torch.Tensor, n: int) -> torch.Tensor:
        found = torch.zeros(len(rows), pool.mask.size(1))
        for group in range(0, len(rows), n):
            own, of_batch = rows[group : group + n], next(turns)
            others = [other for name, other in of_batch.items() if name != example][: len(of_batch) - 1]
            batch = joined([pool.rows(own), *(other.rows(torch.arange(n)) for other in others)])
            base = _below(rule, batch, n, alignment)[:n, : pool.mask.size(1)]
            tokens = Tokens(
                pool.rewards[own],
                base,
                rule.declared(pool.energy[own]),
                pool.mask[own],
                torch.zeros(n).long(),
                {name: values[own] for name, values in beside.items()},
            )
            found[group : group + n] = advantages_on_top(rule, tokens)
        return found

    return of


def history_of(trainer: OTBGRPOTrainer, names: list[str]) -> dict[str, Any]:
    """What the baselines `names` have seen: sampled batches, or the trainer's own training."""
    return {
        name: BATCHES if _trained(trainer, name) is None else Hasher.hash(trainer.state_to_save()) for name in names
    }


def _trained(trainer: OTBGRPOTrainer, name: str) -> Baseline | None:
    """The trainer's own baseline, if it has this name and has learned."""
    own = trainer.trained_baseline
    return own if own is not None and own.name == find_baseline(name).name else None


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
    return [rewards_of_tokens(part.rewards, part.mask) for part in parts]


def rewards_of_tokens(rewards: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """`(b, T)` from `(b, T)`, or from `(b,)`, one reward per completion, at the last token."""
    return rewards if rewards.dim() == 2 else last_tokens(mask) * rewards.unsqueeze(1)
