"""Checks of a user's overrides, before and after ours in the method resolution order."""

import inspect
import types
from collections.abc import Iterator
from typing import Any

from trl import GRPOTrainer


# Our overrides of these are needed for a baseline to reach the loss
DECISIVE = (
    "_compute_loss",
    "_generate_and_score_completions",
    "_get_per_token_logps_and_entropies",
    "_prepare_inputs",
    "training_step",
)


def check_order(cls: type, ours: type) -> None:
    """
    Check that `cls`, a subclass of `ours`, calls the methods of `ours` and of all its bases.

    Raises:
        TypeError: It does not. The message names the class and the method that hides ours.
    """
    place = cls.__mro__.index(ours)
    for name in DECISIVE:
        for base in cls.__mro__[:place]:
            if name not in vars(base) or _hands_on(vars(base)[name], name):
                continue
            method, trainer = f"{base.__name__}.{name}", f"{cls.__name__}(OTBGRPOTrainer, {base.__name__})"
            remedy = f"Put OTBGRPOTrainer first: `class {trainer}`"
            if issubclass(base, ours):
                remedy = f"Call `super().{name}`, or put the method into a subclass of GRPOTrainer, say `Theirs`, and "
                remedy += f"write `class {cls.__name__}(OTBGRPOTrainer, Theirs)`"
            raise TypeError(
                f"`{method}` comes before OTBGRPOTrainer's `{name}` and does not call it, so no baseline would reach "
                f"the loss of `{cls.__name__}`. {remedy}."
            )
        behind = cls.__mro__[cls.__mro__.index(GRPOTrainer) + 1 :]
        for base in behind:
            if name in vars(base) and not issubclass(GRPOTrainer, base):
                raise TypeError(
                    f"`{base.__name__}.{name}` comes after GRPOTrainer's, which never calls it. Write "
                    f"`class {cls.__name__}({base.__name__}, OTBGRPOTrainer)`."
                )


def between(cls: type, ours: type, name: str) -> Iterator[type]:
    """The user's classes between `ours` and GRPOTrainer that define `name`."""
    mro = cls.__mro__
    for base in mro[mro.index(ours) + 1 : mro.index(GRPOTrainer)]:
        if name in vars(base) and base not in ours.__mro__:
            yield base


def check_loss(cls: type, ours: type, baseline: str) -> None:
    """
    Check that the loss of `cls` is known to support advantages per token.

    Raises:
        TypeError: A user's class has a loss without `takes_token_advantages`.
    """
    if getattr(cls, "takes_token_advantages", False):
        return
    for base in between(cls, ours, "_compute_loss"):
        if not _hands_on(vars(base)["_compute_loss"], "_compute_loss"):
            raise TypeError(
                f"`baseline` is {baseline!r}, one per token, and `{base.__name__}._compute_loss` is not known to take "
                "advantages of shape (B, T): a loss for (B,) fails, or silently mixes up completions. If it supports "
                "both, set `takes_token_advantages = True` in the class. Otherwise choose a baseline per completion, "
                "such as 'ogb' or 'rloo'."
            )


def overriders(trainer: Any, ours: type, *names: str) -> list[str]:
    """
    `Class.method` for the user's overrides of `names` that may be at fault, also for methods set on the trainer.
    Excludes losses that only add to the base class's loss.
    """
    cls = type(trainer)
    found = [f"{name}, set on the trainer" for name in names if name in vars(trainer)]
    before = [base for base in cls.__mro__[: cls.__mro__.index(ours)] if not base.__module__.startswith("trl_otb.")]
    for name in names:
        for base in (*before, *between(cls, ours, name)):
            if name in vars(base) and not ("loss" in name and _hands_on(vars(base)[name], name)):
                found.append(f"{base.__name__}.{name}")
    return found


def _hands_on(method: Any, name: str) -> bool:
    """Whether `method` appears to call the method of `super()` or of OTBGRPOTrainer."""
    code = getattr(inspect.unwrap(getattr(method, "__func__", method)), "__code__", None)
    if code is None:
        return True
    names = set(_names_in(code))
    return name in names and not names.isdisjoint({"super", "OTBGRPOTrainer"})


def _names_in(code: types.CodeType) -> Iterator[str]:
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _names_in(constant)
