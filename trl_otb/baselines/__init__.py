"""Baselines and advantages, in pure torch and with the notation of `trl_otb.energy`.

A baseline is a function from [`Completions`] to B. `BASELINES` holds all of them by name; [`register_baseline`] adds
one; [`credit`] subtracts one.
"""

from .means import group_mean, none, ogb, ogb_loo, otb, otb_loo, rloo  # first, for the order of `BASELINES`
from .pooled import ogb_pooled, partial_pooling, pooled, rloo_pooled
from .value import Value


from .advantages import Credit, compute_advantages, credit  # isort: skip
from .completions import Completions, completion_returns, joined, put_back, reward_to_go, squeeze  # isort: skip
from .registry import BASELINES, Baseline, find_baseline, register_baseline  # isort: skip


__all__ = [
    "BASELINES", "Baseline", "Completions", "Credit", "Value", "completion_returns", "compute_advantages",
    "credit", "find_baseline", "group_mean", "joined", "none", "ogb", "ogb_loo", "ogb_pooled", "otb", "otb_loo",
    "partial_pooling", "pooled", "put_back", "register_baseline", "reward_to_go", "rloo", "rloo_pooled",
    "squeeze",
]  # fmt: skip
