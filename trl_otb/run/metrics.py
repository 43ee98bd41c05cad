"""Metrics of energies, baselines and the gradient's power. Pure torch, with the notation of `trl_otb.energy`."""

import torch
from jaxtyping import Float
from torch import Tensor

from ..baselines import Advantages, Completions


STATISTICS = (
    "tokens", "energy", "loss_energy", "advantage", "abs_advantage", "baseline", "power", "power_reference"
)  # fmt: skip
# Of the power: where the reference leaves less, no reward varies, and a ratio to it would be one of rounding errors
LEAST_REFERENCE = 1e-6


def completion_statistics(
    x: Completions, chosen: Advantages, reference: Advantages, scale: Float[Tensor, "B 1"]
) -> Float[Tensor, "B S"]:
    """
    float32, a column for each of `STATISTICS`: sums over tokens, of ρ_t² w_t A_t² for `power`; NaN without energies.
    `scale` divides the advantages under the chosen baseline and under the reference that it is compared with.
    """
    unknown = x.mask.new_full((1, 1), torch.nan).expand_as(x.mask)
    energy, loss_energy = (unknown if values is None else values for values in (x.energy, x.loss_energy))
    advantages, of_reference = chosen.advantages / scale, reference.advantages / scale
    columns = {
        "tokens": x.mask.sum(dim=1),
        "energy": energy.sum(dim=1),
        "loss_energy": loss_energy.sum(dim=1),
        "advantage": (advantages * x.mask).sum(dim=1),
        "abs_advantage": (advantages.abs() * x.mask).sum(dim=1),
        "baseline": (chosen.baselines * x.mask).sum(dim=1),
        "power": (loss_energy * advantages.square()).sum(dim=1),
        "power_reference": (loss_energy * of_reference.square()).sum(dim=1),
    }
    return torch.stack([columns[name] for name in STATISTICS], dim=1)


def summarize(statistics: Float[Tensor, "B S"], num_generations: int) -> dict[str, float]:
    """
    The metrics of [`completion_statistics`] of whole groups, the N rows of a group adjacent, without their `otb/`
    prefix. Completions without generated tokens (all masked) are excluded. A metric is NaN if it is undefined.
    """
    columns = dict(zip(STATISTICS, statistics.unbind(dim=1), strict=True))
    tokens = columns["tokens"]
    completions = (tokens > 0).sum()
    of_group = 1.0 if num_generations > 1 else torch.nan  # a single completion is no group

    # Tokens that only the longest completion of their group has
    longest = tokens.view(-1, num_generations).sort(dim=1, descending=True).values
    lone_tail = of_group * (longest[:, 0].sum() - longest[:, 1:2].sum())

    # The number of completions of equal energy that would determine the baseline equally well
    realized_energy = columns["loss_energy"].view(-1, num_generations)
    square_of_sum, sum_of_squares = realized_energy.sum(dim=1).square(), realized_energy.square().sum(dim=1)
    energetic = sum_of_squares > 0
    effective = of_group * (square_of_sum / sum_of_squares.where(energetic, 1.0) * energetic).sum() / energetic.sum()

    power, reference = columns["power"].sum(), columns["power_reference"].sum()
    ratio = torch.where(reference > LEAST_REFERENCE * power, power / reference, torch.nan)
    metrics = {
        "energy/token_mean": columns["energy"].sum() / tokens.sum(),
        "energy/completion_mean": columns["loss_energy"].sum() / completions,
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
