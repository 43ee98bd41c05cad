"""Crediting and measuring take little memory beside what is kept."""

import pytest
import torch

from recipes.benchmarks import peak_and_kept
from trl_otb import blocks
from trl_otb.baselines import BASELINES
from trl_otb.credit import credit, measure, set_energies
from trl_otb.rollout import Rollout


@pytest.mark.parametrize("most_on_cpu", [blocks.MOST_ON_CPU, 2**40], ids=["on a CPU", "blocks as on a GPU"])
@pytest.mark.parametrize("baseline", BASELINES)
def test_at_most_16_bytes_per_token_beyond_what_is_kept(baseline, most_on_cpu, monkeypatch):
    monkeypatch.setattr(blocks, "MOST_ON_CPU", most_on_cpu)
    rows, length = 256, 2048
    mask = (torch.arange(length) < torch.randint(length // 2, length, (rows, 1))).long()
    rollout = Rollout(mask, mask, mask, mask, mask, 4, torch.rand(rows), torch.ones(rows))
    set_energies(rollout, torch.rand(rows, length))

    def score():
        credit(rollout, baseline=baseline, alignment="generated", zero_tail=True, leave_one_out=False)
        measure(rollout)
        return rollout

    peak, kept = peak_and_kept(score)
    per_token = 4 if BASELINES[baseline].per_token else 0
    assert kept / mask.numel() == pytest.approx(2 * per_token, abs=0.1)  # advantages and baselines
    assert 0.5 < (peak - kept) / mask.numel() < 16
