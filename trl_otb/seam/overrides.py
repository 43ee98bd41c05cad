"""Checks of a user's overrides, before and after ours in the method resolution order."""

import inspect
import traceback
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
            if name not in vars(base) or _hands_on(base, name):
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
        if not _hands_on(base, "_compute_loss"):
            raise TypeError(
                f"`baseline` is {baseline!r}, one per token, and `{base.__name__}._compute_loss` is not known to take "
                "advantages of shape (B, T): a loss for (B,) fails, or silently mixes up completions. If it supports "
                "both, set `takes_token_advantages = True` in the class. Otherwise choose a baseline per completion, "
                "such as 'ogb' or 'rloo'."
            )


def overriders(trainer: Any, ours: type, *names: str, adding: bool = False) -> list[str]:
    """
    `Class.method` for the user's overrides of `names` that may be at fault, also for methods set on the trainer.
    Without `adding`, excludes losses that only add to the base class's loss.
    """
    cls = type(trainer)
    found = [f"{name}, set on the trainer" for name in names if name in vars(trainer)]
    before = [base for base in cls.__mro__[: cls.__mro__.index(ours)] if not base.__module__.startswith("trl_otb.")]
    for name in names:
        for base in (*before, *between(cls, ours, name)):
            if name in vars(base) and (adding or not ("loss" in name and _hands_on(base, name))):
                found.append(f"{base.__name__}.{name}")
    return found


def method_at_fault(trainer: Any, error: Exception) -> str | None:
    """`Class.method` for the user's method that raised `error`, directly or in a function; `None` if it is TRL's."""
    methods: dict[types.CodeType | None, str | None] = {}
    for base in reversed(type(trainer).__mro__):
        packaged = base.__module__.partition(".")[0] in ("trl", "trl_otb", "transformers")
        methods.update((_code(m), None if packaged else f"{base.__name__}.{name}") for name, m in vars(base).items())
    methods.update((_code(m), f"{name}, set on the trainer") for name, m in vars(trainer).items() if callable(m))
    frames = [frame.f_code for frame, _ in traceback.walk_tb(error.__traceback__)]
    return next((methods[code] for code in reversed(frames) if code in methods), None)


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
