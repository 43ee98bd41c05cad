"""Metrics, with the arithmetic beside the number."""

import math

import pytest
import torch

from trl_otb.metrics import STATISTICS, completion_statistics, summarize


def test_metrics_by_hand():
    rows = completion_statistics(
        energy=torch.tensor([[1.0, 0.5, 9.0], [2.0, 1.0, 1.0]]),
        mask=torch.tensor([[1, 1, 0], [1, 1, 1]]),
        advantages=torch.tensor([[0.5, -1.0, 7.0], [1.0, 2.0, 0.0]]),
        group_mean_advantages=torch.tensor([[0.5], [-0.5]]),
        baselines=torch.tensor([[1.0, 3.0, 7.0], [2.0, 2.0, 5.0]]),
        lone_tail_tokens=torch.tensor([[0], [1]]),
    )
    assert dict(zip(STATISTICS, rows[0].tolist(), strict=True)) == {
        "tokens": 2, "energy": 1.5, "advantage": -0.5, "abs_advantage": 1.5, "baseline": 4.0,
        "baseline_std": 1.0, "lone_tail": 0, "power": 0.25 + 0.5, "power_group_mean": 0.25 * 1.5,
    }  # fmt: skip
    metrics = summarize(rows, 2)
    assert metrics["energy/token_mean"] == pytest.approx(5.5 / 5)
    assert metrics["energy/completion_mean"] == pytest.approx(5.5 / 2)
    assert metrics["energy/group_std"] == pytest.approx(2.5 / math.sqrt(2))  # of 1.5 and 4
    assert metrics["energy/effective_completions"] == pytest.approx(5.5**2 / (1.5**2 + 4**2))
    assert metrics["baseline/mean"] == pytest.approx((4 + 9) / 5)
    assert metrics["baseline/position_std"] == pytest.approx((1 + math.sqrt(2)) / 2)  # of 1, 3 and of 2, 2, 5
    assert metrics["advantage/abs_mean"] == pytest.approx(4.5 / 5)
    assert metrics["lone_tail_ratio"] == pytest.approx(1 / 5)
    assert metrics["grad_power"] == pytest.approx((0.75 + 2 + 4) / 2)
    assert metrics["grad_power_group_mean"] == pytest.approx(0.25 * 5.5 / 2)
    assert metrics["grad_power_ratio"] == pytest.approx(6.75 / (0.25 * 5.5))


def test_metrics_of_nothing_are_nan():
    rows = torch.zeros(4, len(STATISTICS))
    assert all(math.isnan(v) for v in summarize(rows, 2).values())
