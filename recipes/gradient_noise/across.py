"""Baselines that compare prompts: the moments of their gradients take the pools of several prompts at once."""

from collections.abc import Callable, Iterable

import torch
from torch.nn.utils.rnn import pad_sequence

from trl_otb.baselines import assign_credit

from .pools import deal


def with_pooled(
    prompts: list[dict], baselines: list[str], group_sizes: list[int], prompts_per_batch: int, deals: int = 20
) -> list[dict]:
    """
    The prompts with the moments of further baselines, of the form that `prompt_moments` returns.

    Args:
        prompts (`list[dict]`):
            What was measured prompt by prompt; each holds what `.pools.pool_of` kept, under `pool`.
        baselines (`list[str]`):
            Those that compare prompts, with one number per completion.
        group_sizes (`list[int]`):
            N.
        prompts_per_batch (`int`):
            About how many prompts meet: they are split evenly.
        deals (`int`):
            How often the pools are dealt into groups, and the groups into batches.
    """
    pools = [prompt["pool"] for prompt in prompts]
    own = torch.stack([pool["own"] for pool in pools])
    completions = [
        pad_sequence([pool[name].transpose(0, -1) for pool in pools], batch_first=True).transpose(1, -1)
        for name in ("rewards", "energy", "mask")
    ]
    rng = torch.Generator().manual_seed(0)
    halves = torch.arange(own.size(1)).chunk(2)

    def dealt(n: int) -> torch.Tensor:
        """`(2, P, groups, n)`"""
        groups = min(map(len, halves)) // n
        rows = [[deal(half, n, rng)[: groups * n] for _ in pools] for half in halves]
        return torch.stack([torch.stack(of_half) for of_half in rows]).view(2, len(pools), groups, n)

    def gradients(batch: torch.Tensor, rows: torch.Tensor) -> dict[str, torch.Tensor]:
        n, at = rows.size(1), (batch.unsqueeze(1), rows)
        inputs = [values[at].flatten(0, 1) for values in completions]
        found = {}
        for name in baselines:
            advantages = assign_credit(*inputs, n, baseline=name).advantages.view(rows.shape)
            found[name] = torch.einsum("pn,pnk->pk", advantages, own[at]) / n
        return found

    found = [dict(prompt) for prompt in prompts]
    for n in group_sizes:
        of_size = moments_of_batches((dealt(n) for _ in range(deals)), gradients, prompts_per_batch, rng)
        for prompt, moments in zip(found, of_size, strict=True):
            prompt |= {(name, n): values for name, values in moments.items()}
    return found


def batches_of(prompts: int, prompts_per_batch: int) -> int:
    """Into how many batches so many prompts are split, evenly."""
    return max(1, round(prompts / prompts_per_batch))


def moments_of_batches(
    deals: Iterable[torch.Tensor],
    gradients: Callable[[torch.Tensor, torch.Tensor], dict[str, torch.Tensor]],
    prompts_per_batch: int,
    rng: torch.Generator,
) -> list[dict[str, dict]]:
    """
    For every prompt, by estimator: `square`, the mean of ‖ĝ‖², and `mean`, `(2, k)`, the mean of ĝ by half.

    A pool's halves stay apart, and the first half of one prompt meets only first halves of others.

    Args:
        deals (`Iterable[torch.Tensor]`):
            Each `(2, P, groups, N)`: rows of every prompt's pool, dealt into groups, by half.
        gradients (`Callable`):
            From a batch of prompts `(p,)` and a group of each, `(p, N)`, to ĝ, `(p, k)`, by estimator.
        prompts_per_batch (`int`):
            About how many prompts meet.
        rng (`torch.Generator`):
            By which groups meet.
    """
    squares, means, shares = {}, {}, 0
    for halves in deals:
        shares += halves.size(2)
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
            name: {"square": squares[name][p].item() / (2 * shares), "mean": mean[:, p] / shares}
            for name, mean in means.items()
        }
        for p in range(prompts)
    ]
