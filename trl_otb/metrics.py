"""Metrics of energies, baselines and the gradient's power. Pure torch, with the notation of `trl_otb.energy`."""

import torch

from .baselines import Completions, Credit


STATISTICS = ("tokens", "energy", "advantage", "abs_advantage", "baseline", "power", "power_reference")


def completion_statistics(x: Completions, chosen: Credit, reference: Credit, scale: torch.Tensor) -> torch.Tensor:
    """
    Args:
        x ([`Completions`]): Completions; without energies, what depends on them is NaN.
        chosen, reference ([`Credit`]): Their credit under the chosen baseline, and under the one that it is compared
            with.
        scale (`(B, 1)`): The divisor of both advantages.

    Returns:
        `(B, len(STATISTICS))`, float32: sums over tokens, of w_t A_t² for `power`.
    """
    energy = x.mask.new_full((1, 1), torch.nan).expand_as(x.mask) if x.weights is None else x.weights
    advantages, others = chosen.advantages / scale, reference.advantages / scale
    columns = {
        "tokens": x.mask.sum(dim=1),
        "energy": energy.sum(dim=1),
        "advantage": (advantages * x.mask).sum(dim=1),
        "abs_advantage": (advantages.abs() * x.mask).sum(dim=1),
        "baseline": (chosen.baselines * x.mask).sum(dim=1),
        "power": (energy * advantages.square()).sum(dim=1),
        "power_reference": (energy * others.square()).sum(dim=1),
    }
    return torch.stack([columns[name] for name in STATISTICS], dim=1)


def summarize(statistics: torch.Tensor, num_generations: int) -> dict[str, float]:
    """
    Args:
        statistics (`(B, len(STATISTICS))`): Rows of [`completion_statistics`] for whole groups, the N rows of a group
            adjacent.
        num_generations (`int`): N.

    Returns:
        `dict[str, float]`: the logged metrics, without their `otb/` prefix. Completions without
        generated tokens (all masked) are excluded. A metric is NaN if it is undefined, as without energies.
    """
    columns = dict(zip(STATISTICS, statistics.unbind(dim=1), strict=True))
    tokens = columns["tokens"]
    completions = (tokens > 0).sum()

    # Tokens that only the longest completion of their group has
    longest = tokens.view(-1, num_generations).sort(dim=1, descending=True).values
    second = longest[:, 1] if num_generations > 1 else torch.zeros_like(longest[:, 0])
    lone_tail = (longest[:, 0] - second).sum()

    # The number of completions of equal energy that would determine the baseline equally well
    energy = columns["energy"].view(-1, num_generations)
    square_of_sum, sum_of_squares = energy.sum(dim=1).square(), energy.square().sum(dim=1)
    energetic = sum_of_squares > 0
    effective = (square_of_sum / sum_of_squares.where(energetic, 1.0) * energetic).sum() / energetic.sum()

    power, reference = columns["power"].sum(), columns["power_reference"].sum()
    # If no reward varies, the reference leaves only rounding errors, and the ratio is meaningless
    ratio = torch.where(reference > 1e-6 * power, power / reference, torch.nan)
    metrics = {
        "energy/token_mean": columns["energy"].sum() / tokens.sum(),
        "energy/completion_mean": columns["energy"].sum() / completions,
        "energy/effective_completions": effective,
        "baseline/mean": columns["baseline"].sum() / tokens.sum(),
        "advantage/abs_mean": columns["abs_advantage"].sum() / tokens.sum(),
        "lone_tail_ratio": lone_tail / tokens.sum(),
        "grad_power": power / completions,
        "grad_power_reference": reference / completions,
        "grad_power_ratio": ratio,
    }
    values = torch.stack(list(metrics.values())).tolist()  # one transfer from the device
    return dict(zip(metrics, values, strict=True))
