"""Crediting and measuring take little memory beside what is kept."""

import pytest
import torch

from recipes.benchmarks import allocated
from tests.helpers.oracles import ESTIMATORS
from trl_otb.baselines import find_baseline, squeeze, subtract
from trl_otb.run.metrics import completion_statistics


ROWS, LENGTH = 256, 2048


def peak_and_kept(function):
    """Bytes per token that `function` allocates at its peak, and that are left while its result is kept."""
    live = allocated(function) / (ROWS * LENGTH)
    return live.max(), live[-1]


def completions(**more):
    mask = (torch.arange(LENGTH) < torch.randint(LENGTH // 2, LENGTH, (ROWS, 1))).long()
    return squeeze(torch.rand(ROWS), mask, 4, energy=torch.rand(ROWS, LENGTH), **more)


@pytest.mark.parametrize("baseline", ESTIMATORS)
def test_crediting_and_measuring_take_little(baseline):
    entry, x, scale = find_baseline(ESTIMATORS[baseline]).instance(), completions(), torch.ones(ROWS, 1)

    def score():
        found = subtract(entry, x)
        completion_statistics(x, found, subtract(find_baseline("group_mean"), x), scale)
        return found

    peak, kept = peak_and_kept(score)
    assert kept <= (12.1 if entry.per_token else 0.1)  # advantages and baselines, before `adjust` too
    assert 0 < peak - kept < 17


def test_predicting_and_learning_take_little():
    x = completions(logps=-torch.rand(ROWS, LENGTH), states=torch.randn(ROWS, LENGTH, 32))
    entry = find_baseline("value").instance()
    few = x.rows(slice(0, 8))
    entry.estimator.update(few, entry.estimator(few), lambda values: values)
    entry.estimator.weight = 1.0

    def score():
        found = subtract(entry, x)
        entry.estimator.update(x, found.b0, lambda values: values)
        return found

    peak, kept = peak_and_kept(score)
    assert kept <= 8.5  # advantages, baselines, and sums of what is learnt
    assert 0 < peak - kept < 36
