"""The register of baselines: names, flags and where they are looked up."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import torch

from ..imports import import_object
from .groups import ALIGNMENTS


@dataclass(frozen=True)
class Baseline:
    """
    An entry of `BASELINES`.

    Args:
        name (`str`):
            What a config calls it.
        function (`Callable`):
            From [`~trl_otb.baselines.Groups`] to B, broadcastable to `(G, N, T)`.
        per_token (`bool`):
            Whether B is subtracted from the reward-to-go of every token, or is one number per completion, subtracted
            from its return. Only the former has a use for `alignment`.
        uses_energy (`bool`):
            Whether the function reads energies. Without, the trainer never runs a forward to obtain them.
        zero_tail (`bool`):
            Whether the option `zero_tail` applies: B = 0 on the lone tail.
        leaves_one_out (`bool`):
            Whether it leaves a completion's own return out by itself, so that the option has nothing to say.
        across_prompts (`bool`):
            Whether it compares prompts: then it is given those of a whole generation batch, of all processes.
        totals_only (`bool`):
            Whether the function gets [`~trl_otb.baselines.Completions`], a few numbers per completion, in the place of
            tokens. Then only those travel where the completions that it compares lie on several processes.
        unbiased (`bool` or `"leave_one_out"`):
            Whether B never depends on the completion it is subtracted from, so that the gradient is unbiased: always
            (`True`), where the option `leave_one_out` is set (`"leave_one_out"`), or never (`False`).
        built_in (`bool`):
            Whether it is one of this module's, whose results are not checked.
    """

    name: str
    function: Callable[[Any], torch.Tensor]
    per_token: bool = True
    uses_energy: bool = True
    zero_tail: bool = False
    leaves_one_out: bool = False
    across_prompts: bool = False
    totals_only: bool = False
    unbiased: bool | Literal["leave_one_out"] = False
    built_in: bool = False

    def is_unbiased(self, leave_one_out: bool = False, zero_tail: bool = True) -> bool:
        """Whether the gradient is unbiased under these options."""
        if leave_one_out and self.zero_tail and not zero_tail:
            return False  # tokens that nobody is compared with are skipped
        return self.unbiased is True or (leave_one_out and self.unbiased == "leave_one_out")

    @property
    def summary(self) -> str:
        """The first line of the function's docstring."""
        return (self.function.__doc__ or "").strip().partition("\n")[0]


BASELINES: dict[str, Baseline] = {}


def register_baseline(
    name: str,
    *,
    per_token: bool = True,
    uses_energy: bool = True,
    zero_tail: bool = False,
    leaves_one_out: bool = False,
    across_prompts: bool = False,
    totals_only: bool = False,
    unbiased: bool | Literal["leave_one_out"] = False,
) -> Callable[[Callable], Callable]:
    """
    Register a baseline of your own, for `OTBGRPOConfig(baseline=name)` and [`compute_advantages`].

    ```python
    @trl_otb.register_baseline("newest")
    def newest(group):
        "The group's mean, weighted by each token's own energy."
        return group.mean(group.energy)
    ```

    The function gets [`~trl_otb.baselines.Groups`]: `returns`, `energy` and `present`, each `(G, N, T)` or
    broadcastable to it, `total_energy` and `lengths`, and `mean(weights)`, which knows about leaving one out. It
    returns B, broadcastable to `(G, N, T)` and finite wherever a completion is present. G counts the prompts at hand,
    of a rollout or of a micro-batch: do not mix them, unless `across_prompts` asks for all of a generation batch.

    Args:
        name (`str`):
            Any name that no other baseline has. The same function may be registered again, as a notebook's cell does.
        per_token, uses_energy, zero_tail, leaves_one_out, across_prompts, totals_only, unbiased (*optional*):
            See [`~trl_otb.baselines.Baseline`].

    Returns:
        `Callable`: a decorator that returns the function as it is.

    Raises:
        ValueError: The name is taken, empty, or holds a colon; or flags contradict each other.
        TypeError: What is decorated is no function.
    """
    return _register(
        name,
        per_token=per_token,
        uses_energy=uses_energy,
        zero_tail=zero_tail,
        leaves_one_out=leaves_one_out,
        across_prompts=across_prompts,
        totals_only=totals_only,
        unbiased=unbiased,
    )


def _register(name: str, **flags: Any) -> Callable[[Callable], Callable]:
    if not isinstance(name, str) or not name or ":" in name:
        raise ValueError(f"`name` is {name!r}: a baseline's name must be text that is not empty and holds no colon.")
    if flags.get("totals_only") and flags.get("per_token", True):
        raise ValueError(
            f"The baseline {name!r} has `totals_only=True` and `per_token=True`: totals of completions give no "
            "baseline per token. Set `per_token=False`, or leave `totals_only` out."
        )
    if flags.get("unbiased", False) not in (True, False, "leave_one_out"):
        raise ValueError(
            f"The baseline {name!r} has `unbiased={flags['unbiased']!r}`: it must be True, False or 'leave_one_out'."
        )

    def register(function: Callable) -> Callable:
        if not callable(function):
            raise TypeError(f"The baseline {name!r} is a {type(function).__name__}: it must be a function.")
        taken = BASELINES.get(name)
        if taken is not None and (taken.built_in or _origin(taken.function) != _origin(function)):
            raise ValueError(
                f"The baseline {name!r} is registered already, by {'.'.join(_origin(taken.function))}: choose another "
                "name."
            )
        BASELINES[name] = Baseline(name, function, **flags)
        return function

    return register


def built_in(**flags: Any) -> Callable[[Callable], Callable]:
    """Register one of this package's own baselines under its function's name."""

    def register(function: Callable) -> Callable:
        return _register(function.__name__, built_in=True, **flags)(function)

    return register


def _origin(function: Callable) -> tuple[str, str]:
    return function.__module__, getattr(function, "__qualname__", type(function).__qualname__)


def find_baseline(baseline: str | Callable) -> Baseline:
    """
    The entry that `baseline` stands for.

    Args:
        baseline (`str` or `Callable`):
            A name in `BASELINES`; `"module:function"`, which is imported, also from the current folder; or a function.
            A function that is not registered counts as a baseline per token that reads energies.

    Raises:
        ValueError: There is no such baseline. The message names those that there are.
    """
    if callable(baseline):
        registered = (entry for entry in BASELINES.values() if entry.function is baseline)
        return next(registered, None) or Baseline(_origin(baseline)[1], baseline)
    if isinstance(baseline, str) and baseline in BASELINES:
        return BASELINES[baseline]
    if isinstance(baseline, str) and ":" in baseline:
        return find_baseline(import_object(baseline, "baseline"))
    raise ValueError(
        f"`baseline` is {baseline!r}: it must be one of {', '.join(map(repr, BASELINES))}, a name registered with "
        "`trl_otb.register_baseline` before the config is made, or 'module:function'."
    )


def check_options(
    baseline: str | Callable, alignment: str = "generated", zero_tail: bool = True, leave_one_out: bool = False
) -> None:
    """Raise a `ValueError` if an option is unknown, or is set though `baseline` does not look at it."""
    rule = find_baseline(baseline)
    if alignment not in ALIGNMENTS:
        raise ValueError(f"`alignment` is {alignment!r}: it must be one of {', '.join(map(repr, ALIGNMENTS))}.")
    if alignment != "generated" and not rule.per_token:
        raise ValueError(
            f"`alignment` is {alignment!r} and `baseline` is {rule.name!r}: one number per completion compares no "
            f"tokens. Leave `alignment` out, or choose a baseline per token: {_names('per_token')}."
        )
    if not zero_tail and not rule.zero_tail:
        raise ValueError(
            f"`zero_tail` is False and `baseline` is {rule.name!r}, which has no special rule for the lone tail. "
            f"Leave `zero_tail` out, or choose {_names('zero_tail')}."
        )
    if leave_one_out and rule.leaves_one_out:
        raise ValueError(
            f"`leave_one_out` is True and `baseline` is {rule.name!r}, which leaves one out by itself. Leave it out."
        )


def _names(flag: str) -> str:
    return ", ".join(repr(name) for name, entry in BASELINES.items() if getattr(entry, flag))
