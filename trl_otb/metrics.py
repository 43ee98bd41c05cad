"""Metrics of energies, baselines and the gradient's power. Pure torch, with the notation of `trl_otb.energy`.

There are two steps, so that each micro-batch can measure its completions and groups and processes can be combined
later: [`completion_statistics`] returns a row of numbers per completion, and [`summarize`] turns the rows of all
groups into the logged values.
"""

import torch

from .blocks import by_blocks


STATISTICS = (
    "tokens",  # generated tokens
    "energy",  # W_T
    "advantage",  # Σ_t A_t
    "abs_advantage",  # Σ_t |A_t|
    "baseline",  # Σ_t B_t
    "baseline_std",  # standard deviation of B_t over the completion's positions
    "lone_tail",  # tokens on the lone tail
    "power",  # Σ_t w_t A_t²
    "power_group_mean",  # the same under the group-mean baseline
)


def completion_statistics(
    energy: torch.Tensor,
    mask: torch.Tensor,
    advantages: torch.Tensor,
    group_mean_advantages: torch.Tensor,
    baselines: torch.Tensor,
    lone_tail_tokens: torch.Tensor,
    scorable: torch.Tensor | None = None,
) -> torch.Tensor:
    """
    Args:
        energy (`torch.Tensor` of shape `(B, T)`):
            ρ_t² w_t, finite.
        mask (`torch.Tensor` of shape `(B, T)`):
            1 on generated tokens.
        advantages, group_mean_advantages, baselines (`torch.Tensor` of shape `(B, T)` or `(B, 1)`):
            A_t under the chosen baseline, A under the group mean, and B_t.
        lone_tail_tokens (`torch.Tensor` of shape `(B, 1)`):
            Generated tokens on the lone tail.
        scorable (`torch.Tensor` of shape `(B,)`, *optional*):
            Which completions have a reward, by default all; the others have no statistics.

    Returns:
        `torch.Tensor` of shape `(B, len(STATISTICS))`, float32.
    """

    def statistics_of(rows: slice) -> tuple[torch.Tensor]:
        m = (mask[rows] if scorable is None else mask[rows] * scorable[rows].unsqueeze(1)).float()
        w, a, a_mean, b = energy[rows] * m, advantages[rows], group_mean_advantages[rows], baselines[rows]
        tokens = m.sum(dim=1)
        baseline = (b * m).sum(dim=1)
        deviation = (b - (baseline / tokens.clamp(min=1)).unsqueeze(1)).square_()
        columns = {
            "tokens": tokens,
            "energy": w.sum(dim=1),
            "advantage": (a * m).sum(dim=1),
            "abs_advantage": (a.abs() * m).sum(dim=1),
            "baseline": baseline,
            "baseline_std": ((deviation * m).sum(dim=1) / tokens.clamp(min=1)).sqrt(),
            "lone_tail": lone_tail_tokens[rows].squeeze(1).float(),
            "power": (w * a.square()).sum(dim=1),
            "power_group_mean": (w * a_mean.square()).sum(dim=1),
        }
        return (torch.stack([columns[name] for name in STATISTICS], dim=1),)

    return by_blocks(statistics_of, mask)[0]


def completion_advantages(statistics: torch.Tensor) -> torch.Tensor:
    """`(B, len(STATISTICS))` -> `(B,)` the mean advantage of each completion's generated tokens."""
    columns = dict(zip(STATISTICS, statistics.unbind(dim=1), strict=True))
    return columns["advantage"] / columns["tokens"].clamp(min=1)


def summarize(statistics: torch.Tensor, num_generations: int) -> dict[str, float]:
    """
    Args:
        statistics (`torch.Tensor` of shape `(B, len(STATISTICS))`):
            Rows of [`completion_statistics`] for whole groups, the N rows of a group adjacent.
        num_generations (`int`):
            N.

    Returns:
        `dict[str, float]`: the metrics in recipes/reference.md, without their `otb/` prefix. Completions without
        generated tokens (all masked) are excluded; if none is left, every value is NaN.
    """
    columns = dict(zip(STATISTICS, statistics.unbind(dim=1), strict=True))
    tokens = columns["tokens"]
    present = tokens > 0
    completions = present.sum()

    # Standard deviation of W_T within a group, over completions with tokens; groups with fewer than 2 are skipped
    members = present.view(-1, num_generations)
    size = members.sum(dim=1)
    grouped_energy = columns["energy"].view(-1, num_generations)
    mean = grouped_energy.sum(dim=1) / size.clamp(min=1)
    squares = ((grouped_energy - mean.unsqueeze(1)).square() * members).sum(dim=1)
    several = size > 1
    group_std = ((squares / (size - 1).clamp(min=1)).sqrt() * several).sum() / several.sum()

    # The number of completions of equal energy that would determine the baseline equally well
    square_of_sum, sum_of_squares = grouped_energy.sum(dim=1).square(), grouped_energy.square().sum(dim=1)
    energetic = sum_of_squares > 0
    effective = (square_of_sum / sum_of_squares.where(energetic, 1.0) * energetic).sum() / energetic.sum()

    power, power_group_mean = columns["power"].sum(), columns["power_group_mean"].sum()
    # If no reward varies, the group mean leaves only rounding errors, and the ratio is meaningless
    ratio = torch.where(power_group_mean > 1e-6 * power, power / power_group_mean, torch.nan)
    metrics = {
        "energy/token_mean": columns["energy"].sum() / tokens.sum(),
        "energy/completion_mean": columns["energy"].sum() / completions,
        "energy/group_std": group_std,
        "energy/effective_completions": effective,
        "baseline/mean": columns["baseline"].sum() / tokens.sum(),
        "baseline/position_std": columns["baseline_std"].sum() / completions,
        "advantage/abs_mean": columns["abs_advantage"].sum() / tokens.sum(),
        "lone_tail_ratio": columns["lone_tail"].sum() / tokens.sum(),
        "grad_power": power / completions,
        "grad_power_group_mean": power_group_mean / completions,
        "grad_power_ratio": ratio,
    }
    values = torch.stack(list(metrics.values())).tolist()  # one transfer from the device
    return dict(zip(metrics, values, strict=True))
