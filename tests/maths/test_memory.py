"""Crediting and measuring take little memory beside what is kept."""

import pytest
import torch

from recipes.benchmarks.advantages import peak_and_kept
from trl_otb import blocks
from trl_otb.baselines import BASELINES
from trl_otb.credit import credit, credit_base, measure, set_energies, tokens_of
from trl_otb.rollout import Rollout


@pytest.mark.parametrize("most_on_cpu", [blocks.MOST_ON_CPU, 2**40], ids=["on a CPU", "blocks as on a GPU"])
@pytest.mark.parametrize("baseline", [name for name, entry in BASELINES.items() if entry.on_top_of is None])
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


@pytest.mark.parametrize("most_on_cpu", [blocks.MOST_ON_CPU, 2**40], ids=["on a CPU", "blocks as on a GPU"])
def test_predicting_and_learning_take_little_too(most_on_cpu, monkeypatch):
    monkeypatch.setattr(blocks, "MOST_ON_CPU", most_on_cpu)
    rows, length, numbers = 256, 2048, 32
    mask = torch.ones(rows, length, dtype=torch.long)
    rollout = Rollout(mask, mask, mask, mask, mask, 4, torch.rand(rows), torch.ones(rows))
    logps, states = -torch.rand(rows, length), torch.randn(rows, length, numbers)
    set_energies(rollout, torch.rand(rows, length), logps, states=states)
    rule = BASELINES["value"].instance()
    options = {"baseline": rule, "alignment": "generated", "zero_tail": True, "leave_one_out": False}
    credit_base(rollout, **options)
    rule.function.update(tokens_of(rollout, rule))
    rule.function.weight = 1.0

    def score():
        credit(rollout, **options)
        measure(rollout)
        rule.function.update(tokens_of(rollout, rule))
        return rollout

    peak, kept = peak_and_kept(score)
    learnt = sum(values.nbytes for values in rule.function.state_dict()["_sums"].values())
    assert (kept - learnt) / mask.numel() == pytest.approx(8, abs=0.1)  # advantages and baselines
    assert 0.5 < (peak - kept) / mask.numel() < 16
