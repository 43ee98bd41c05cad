"""
Estimators beside the built-in baselines: factors on advantages, written as baselines.

A factor k on an advantage is the baseline G − k (G − B). W_i is a completion's total energy, ω_i = W_i / Σ_j W_j its
share of the group's, B_(−i) a mean over the other completions. A factor that depends on the completion itself biases
the gradient: what completions of large energy teach counts for less.
"""

from collections.abc import Callable

import torch

from trl_otb import register_baseline
from trl_otb.baselines import Groups


_FOUND: list[tuple[Callable, dict[str, bool]]] = []


def _candidate(per_token: bool = False, uses_energy: bool = True):
    def keep(function):
        # Each decides by itself what a completion's own term counts
        _FOUND.append((function, {"per_token": per_token, "uses_energy": uses_energy, "leaves_one_out": True}))
        return function

    return keep


def register() -> list[str]:
    """Register all of them as baselines, under their names, which are returned."""
    for function, flags in _FOUND:
        register_baseline(function.__name__, **flags)(function)
    return names()


def names() -> list[str]:
    return [function.__name__ for function, _ in _FOUND]


def _total(group: Groups) -> torch.Tensor:
    return group.energy.sum(dim=-1, keepdim=True)


def _kept(group: Groups) -> torch.Tensor:
    """1 − ω_i."""
    total = _total(group)
    return 1 - total / total.sum(dim=1, keepdim=True).clamp(min=1e-20)


def _others_by_energy(group: Groups) -> torch.Tensor:
    return group.mean(_total(group), leave_one_out=True)


def _others(group: Groups) -> torch.Tensor:
    return group.mean(torch.ones_like(group.returns), leave_one_out=True)


def _times(factor: torch.Tensor, group: Groups, baseline: torch.Tensor) -> torch.Tensor:
    return group.returns - factor * (group.returns - baseline)


@_candidate()
def damped_mean(group):
    """A = (1 − ω_i) (G_i − the mean of the others): the damping of `ogb` with no better prediction."""
    return _times(_kept(group), group, _others(group))


@_candidate()
def damped_return(group):
    """A = (1 − ω_i) G_i: the damping alone."""
    return group.returns * (1 - _kept(group))


@_candidate()
def damped_twice(group):
    """A = (1 − ω_i)² (G_i − B_(−i)), B by energy: `ogb` damped once more."""
    return _times(_kept(group).square(), group, _others_by_energy(group))


@_candidate()
def inverse_energy(group):
    """A = (G_i − B_(−i)) / (1 + W_i), B by energy: the weight of a measurement whose variance is 1 + W."""
    return _times(1 / (1 + _total(group)), group, _others_by_energy(group))


@_candidate()
def inverse_energy_mean(group):
    """A = (G_i − the mean of the others) / (1 + W_i)."""
    return _times(1 / (1 + _total(group)), group, _others(group))


@_candidate()
def inverse_relative(group):
    """A = (G_i − B_(−i)) / (1 + W_i / W̄), B by energy, W̄ the group's mean: no unit of energy is assumed."""
    relative = _total(group) / _total(group).mean(dim=1, keepdim=True).clamp(min=1e-20)
    return _times(1 / (1 + relative), group, _others_by_energy(group))


@_candidate(per_token=True)
def token_damped(group):
    """A_t = (1 − w_t / 2)² (G − B_(−i)), B by energy: improbable tokens count less, w_t being at most 2."""
    return _times((1 - group.energy / 2).square(), group, _others_by_energy(group))


@_candidate()
def clipped(group):
    """A = (G_i − B_(−i)) min(1, τ / (√W_i |G_i − B_(−i)|)), τ the median of the group's √W |A|, B by energy."""
    advantage = group.returns - _others_by_energy(group)
    size = _total(group).sqrt() * advantage.abs()
    limit = size.median(dim=1, keepdim=True).values
    return group.returns - advantage * (limit / size.clamp(min=1e-20)).clamp(max=1)


@_candidate(uses_energy=False)
def inverse_root_length(group):
    """A = (G_i − the mean of the others) / √T_i: a milder form of GRPO's 1 / length."""
    length = group.present.sum(dim=-1, keepdim=True).clamp(min=1)
    return _times(length.rsqrt(), group, _others(group))
