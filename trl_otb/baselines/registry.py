"""The baselines by name, what they need, and lookup."""

import difflib
import importlib
import os
import sys
from collections.abc import Callable, Collection
from dataclasses import dataclass, replace
from typing import Any, Protocol, runtime_checkable

from torch import Tensor

from .completions import NEEDS, Completions
from .means import group_mean, none, ogb, ogb_loo, otb, otb_loo, rloo
from .pooled import ogb_pooled, rloo_pooled
from .value import Value


Gather = Callable[[Tensor], Tensor]  # concatenates the tensors of all processes, which have one shape; all call it


@runtime_checkable
class LearningBaseline(Protocol):
    """
    A baseline that learns. Each trainer makes an instance, without arguments. What it learns from a generation batch
    applies from the next one on, so an unbiased baseline stays unbiased. It may also have `adjust(local, b0)`, which
    returns B for the completions of this process, from what each has written so far and from B0, the result of the
    call. Then the call receives returns and lengths only; energies, log-probs, states and progress are in `local`.
    Two more methods are called if it has them, as [`Value`] does: `keeps_b0(local, gather, first_row)` names the
    completions that keep B0; `later_luck(local, b0)` is the part of B that pages of rollouts show by itself.
    """

    def __call__(self, batch: Completions) -> Tensor:
        """B (or B0), as a function returns it."""

    def update(self, local: Completions, b0: Tensor, gather: Gather) -> dict[str, float] | None:
        """
        Learn from a generation batch of training, after its advantages are computed: the completions of this process,
        and what the call returned for them, `(B, 1)` or `(B, T)`. Numbers that it returns are logged as `otb/<name>/…`.
        """

    def state_dict(self) -> dict[str, Any]:
        """What checkpoints hold: tensors, numbers and text."""

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore it."""


@dataclass(frozen=True)
class Baseline:
    """
    An entry of `BASELINES`: what [`register_baseline`] was given, and whether the baseline is `built_in`, so that its
    results are not checked. `estimator` is a function, a class, or an instance of one.
    """

    name: str
    estimator: Any
    needs: frozenset[str] = frozenset()
    per_token: bool = False
    scope: str = "group"
    unbiased: bool = False
    scalable: bool = False
    built_in: bool = False

    @property
    def adjusts(self) -> bool:
        """Whether it depends on each completion's own prefix, in `adjust`."""
        return hasattr(self.estimator, "adjust")

    @property
    def is_bounded(self) -> bool:
        """Whether it tells, in `keeps_b0`, where B0 is better than B."""
        return hasattr(self.estimator, "keeps_b0")

    @property
    def learns(self) -> bool:
        """Whether it has an `update`."""
        return hasattr(self.estimator, "update")

    @property
    def summary(self) -> str:
        """The first line of its docstring."""
        return (self.estimator.__doc__ or "").strip().partition("\n")[0]

    def instance(self) -> "Baseline":
        """The same entry with a class replaced by a new instance."""
        return replace(self, estimator=self.estimator()) if isinstance(self.estimator, type) else self


def _built_in(name: str, estimator: Any, needs: str = "", **flags: Any) -> Baseline:
    return Baseline(name, estimator, needs=frozenset(needs.split()), built_in=True, **flags)


BASELINES: dict[str, Baseline] = {
    entry.name: entry
    for entry in (
        _built_in("otb", otb, needs="energy", per_token=True),
        _built_in("otb_loo", otb_loo, needs="energy", per_token=True, unbiased=True),
        _built_in("ogb", ogb, needs="energy", scalable=True),
        _built_in("ogb_loo", ogb_loo, needs="energy", unbiased=True, scalable=True),
        _built_in("rloo", rloo, unbiased=True, scalable=True),
        _built_in("group_mean", group_mean, scalable=True),
        _built_in("none", none, unbiased=True),
        _built_in("ogb_pooled", ogb_pooled, needs="energy", scope="batch", unbiased=True),
        _built_in("rloo_pooled", rloo_pooled, scope="batch", unbiased=True),
        _built_in("value", Value, needs="energy logps states progress", per_token=True, scope="batch", unbiased=True),
    )
}


def register_baseline(
    name: str,
    *,
    needs: Collection[str] = ("energy",),
    per_token: bool = True,
    scope: str = "group",
    unbiased: bool = False,
    scalable: bool = False,
) -> Callable[[Callable], Callable]:
    """
    Register a baseline of your own, for `OTBGRPOConfig(baseline=name)` and [`compute_advantages`].

    ```python
    @trl_otb.register_baseline("newest")
    def newest(x):
        "The group's mean, weighted by each token's own energy."
        return x.mean(x.loss_energy)
    ```

    The function receives [`Completions`], which it must not modify, and returns B, broadcastable to `(B, T)`, or to
    `(B, 1)` if `per_token` is `False`, and finite wherever there is a token. A baseline that learns is a class with the
    methods of [`LearningBaseline`].

    Args:
        name (`str`): A name that no other baseline has. The same function may be registered again, as in a notebook's
            cell; existing trainers keep the old one.
        needs (`Collection[str]`, *optional*): What it reads in addition to returns, mask and lengths: some of `NEEDS`.
            `"energy"` includes `loss_energy`.
        per_token (`bool`, *optional*): Whether B has a number for every token's reward-to-go, or one per completion.
        scope (`str`, *optional*): What it must see together: a `"group"`, or the `"batch"` of all processes.
        unbiased (`bool`, *optional*): Whether B never depends on the completion it is subtracted from, except that B_t
            may depend on what precedes token t, and on later terms whose mean is 0 given what precedes them. Then the
            plain sum of gradients is unbiased, if no completion is excluded because of its content (masked for its
            length, or without a reward).
        scalable (`bool`, *optional*): Whether A is 0 if the group's returns are equal, so that `scale_rewards` may
            divide it by their deviation.

    Raises:
        ValueError: The name is taken, empty, or contains a colon; or `needs` or `scope` is unknown.
        TypeError: The decorated object is neither a function nor a class with these methods.
    """
    needs = frozenset((needs,) if isinstance(needs, str) else needs)
    if not isinstance(name, str) or not name or ":" in name:
        raise ValueError(f"`name` is {name!r}: a baseline's name must be nonempty text without a colon.")
    if not needs <= {*NEEDS} or scope not in ("group", "batch"):
        raise ValueError(
            f"The baseline {name!r} has `needs={sorted(needs)}` and `scope={scope!r}`: they must be some of "
            f"{', '.join(map(repr, NEEDS))}, and 'group' or 'batch'."
        )

    def entered(estimator: Callable) -> Callable:
        _check_estimator(name, estimator)
        taken = BASELINES.get(name)
        if taken is not None and (taken.built_in or _origin(taken.estimator) != _origin(estimator)):
            origin = ".".join(_origin(taken.estimator))
            raise ValueError(f"The baseline {name!r} is already registered by {origin}: choose another name.")
        BASELINES[name] = Baseline(name, estimator, needs, per_token, scope, unbiased, scalable)
        return estimator

    return entered


def find_baseline(baseline: "str | Callable | Baseline") -> Baseline:
    """
    The entry for a baseline: a name in `BASELINES`; `"module:function"`, which is imported, also from the current
    folder; a function, a class, or an instance of a registered one; or an entry. An unregistered function counts as a
    baseline per token that needs energies. Raises a `ValueError` that lists the available ones if there is none.
    """
    if isinstance(baseline, Baseline):
        return baseline
    if isinstance(baseline, str) and baseline in BASELINES:
        return BASELINES[baseline]
    if isinstance(baseline, str) and ":" in baseline:
        estimator = imported(baseline, f"`baseline` is {baseline!r}")
        _check_estimator(baseline, estimator)
        return find_baseline(estimator)
    if callable(baseline):
        for entry in BASELINES.values():
            if entry.estimator is baseline:
                return entry
            if entry.estimator is type(baseline):
                return replace(entry, estimator=baseline)
        return Baseline(_origin(baseline)[1], baseline, needs=frozenset({"energy"}), per_token=True)
    close = difflib.get_close_matches(str(baseline), BASELINES, n=1)
    raise ValueError(
        f"`baseline` is {baseline!r}: it must be one of {', '.join(map(repr, BASELINES))}, a name registered with "
        "`trl_otb.register_baseline` before the config is made, or 'module:function'."
        + "".join(f" Did you mean {name!r}?" for name in close)
    )


def imported(path: str, given: str) -> Any:
    """
    The function or class `"module:name"`. Modules are also searched for in the current folder. A `ValueError` that
    begins with `given`, the option and its value, if there is none.
    """
    module_name, _, name = path.partition(":")
    if os.getcwd() not in sys.path:
        sys.path.append(os.getcwd())  # at the end, so that it hides no other module
    try:
        return getattr(importlib.import_module(module_name), name)
    except (Exception, SystemExit) as error:  # a user's module can raise anything
        raise ValueError(
            f"{given}, which cannot be imported: {type(error).__name__}: {error}. Write "
            "'module:function', with the module's file in the current folder or on PYTHONPATH."
        ) from error


def _check_estimator(name: str, estimator: Any) -> None:
    """Raise a `TypeError` unless it is a function, or a class with the methods of a baseline that learns."""
    if isinstance(estimator, type) and not issubclass(estimator, LearningBaseline):
        problem = "class: it lacks methods of a baseline that learns, see `help(trl_otb.baselines.LearningBaseline)`"
    elif not callable(estimator):
        problem = f"{type(estimator).__name__}: it must be a function"
    elif hasattr(estimator, "update") and not isinstance(estimator, type):
        problem = f"{type(estimator).__name__}: all trainers would share what this instance learns. Give the class"
    else:
        return
    raise TypeError(f"The baseline {name!r} is a {problem}.")


def _origin(estimator: Callable) -> tuple[str, str]:
    return estimator.__module__, getattr(estimator, "__qualname__", type(estimator).__qualname__)
