"""Moments of the gradient of a prompt's groups under every baseline, from a pool of its completions."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import cycle
from typing import Any

import torch
from torch import Tensor

from ..baselines import Baseline, Completions, find_baseline, joined, only_compared, subtract


PARTITIONS = 20  # random splits of a pool into groups, for baselines that compare a group
BATCH_PARTITIONS = 5  # and for those that compare prompts, whose batches are credited one by one
GroupAdvantages = Callable[[Tensor, int], Tensor]  # from rows of whole groups, and N, to A, `(b, T)` or `(b, 1)`


def prompt_moments(
    pool: Completions,
    masks: list[Tensor],
    gradient_of: Callable[[int, Tensor], Tensor],
    baselines: dict[str, Baseline],
    sizes: list[int],
    companions: dict[int, list[list[Completions]]],
    seed: int = 0,
) -> dict[Any, Any]:
    """
    The moments of a prompt's gradient under each baseline at each group size.

    Groups never mix the two halves of the pool, so products of halves share no completion.

    A baseline per completion costs nothing more: a group's gradient is a sum of the completions' own gradients, so the
    pool is split into groups many times. A baseline per token takes a backward pass for every completion of a split, so
    it is measured on one split. That split has an error of its own, which is estimated by a baseline per completion,
    known for this split and for all, and subtracted. This control variate is `ogb`, `ogb_loo`, or the B0 of an
    `adjust`; it does not change expectations.

    Args:
        pool: M completions of one prompt.
        masks: Of each of the M completions, `(T,)` 1 on generated tokens, 0 on tool output.
        gradient_of: A function from a row of the pool and weights `(E, T)` to `(E, k)`: Σ_t A_t ∇ log π(y_t).
        baselines, sizes: Baselines by name, and values of N.
        companions: By N, batches of other prompts with at least N completions, for baselines that compare prompts.

    Returns:
        `dict`: `truth`, `(2, k)`: the gradient by each half, taken as one group under `ogb_loo`; and for each
        `(name, N)` its `square`, the mean of ‖ĝ‖², and `mean`, `(2, k)`, the mean of ĝ by half.
    """
    rng = torch.Generator().manual_seed(seed)
    halves = torch.arange(len(pool)).chunk(2)
    parts = {n: [[random_groups(half, n, rng) for half in halves] for _ in range(PARTITIONS)] for n in sizes}
    advantages = {name: _advantages(entry, pool, companions, rng) for name, entry in baselines.items()}
    controls = {name: find_baseline("ogb_loo" if entry.unbiased else "ogb") for name, entry in baselines.items()}
    if pool.returns.size(1) == 1:  # not with rewards along the way, where B0 has tokens
        for name, entry in baselines.items():
            if entry.adjusts:
                controls[name] = replace(entry, estimator=entry.estimator.__call__, per_token=False)
    controlled = {name: _advantages(entry, pool, companions, rng) for name, entry in controls.items()}
    of_truth = _advantages(find_baseline("ogb_loo"), pool, {}, rng)
    studied = [(name, n) for n in sizes for name, entry in baselines.items() if comparable(entry, n)]
    per_token = [(name, n) for name, n in studied if baselines[name].per_token]
    weights = torch.zeros(len(pool), 1 + len(per_token), pool.mask.size(1))
    weights[:, 0] = 1.0
    for i, (name, n) in enumerate(per_token, start=1):
        for rows in parts[n][0]:
            weights[rows, i] = advantages[name](rows, n)
    # At the places of generated tokens, among tool output
    places = [(mask.long().cumsum(0) - 1).clamp(min=0) for mask in masks]
    by_completion = [
        gradient_of(i, weights[i][:, at] * mask) for i, (at, mask) in enumerate(zip(places, masks, strict=True))
    ]
    scores, *of_tokens = torch.stack(by_completion, dim=1)  # each (M, k)
    weighted = dict(zip(per_token, of_tokens, strict=True))
    products = scores.double() @ scores.double().T

    def of_completions(advantages_of: GroupAdvantages, n: int, partitions: list[Tensor]) -> tuple[Tensor, Tensor]:
        """E‖ĝ‖² and Eĝ over the groups of `n` that each partition holds one after the other."""
        rows = torch.cat(partitions)
        # A group's gradient is Σ_i c_i s_i, so its square needs the products of the completions' gradients alone
        c = advantages_of(rows, n)[:, 0].double().view(-1, n) / n
        at = rows.view(-1, n)
        squares = torch.einsum("gi,gij,gj->g", c, products[at.unsqueeze(2), at.unsqueeze(1)], c)
        total = torch.zeros(len(scores), dtype=c.dtype).index_add_(0, at.flatten(), c.flatten())
        return squares.mean(), (total / len(at)).to(scores) @ scores

    def of_half(name: str, n: int, partitions: list[Tensor]) -> tuple[Tensor, Tensor]:
        """The same under a baseline."""
        many = partitions[: BATCH_PARTITIONS if baselines[name].scope == "batch" else PARTITIONS]
        if (name, n) not in weighted:
            return of_completions(advantages[name], n, many)
        gradients = weighted[name, n][partitions[0]].unflatten(0, (-1, n)).mean(dim=1)
        (square_of_one, mean_of_one), (square, mean) = (
            of_completions(controlled[name], n, some) for some in (partitions[:1], many)
        )
        measured = gradients.double().square().sum(dim=1).mean()
        return measured + square - square_of_one, gradients.mean(dim=0) + mean - mean_of_one

    truth = [of_completions(of_truth, len(half), [half])[1] for half in halves]
    moments: dict[Any, Any] = {"truth": torch.stack(truth)}
    for name, n in studied:
        of_halves = [of_half(name, n, list(of)) for of in zip(*parts[n], strict=True)]
        squares, means = (torch.stack(of) for of in zip(*of_halves, strict=True))
        moments[name, n] = {"square": squares.mean().item(), "mean": means}
    return moments


def comparable(baseline: Baseline, n: int) -> bool:
    """Whether groups of `n` give the baseline something to compare, or it compares nothing."""
    return n > 1 or baseline.scope == "batch" or baseline.name == "none"


def random_groups(rows: Tensor, n: int, rng: torch.Generator) -> Tensor:
    """`rows` in random order, cut to whole groups of `n`."""
    return rows[torch.randperm(len(rows), generator=rng)[: len(rows) // n * n]]


def _advantages(
    baseline: Baseline, pool: Completions, companions: dict[int, list[list[Completions]]], rng: torch.Generator
) -> GroupAdvantages:
    """The advantages of whole groups of the pool, each in a batch with companions if the baseline compares prompts."""

    def compared(x: Completions) -> Completions:
        """Only what processes send each other, too."""
        return only_compared(x, not baseline.adjusts) if baseline.per_token else x.totals()

    batches = {n: [[compared(x) for x in batch] for batch in of or [[]]] for n, of in companions.items()}
    turns = {n: cycle(of) for n, of in batches.items()}

    def of(rows: Tensor, n: int) -> Tensor:
        if baseline.scope == "group":
            return subtract(baseline, pool.rows(rows, n)).advantages
        advantages = []
        drawn: Iterator[list[Completions]] = (groups_of(batch, n) for batch in turns[n])
        if n == 1:  # many batches of many prompts: drawn once for all of `rows`
            drawn = cycle([groups_of(batch, n) for batch in batches[n]])
        for group, others in zip(rows.split(n), drawn, strict=False):
            gather_batch = lambda local, tokens, others=others: joined([only_compared(local, tokens), *others])  # noqa: E731
            advantages.append(subtract(baseline, pool.rows(group, n), gather_batch, slice(0, n)).advantages)
        return torch.cat(advantages)

    def groups_of(batch: list[Completions], n: int) -> list[Completions]:
        """A group of each companion, put together: one or none."""
        return [joined([x.rows(torch.randperm(len(x), generator=rng)[:n], n) for x in batch])] if batch else []

    return of
