"""A `value` that has learned something, whatever it is: random coefficients of as many columns as there are."""

import torch

from trl_otb.baselines import Completions, Value
from trl_otb.baselines.least_squares import TARGET, Sums
from trl_otb.baselines.prefix import read
from trl_otb.baselines.value_columns import PHI, PSI


def give_coefficients(value: Value, like: Completions, numbers=torch.randn, **options) -> Value:
    """`value`, with coefficients of the columns that completions like these have."""
    names = (*read(like).names, TARGET)
    value.value_sums = Sums(names, torch.zeros(len(names), len(names), dtype=torch.float64))
    value.eta, value.theta, value.gamma = (numbers(len(of), **options) for of in (names[:-1], PHI, PSI))
    return value
