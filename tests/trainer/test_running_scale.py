"""`scale_rewards="running"`: advantages divided by the deviation of returns within the groups of earlier batches."""

import math
from statistics import stdev

import pytest
import torch

from trl_otb.run_baseline import RunningScale


def test_batch_is_scaled_by_earlier_ones():
    scale = RunningScale()
    first = torch.tensor([0.0, 2.0, 5.0, 5.0, 1.0, torch.nan])  # of groups of two only one varies
    assert scale.of(first, 2, learn=False) == scale.of(first, 2, learn=True) == pytest.approx(math.sqrt(2))
    second = torch.tensor([0.0, 20.0, 3.0, 9.0])
    assert scale.of(second, 2, learn=True) == pytest.approx(math.sqrt(2))
    of_both = (0.9 * 2 + 200 + 18) / (0.9 + 2)
    assert scale.of(first, 2, learn=False) == pytest.approx(math.sqrt(of_both))


def test_where_nothing_varies_nothing_is_scaled():
    assert RunningScale().of(torch.ones(4), 2, learn=True) == 1.0
    assert RunningScale().of(torch.ones(1), 1, learn=True) == 1.0


@pytest.mark.parametrize(("before", "scale"), [((0.3, 0.30000004), 1.0), ((1e-3, 0.0), 7e-4), ((0.01, 0.0), 7e-3)])
def test_sudden_variance_does_not_explode(before, scale):
    """After rounding, which is no variance, and after a small penalty or shaping."""
    running = RunningScale()
    for _ in range(20):
        assert running.of(torch.tensor(before * 2), 2, learn=True) == pytest.approx(scale, rel=0.02)
    assert running.of(torch.tensor([0.0, 1.0, 1.0, 0.0]), 2, learn=True) >= stdev([0, 1]) / 10 - 1e-6


def test_one_completion_uses_batch_deviation():
    assert RunningScale().of(torch.tensor([0.0, 1.0, 5.0]), 1, learn=True) == pytest.approx(stdev([0, 1, 5]))


@pytest.mark.parametrize("baseline", ["group_mean", "rloo", "otb", "value"])
def test_advantages_are_those_without_scale_divided(train, baseline):
    """In a second step of the same completions, whatever their rewards, by the deviation of the first one's."""
    given = [
        torch.tensor([0.0, 4.0, 1.0, 1.0, 2.0, 0.0, 3.0, 3.0]),
        torch.tensor([9.0, 1.0, 0.0, 5.0, 2.0, 2.0, 7.0, 8.0]),
    ]

    def rewards():
        batches = iter(given)
        return lambda completions, **kwargs: next(batches).tolist()

    options = {"baseline": baseline, "learning_rate": 0.0, "max_steps": 2, "num_generations": 2}
    plain, running = (
        train(reward_funcs=rewards(), scale_rewards=scale, per_device_train_batch_size=8, **options)
        for scale in ("none", "running")
    )
    spread = math.sqrt((8 + 2) / 2)  # of the two groups of the first batch that vary
    found, expected = running.rollouts["train"].advantages, plain.rollouts["train"].advantages
    torch.testing.assert_close(found, expected / spread)
    assert expected.abs().max() > 1
