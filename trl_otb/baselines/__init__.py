"""Baselines and advantages, in pure torch and with the notation of `trl_otb.energy`.

A baseline is a function from [`Completions`] to B. `BASELINES` holds all of them by name; [`register_baseline`] adds
one; [`subtract`] gives advantages.
"""

from .advantages import Advantages, compute_advantages, subtract
from .completions import Completions, completion_returns, put_back, reward_to_go, squeeze
from .means import group_mean, none, ogb, ogb_loo, otb, otb_loo, rloo
from .pooled import ogb_pooled, partial_pooling, pooled, rloo_pooled
from .registry import BASELINES, Baseline, LearningBaseline, find_baseline, register_baseline
from .transport import batch_of_groups, gathered, joined, only_compared
from .value import Value


__all__ = [
    "BASELINES",
    "Advantages",
    "Baseline",
    "Completions",
    "LearningBaseline",
    "Value",
    "batch_of_groups",
    "completion_returns",
    "compute_advantages",
    "find_baseline",
    "gathered",
    "group_mean",
    "joined",
    "none",
    "ogb",
    "ogb_loo",
    "ogb_pooled",
    "only_compared",
    "otb",
    "otb_loo",
    "partial_pooling",
    "pooled",
    "put_back",
    "register_baseline",
    "reward_to_go",
    "rloo",
    "rloo_pooled",
    "squeeze",
    "subtract",
]  # fmt: skip
