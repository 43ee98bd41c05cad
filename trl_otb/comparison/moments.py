"""Moments of the gradient of a prompt's groups under every estimator, from a pool of its completions."""

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch.nn.utils.rnn import pad_sequence

from ..baselines import assign_credit
from ..baselines.groups import completion_returns
from .estimators import Estimator, Pool


PARTITIONS = 20  # number of random splits of a pool into groups
TRUTH = Estimator("truth", "ogb", leave_one_out=True)  # unbiased, with little noise


def prompt_moments(
    pool: Pool,
    gradient_of: Callable[[int, torch.Tensor], torch.Tensor],
    studied: dict[int, list[Estimator]],
    seed: int = 0,
    partitions: int = PARTITIONS,
    predicted: dict[str, tuple[float, torch.Tensor]] | None = None,
    among: dict[str, Callable[[torch.Tensor, int], torch.Tensor]] | None = None,
) -> dict[Any, Any]:
    """
    The moments of a prompt's gradient for the estimators studied at each group size.

    Groups never mix the two halves of the pool, so later products never share completions. Estimators with one number
    per completion are combinations of the completions' gradients, so many partitions into groups cost nothing;
    estimators per token need a backward pass per completion, for one partition. The error of this single partition is
    estimated with `ogb`, which is known for it and for all partitions, and subtracted: a control variate, which does
    not change expectations.

    Args:
        pool ([`Pool`]):
            M completions.
        gradient_of (`Callable`):
            A function from a row of the pool and weights `(E, T)` to `(E, k)`: Σ_t A_t ∇ log π(y_t).
        studied (`dict[int, list[Estimator]]`):
            Estimators by N.
        predicted (`dict`, *optional*):
            For baselines on top of another baseline B0, by name: a and p_t in B_t = a B0 + p_t.
        among (`dict`, *optional*):
            With rewards per turn or token, for baselines on top of another in the place of `predicted`: a function
            from rows, whole groups, and N to advantages `(b, T)`.

    Returns:
        `dict`: `truth`, `(2, k)`: the gradient by each half, taken as one group under `ogb` with one left out; and for
        each `(name, N)` its `square`, the mean of ‖ĝ‖², and `mean`, `(2, k)`, the mean of ĝ by half. For estimators
        that compare prompts, `pool`: the completions, and the gradient of each, `own`, `(M, k)`; for those on top
        of another, `predicted`: by name a, and Σ_t p_t ∇ log π(y_t), `(M, k)`.
    """
    among = among or {}
    every = {estimator for of_size in studied.values() for estimator in of_size}
    elsewhere = {estimator for estimator in every if estimator.across_prompts and estimator.name not in among}
    studied = {n: [e for e in of_size if e not in elsewhere] for n, of_size in studied.items()}
    rng = torch.Generator().manual_seed(seed)
    halves = torch.arange(len(pool)).chunk(2)
    parts = {n: [[random_groups(half, n, rng) for half in halves] for _ in range(partitions)] for n in studied}
    per_token = [(n, estimator) for n, of_size in studied.items() for estimator in of_size if estimator.per_token]
    weights = torch.ones(len(pool), 1 + len(per_token) + len(predicted or {}), pool.mask.size(1))
    for i, (n, estimator) in enumerate(per_token, start=1):
        for rows in parts[n][0]:
            of = among.get(estimator.name)
            weights[rows, i] = estimator.advantages(pool, rows, n) if of is None else of(rows, n)
    for i, (_, values) in enumerate((predicted or {}).values(), start=1 + len(per_token)):
        weights[:, i] = values
    weights *= pool.mask.unsqueeze(1)
    own, *weighted = torch.stack([gradient_of(row, weights[row]) for row in range(len(pool))], dim=1)  # each (M, k)
    of_tokens = dict(zip(((e.name, n) for n, e in per_token), weighted, strict=False))
    of_predictions = weighted[len(per_token) :]
    products = own.double() @ own.double().T

    def of_half(estimator: Estimator, n: int, partitions: list[torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
        """E‖ĝ‖² and Eĝ over the groups of `n` that each partition holds one after the other."""
        if estimator.per_token:
            gradients = of_tokens[estimator.name, n][partitions[0]].unflatten(0, (-1, n)).mean(dim=1)
            control = Estimator("control", "ogb", leave_one_out=estimator.leave_one_out)
            (square_of_one, mean_of_one), (square, mean) = (
                of_half(control, n, p) for p in (partitions[:1], partitions)
            )
            return (
                gradients.double().square().sum(dim=1).mean() + square - square_of_one,
                gradients.mean(dim=0) + mean - mean_of_one,
            )
        rows = torch.cat(partitions)
        # A group's gradient is Σ_i c_i s_i, so its square needs the products of the completions' gradients alone
        c = estimator.advantages(pool, rows, n)[:, 0].double().view(-1, n) / n
        at = rows.view(-1, n)
        squares = torch.einsum("gi,gij,gj->g", c, products[at.unsqueeze(2), at.unsqueeze(1)], c)
        total = torch.zeros(len(own), dtype=c.dtype).index_add_(0, at.flatten(), c.flatten())
        return squares.mean(), (total / len(at)).to(own) @ own

    moments: dict[Any, Any] = {"truth": torch.stack([of_half(TRUTH, len(half), [half])[1] for half in halves])}
    if elsewhere:
        # A view would be saved with all that it is a view of
        moments["pool"] = {name: values.clone() for name, values in (vars(pool) | {"own": own}).items()}
        moments["predicted"] = {
            name: (slope, gradients.clone())
            for (name, (slope, _)), gradients in zip((predicted or {}).items(), of_predictions, strict=True)
        }
    for n, of_size in studied.items():
        for estimator in of_size:
            found = [of_half(estimator, n, list(of)) for of in zip(*parts[n], strict=True)]
            squares, means = (torch.stack(of) for of in zip(*found, strict=True))
            moments[estimator.name, n] = {"square": squares.mean().item(), "mean": means}
    return moments


def random_groups(rows: torch.Tensor, n: int, rng: torch.Generator) -> torch.Tensor:
    """`rows` in random order, cut to whole groups of `n`."""
    return rows[torch.randperm(len(rows), generator=rng)[: len(rows) // n * n]]


def with_estimators_across_prompts(
    prompts: list[dict[Any, Any]],
    across: list[Estimator],
    group_sizes: list[int],
    prompts_per_batch: int,
    partitions: int = PARTITIONS,
) -> list[dict[Any, Any]]:
    """
    Add the moments of estimators that compare prompts, in the form of [`prompt_moments`].

    Args:
        prompts (`list[dict]`):
            Measurements per prompt, each with its `pool`.
        across (`list[Estimator]`):
            Estimators with one number per completion.
        group_sizes (`list[int]`):
            Values of N.
        prompts_per_batch (`int`):
            Approximate number of prompts to compare; they are split evenly.
    """
    pools = [prompt["pool"] for prompt in prompts]
    own = torch.stack([pool["own"] for pool in pools])
    rewards = torch.stack([completion_returns(pool["rewards"]) for pool in pools])
    energy, mask = (
        pad_sequence([pool[name].T for pool in pools], batch_first=True).transpose(1, 2) for name in ("energy", "mask")
    )
    predicted = {
        e.name: (
            torch.tensor([prompt["predicted"][e.name][0] for prompt in prompts]),
            torch.stack([prompt["predicted"][e.name][1] for prompt in prompts]),
        )
        for e in across
        if e.on_top_of is not None
    }
    rng = torch.Generator().manual_seed(0)
    halves = torch.arange(own.size(1)).chunk(2)

    def partition(n: int) -> torch.Tensor:
        """`(2, P, groups, n)`"""
        groups = min(map(len, halves)) // n
        rows = [[random_groups(half, n, rng)[: groups * n] for _ in pools] for half in halves]
        return torch.stack([torch.stack(of_half) for of_half in rows]).view(2, len(pools), groups, n)

    def gradients(batch: torch.Tensor, rows: torch.Tensor) -> dict[str, torch.Tensor]:
        n, at = rows.size(1), (batch.unsqueeze(1), rows)
        of_groups = rewards[at].flatten(0, 1), energy[at].flatten(0, 1), mask[at].flatten(0, 1)
        of_completions, found = own[at], {}
        for estimator in across:
            if estimator.on_top_of is None:
                advantages = assign_credit(*of_groups, n, baseline=estimator.baseline).advantages
                found[estimator.name] = torch.einsum("pn,pnk->pk", advantages.view(rows.shape), of_completions) / n
                continue
            # G − a B0 − p_t, where `below` has G − B0
            below = assign_credit(*of_groups, n, baseline=estimator.on_top_of)
            base = below.returns - below.advantages
            factors, gradients_of_predictions = predicted[estimator.name]
            advantages = below.returns.view(rows.shape) - factors[batch, None] * base.view(rows.shape)
            of_group = torch.einsum("pn,pnk->pk", advantages, of_completions) - gradients_of_predictions[at].sum(dim=1)
            found[estimator.name] = of_group / n
        return found

    found = [dict(prompt) for prompt in prompts]
    for n in group_sizes:
        of_size = moments_of_batches((partition(n) for _ in range(partitions)), gradients, prompts_per_batch, rng)
        for prompt, moments in zip(found, of_size, strict=True):
            prompt |= {(name, n): values for name, values in moments.items()}
    return found


def batches_of(prompts: int, prompts_per_batch: int) -> int:
    """The number of batches into which the prompts are split evenly."""
    return max(1, round(prompts / prompts_per_batch))


def moments_of_batches(
    partitions: Iterable[torch.Tensor],
    gradients: Callable[[torch.Tensor, torch.Tensor], dict[str, torch.Tensor]],
    prompts_per_batch: int,
    rng: torch.Generator,
) -> list[dict[str, dict[str, Any]]]:
    """
    For every prompt, by estimator: `square`, the mean of ‖ĝ‖², and `mean`, `(2, k)`, the mean of ĝ by half.

    A pool's halves stay apart, and the first half of one prompt meets only first halves of others.

    Args:
        partitions (`Iterable[torch.Tensor]`):
            Each `(2, P, groups, N)`: rows of every prompt's pool, split into groups, by half.
        gradients (`Callable`):
            A function from a batch of prompts `(p,)` and a group of each, `(p, N)`, to ĝ, `(p, k)`, by estimator.
        prompts_per_batch (`int`):
            Approximate number of prompts per batch.
        rng (`torch.Generator`):
            The generator that assigns groups to batches.
    """
    squares: dict[str, torch.Tensor] = {}
    means: dict[str, torch.Tensor] = {}
    groups_seen = prompts = 0
    for halves in partitions:
        groups_seen += halves.size(2)
        prompts = halves.size(1)
        batches = batches_of(prompts, prompts_per_batch)
        for half, of_half in enumerate(halves):
            for groups in of_half.transpose(0, 1):
                for batch in torch.randperm(prompts, generator=rng).tensor_split(batches):
                    for name, found in gradients(batch, groups[batch]).items():
                        if name not in means:
                            means[name] = torch.zeros(2, prompts, found.size(1))
                            squares[name] = torch.zeros(prompts, dtype=torch.float64)
                        means[name][half, batch] += found
                        squares[name][batch] += found.double().square().sum(dim=1)
    return [
        {
            name: {"square": squares[name][p].item() / (2 * groups_seen), "mean": mean[:, p] / groups_seen}
            for name, mean in means.items()
        }
        for p in range(prompts)
    ]
