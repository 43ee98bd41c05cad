"""A user's own subclass of a trainer: what it has, what it may not have, and what it breaks."""

import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch
from transformers import Trainer

from ..baselines import Baseline
from .contract import GRPOTrainer, from_library, incompatible_trl


ON_TRAINER = "trainer"  # in the place of a class


def users_classes(cls: type, of_trl: type = GRPOTrainer) -> list[type]:
    """The classes of `cls` that belong neither to TRL's trainer and its bases nor to this package."""
    core = {*of_trl.__mro__}
    return [base for base in cls.__mro__ if base not in core and not base.__module__.startswith("trl_otb.")]


def users_methods(trainer: Trainer, names: Iterable[str], of_trl: type = GRPOTrainer) -> list[tuple[str, str]]:
    """Owner and name of each of these methods that is set on the trainer, or that a user's class has."""
    classes = users_classes(type(trainer), of_trl)
    on_trainer = {name: of for name, of in vars(trainer).items() if not _is_ours(of)}
    owners = [(ON_TRAINER, on_trainer), *((cls.__name__, vars(cls)) for cls in classes)]
    return [(owner, name) for owner, methods in owners for name in names if name in methods]


def _is_ours(value: Any) -> bool:
    return str(getattr(value, "__module__", "")).startswith("trl_otb.")


def users_loss(trainer: Trainer, tried: str, of_trl: type = GRPOTrainer) -> str | None:
    """
    The name of a loss of the user's own, or `None`. It is in a class, on the trainer, or in the place of a method of
    this package or of TRL. TRL's own `tried` may be replaced, as a trial then checks it.
    """
    names, mro = ("_compute_loss", "compute_loss"), type(trainer).__mro__
    known = [(cls, name) for cls in mro[: mro.index(of_trl) + 1] for name in names if name in vars(cls)]
    replaced = [(cls.__name__, name) for cls, name in known if not from_library(vars(cls)[name])]
    found = dict.fromkeys([*users_methods(trainer, names, of_trl), *replaced])
    return next((f"{owner}.{name}" for owner, name in found if (owner, name) != (of_trl.__name__, tried)), None)


def check_subclass(trainer: GRPOTrainer, entry: Baseline) -> None:
    """Raise a `TypeError` if a user has a method that the baseline would undo, or that would misread it."""
    for owner, name in users_methods(trainer, ("_transform_advantages",)):  # of TRL's pull request 7298
        raise TypeError(
            f"`{owner}.{name}` would change advantages that `baseline={entry.name!r}` then replaces. Change rewards in "
            "`_calculate_rewards`, or `inputs['advantages']` in `_compute_loss`."
        )
    if not entry.per_token or getattr(trainer, "takes_token_advantages", False):
        return
    if loss := users_loss(trainer, tried="_compute_loss"):
        raise TypeError(
            f"`baseline` is {entry.name!r}, one per token, and `{loss}` is not known to take advantages of shape "
            "(B, T): a loss for (B,) fails, or silently mixes up completions. If it supports both, as one that only "
            "adds to `super()`'s does, set `takes_token_advantages = True` in the class. Otherwise choose a baseline "
            "per completion, such as 'ogb_pooled' or 'rloo'."
        )


@contextmanager
def checked_weights(trainer: Any) -> Iterator[None]:
    """
    Context in which a user's override of `_generate_and_score_completions` may not multiply advantages per token by one
    weight per completion, `(B,)`, as if it were one per token: a `TypeError` names it.
    """
    method, rollouts = "_generate_and_score_completions", trainer._trl_otb.rollouts
    generate, before = getattr(trainer, method), rollouts.get("train")
    what = (
        "an override may multiply advantages of shape (B, T) by weights of shape (B,): it needs `weights.unsqueeze(1)`"
    )

    def checked(*args: Any, **kwargs: Any) -> Any:
        try:
            batch = generate(*args, **kwargs)
        except RuntimeError as error:
            formed = rollouts.get("train")
            if formed is before or not {*map(str, formed.mask.shape)} <= {*re.findall(r"\d+", str(error))}:
                raise
            raise contract_broken(trainer, f"{what} ({error})", method) from error
        if rollouts.get("train") is before:  # bypassed, as `training_step` says
            return batch
        ours, theirs = rollouts["train"].advantages, batch["advantages"]
        if theirs.shape != ours.shape or ours.size(0) != ours.size(1):
            trainer._trl_otb.weights_fit = True  # else they would have failed here
        else:
            weights = (theirs / ours).where(ours != 0, torch.nan)
            off = [(weights - weights.nanmean(dim, keepdim=True)).abs().nan_to_num().max() for dim in (0, 1)]
            if off[0] < 1e-4 < off[1]:  # the same for all completions, and not for all tokens
                raise contract_broken(trainer, what, method)
        return batch

    with patch.object(trainer, method, checked):
        yield


def check_config(cls: type) -> None:
    """Raise a `ValueError`, as `args` is missing, if a user's class may have a config of its own."""
    for base in users_classes(cls):
        if issubclass(base, GRPOTrainer) and "__init__" in vars(base):
            raise ValueError(
                f"`args` is missing, and {base.__name__} may have its own config, whose defaults would be lost. Pass "
                "one: `class Config(OTBGRPOConfig, TheirConfig)`, decorated with `@dataclass`."
            )


def contract_broken(trainer: GRPOTrainer, what: str, *methods: str) -> Exception:
    """
    What to raise where TRL, or a user's override of one of `methods`, breaks an assumption: a `TypeError` if the
    trainer's class overrides one of them, else an `ImportError`.
    """
    found = users_methods(trainer, methods)
    if not found:
        return incompatible_trl(what)
    theirs = [f"{name}, set on the trainer" if owner == ON_TRAINER else f"{owner}.{name}" for owner, name in found]
    return TypeError(
        f"{what[:1].upper()}{what[1:]}. In `{type(trainer).__name__}`, look at {', '.join(theirs)}; "
        "help(trl_otb.OTBGRPOTrainer) says what such a class must do."
    )
