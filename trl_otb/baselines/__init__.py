"""Baselines, and the advantages over them. Pure torch; the notation is that of `trl_otb.energy`.

A baseline is a function from [`Groups`] to B, registered once under its name in `BASELINES`; whatever lists, checks or
explains baselines reads them there. To add one, register it: [`register_baseline`].
"""

from .advantages import Credit, assign_credit, compute_advantages
from .family import group_mean, ogb, opo, otb, otb_shrunk, rloo
from .groups import ALIGNMENTS, Groups, reward_to_go
from .pooled import ogb_pooled, ogb_pooled_damped, partial_pooling, rloo_pooled
from .registry import BASELINES, Baseline, check_options, find_baseline, register_baseline


__all__ = [
    "ALIGNMENTS",
    "BASELINES",
    "Baseline",
    "Credit",
    "Groups",
    "assign_credit",
    "check_options",
    "compute_advantages",
    "find_baseline",
    "group_mean",
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
