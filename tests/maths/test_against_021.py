"""
Advantages of random batches are those that 0.2.1 computed, by three numbers of each batch: Σ A cos(r), Σ A sin(r) and
Σ |A|, r = row · T + t. Where a prompt has a single completion to train on, pooled baselines are another now.
"""

import json
from pathlib import Path

import pytest
import torch

from trl_otb.baselines import compute_advantages


NUMBERS = json.loads((Path(__file__).parent / "advantages_of_021.json").read_text())  # by baseline and seed


def batch(seed):
    g = torch.Generator().manual_seed(seed)
    n, groups, t = [(2, 5, 7), (4, 6, 12), (8, 3, 9), (4, 1, 5), (1, 4, 6), (4, 16, 40)][seed % 6]
    rows = n * groups
    lengths = torch.randint(1, t + 1, (rows,), generator=g)
    mask = (torch.arange(t) < lengths[:, None]).long()
    if seed % 2:  # tool output
        mask = mask * (torch.rand(rows, t, generator=g) > 0.3)
    mask[:, 0] = 1
    if seed % 5 == 0:
        mask[torch.rand(rows, generator=g) < 0.1] = 0
    energy = torch.rand(rows, t, generator=g) * 2
    if seed % 11 == 0:
        energy.zero_()
    rewards = torch.randn(rows, generator=g)
    if seed % 4 == 3:
        rewards = torch.randn(rows, t, generator=g) * (torch.arange(t) < lengths[:, None])
    if seed % 3 == 0:
        rewards[torch.rand(rows, generator=g) < 0.1] = float("nan")
    if seed % 7 == 0:
        rewards = (rewards > 0).float().masked_fill(rewards.isnan(), float("nan"))
    return rewards, energy, mask, n


def numbers(advantages):
    at = torch.arange(advantages.numel()).double().view_as(advantages)
    advantages = advantages.double()
    return [(advantages * at.cos()).sum().item(), (advantages * at.sin()).sum().item(), advantages.abs().sum().item()]


@pytest.mark.parametrize("baseline", NUMBERS)
def test_advantages_are_those_of_021(baseline):
    assert len(NUMBERS[baseline]) > 100
    for seed, expected in NUMBERS[baseline].items():
        rewards, energy, mask, n = batch(int(seed))
        unscored = rewards.isnan() if rewards.dim() == 1 else rewards.isnan().any(1)
        if baseline.endswith("_pooled") and ((mask.any(1) & ~unscored).view(-1, n).sum(1) == 1).any():
            continue
        found = numbers(compute_advantages(rewards, energy, mask, n, baseline=baseline))
        assert found == pytest.approx(expected, rel=0, abs=1e-4 * expected[2] + 1e-5), seed
