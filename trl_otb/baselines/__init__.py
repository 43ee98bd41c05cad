"""Baselines and advantages, in pure torch and with the notation of `trl_otb.energy`.

A baseline is a function from [`Groups`], or from the totals in [`Completions`], to B. `BASELINES` holds all of them by
name; [`register_baseline`] adds one.
"""

from . import group_means as group_means  # first, for the order of `BASELINES`
from .advantages import Credit, assign_credit, compute_advantages
from .group_means import group_mean, none, ogb, opo, otb, otb_shrunk, rloo
from .groups import ALIGNMENTS, Completions, Groups, reward_to_go
from .pooled import ogb_pooled, ogb_pooled_damped, partial_pooling, rloo_pooled
from .registry import BASELINES, Baseline, check_options, find_baseline, register_baseline
from .tokens import Tokens
from .value import Value


__all__ = [
    "ALIGNMENTS",
    "BASELINES",
    "Baseline",
    "Completions",
    "Credit",
    "Groups",
    "Tokens",
    "Value",
    "assign_credit",
    "check_options",
    "compute_advantages",
    "find_baseline",
    "group_mean",
    "none",
    "ogb",
    "ogb_pooled",
    "ogb_pooled_damped",
    "opo",
    "otb",
    "otb_shrunk",
    "partial_pooling",
    "register_baseline",
    "reward_to_go",
    "rloo",
    "rloo_pooled",
]
