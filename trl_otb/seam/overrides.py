"""Checks of a user's own subclass."""

import inspect
import types
from collections.abc import Iterator
from typing import Any

from trl import GRPOTrainer


def users_classes(cls: type) -> list[type]:
    """The classes of `cls` that override something of GRPOTrainer and belong neither to TRL's core nor to this package."""
    core = {*GRPOTrainer.__mro__}
    return [base for base in cls.__mro__ if base not in core and not base.__module__.startswith("trl_otb.")]


def check_loss(cls: type, baseline: str) -> None:
    """
    Check that the loss of `cls` is known to support advantages per token.

    Raises:
        TypeError: A user's class has a loss without `takes_token_advantages`.
    """
    if getattr(cls, "takes_token_advantages", False):
        return
    for base in users_classes(cls):
        if "_compute_loss" in vars(base) and not _hands_on(base, "_compute_loss"):
            raise TypeError(
                f"`baseline` is {baseline!r}, one per token, and `{base.__name__}._compute_loss` is not known to take "
                "advantages of shape (B, T): a loss for (B,) fails, or silently mixes up completions. If it supports "
                "both, set `takes_token_advantages = True` in the class. Otherwise choose a baseline per completion, "
                "such as 'ogb_pooled' or 'rloo'."
            )


def check_config(cls: type) -> None:
    """
    Raises:
        ValueError: `args` is missing, and a class of `cls` may have a config of its own.
    """
    for base in users_classes(cls):
        if issubclass(base, GRPOTrainer) and "__init__" in vars(base):
            raise ValueError(
                f"`args` is missing, and {base.__name__} may have its own config, whose defaults would be lost. Pass "
                "one: `class Config(OTBGRPOConfig, TheirConfig)`, decorated with `@dataclass`."
            )


def overriders(trainer: Any, *names: str) -> list[str]:
    """`Class.method` for the user's overrides of `names`, also for methods set on the trainer."""
    found = [f"{name}, set on the trainer" for name in names if name in vars(trainer)]
    return found + [f"{b.__name__}.{name}" for name in names for b in users_classes(type(trainer)) if name in vars(b)]


def _hands_on(base: type, name: str) -> bool:
    """Whether `base`'s own method appears to call the method of `super()` or of OTBGRPOTrainer."""
    if _code(vars(base)[name]) is None:
        return True
    names = set(_names_in(vars(base)[name], base, set()))
    return name in names and not names.isdisjoint({"super", "OTBGRPOTrainer"})


def _names_in(function: Any, base: type, seen: set[types.CodeType]) -> Iterator[str]:
    """What `function` mentions, as a name or as text: itself, what it was made around, and methods of `base`."""
    code = _code(function)
    if code is None or code in seen:
        return
    seen.add(code)
    mentioned = {*code.co_names, *(constant for constant in code.co_consts if isinstance(constant, str))}
    yield from mentioned
    within = [constant for constant in code.co_consts if isinstance(constant, types.CodeType)]
    around = [cell.cell_contents for cell in getattr(function, "__closure__", None) or () if cell != types.CellType()]
    for other in (*within, *around, *(vars(base)[name] for name in mentioned & {*vars(base)})):
        yield from _names_in(other, base, seen)


def _code(method: Any) -> types.CodeType | None:
    if isinstance(method, types.CodeType):
        return method
    return getattr(inspect.unwrap(getattr(method, "__func__", method)), "__code__", None)
