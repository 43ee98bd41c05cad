"""The register of baselines: names, flags and where they are looked up."""

import inspect
import io
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch

from ..imports import import_object
from .groups import ALIGNMENTS, left_as_it_is


# What a baseline may ask for beside returns, energies and lengths
READS = ("logps", "states", "completion_ids", "turn", "prompt_key")
REMEMBERING = ("update", "state_dict", "load_state_dict")  # methods of a class


@dataclass(frozen=True)
class Baseline:
    """
    An entry of `BASELINES`.

    Args:
        name (`str`):
            What a config calls it.
        function (`Callable`):
            From [`~trl_otb.baselines.Groups`] to B, broadcastable to `(G, N, T)`. Or a class, of which each trainer
            makes an instance that is called so, and that remembers: see [`register_baseline`].
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
            Whether the function gets [`~trl_otb.baselines.Completions`], a few numbers per completion, instead of
            tokens. Then only those travel where the completions that it compares lie on several processes.
        unbiased (`bool` or `"leave_one_out"`):
            Whether B never depends on the completion it is subtracted from, so that the gradient is unbiased: always
            (`True`), where the option `leave_one_out` is set (`"leave_one_out"`), or never (`False`). B_t may depend
            on what stands before token t. It is said of the plain sum of gradients, over completions that are not left
            out for what they are (masked for their length, or without a reward).
        reads (`tuple[str, ...]`):
            What the function reads beside returns, energies and lengths: some of `"logps"`, `"states"`,
            `"completion_ids"`, `"turn"` and `"prompt_key"`; see [`~trl_otb.baselines.Groups`].
        on_top_of (`str` or [`Baseline`], *optional*):
            The name of a baseline that reads returns alone; of an instance, its entry. It is formed first, and the
            function gets [`~trl_otb.baselines.Tokens`], completions one by one with that baseline as `base`, in the
            place of groups: a completion is credited by itself then, in whichever forward it comes.
        compares (`bool`):
            Whether it compares completions at all; of this module's, all but `none` do.
        built_in (`bool`):
            Whether it is one of this module's, whose results are not checked.
    """

    name: str
    function: Any
    per_token: bool = True
    uses_energy: bool = True
    zero_tail: bool = False
    leaves_one_out: bool = False
    across_prompts: bool = False
    totals_only: bool = False
    unbiased: bool | Literal["leave_one_out"] = False
    reads: tuple[str, ...] = ()
    on_top_of: "str | Baseline | None" = None
    compares: bool = True
    built_in: bool = False

    @property
    def remembers(self) -> bool:
        """Whether it is a class, or an instance of one, with an `update`."""
        return hasattr(self.function, "update")

    @property
    def needs_forward(self) -> bool:
        """Whether the function reads what only a forward of the policy yields."""
        return self.uses_energy or not {"logps", "states"}.isdisjoint(self.reads)

    @property
    def compares_prompts(self) -> bool:
        """Whether it, or what it is on top of, looks at the prompts of a whole generation batch."""
        return self.across_prompts or (self.on_top_of is not None and find_baseline(self.on_top_of).across_prompts)

    @property
    def cancels_equal_returns(self) -> bool:
        """Whether A = 0 where all returns of a group are equal, but for a lone tail."""
        return self.on_top_of is None and not self.across_prompts and self.compares

    def instance(self) -> "Baseline":
        """The same, with an instance instead of a class: what a name stands for later does not change it."""
        function = self.function() if isinstance(self.function, type) else self.function
        below = None if self.on_top_of is None else find_baseline(self.on_top_of)
        return replace(self, function=function, on_top_of=below)

    def of(self, group: Any) -> Any:
        """B, of a group that the function must leave as it is."""
        with nullcontext() if self.built_in else left_as_it_is(group, self.name):
            return self.function(group)

    def learn(self, group: Any) -> dict[str, float]:
        """
        Let a baseline that remembers learn from what it was given; what it has to tell.

        Raises:
            ValueError: What it tells is no `dict` of numbers.
        """
        with nullcontext() if self.built_in else left_as_it_is(group, self.name):
            told = self.function.update(group)
        try:
            return {str(name): float(value) for name, value in (told or {}).items()}
        except (AttributeError, TypeError, ValueError, RuntimeError) as error:
            raise ValueError(
                f"The baseline {self.name!r} returned {told!r} from `update`: it must return a `dict` of numbers, "
                "which are logged, or nothing."
            ) from error

    def state(self) -> dict[str, Any]:
        """
        What a baseline that remembers has to keep, as a checkpoint would give it back.

        Raises:
            ValueError: It is no `dict`, or holds what a checkpoint cannot give back.
        """
        state, file = self.function.state_dict(), io.BytesIO()
        try:
            torch.save(state, file)
            kept = torch.load(io.BytesIO(file.getvalue()), weights_only=True, map_location="cpu")
        except Exception as error:  # of pickle, of all kinds
            kept = type(error).__name__
        if not isinstance(kept, dict):
            raise ValueError(
                f"The baseline {self.name!r} returned a {type(state).__name__} from `state_dict`, which a checkpoint "
                f"would give back as {kept!r}: it must return a `dict` of tensors, numbers and text. Arrays of NumPy "
                "become tensors by `torch.as_tensor`, their numbers by `.item()`."
            )
        return kept

    def declared(self, energy: Any) -> Any:
        """`energy`, if the function reads it; else `None`, so that reading it is an error."""
        return energy if self.uses_energy else None

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
    reads: Sequence[str] = (),
    on_top_of: str | None = None,
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
    returns B, broadcastable to `(G, N, T)` and finite wherever a completion is present. G counts the prompts,
    of a rollout or of a micro-batch: do not mix them, unless `across_prompts` asks for all of a generation batch.

    **A baseline that remembers** is a class. Each trainer makes an instance, without arguments, and calls it as it
    would the function. It has three methods more:

    - `update(group)`, called once per generation batch in training, after the baselines of that batch, with what they
      were formed from. What it learns holds from the next batch on, so that a baseline that is unbiased stays so. It
      may return a `dict` of numbers, which are logged as `otb/<name>/…`.
    - `state_dict()`, a `dict` of tensors, numbers and text, and `load_state_dict(state)`: checkpoints hold it.

    It is given the completions of the whole generation batch, of all processes, so that it learns the same on each;
    on top of another baseline (`on_top_of`), this process's own, and `tokens.gather` brings what others have summed.
    Evaluation calls it and does not update it.

    Args:
        name (`str`):
            Any name that no other baseline has. The same function may be registered again, as a notebook's cell does;
            trainers that were made before keep theirs.
        per_token, uses_energy, zero_tail, leaves_one_out, across_prompts, totals_only, unbiased, reads, on_top_of:
            See [`~trl_otb.baselines.Baseline`]. Of a class, `across_prompts` is set by itself.

    Returns:
        `Callable`: a decorator that returns the function or class as it is.

    Raises:
        ValueError: The name is taken, empty, or holds a colon; a flag is neither True nor False; or flags contradict
            each other.
        TypeError: What is decorated is no function and no class with the methods above.
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
        reads=(reads,) if isinstance(reads, str) else tuple(reads),
        on_top_of=on_top_of,
    )


def _register(name: str, **flags: Any) -> Callable[[Callable], Callable]:
    if not isinstance(name, str) or not name or ":" in name:
        raise ValueError(f"`name` is {name!r}: a baseline's name must be text that is not empty and holds no colon.")
    for flag in ("per_token", "uses_energy", "zero_tail", "leaves_one_out", "across_prompts", "totals_only"):
        if not isinstance(flags.get(flag, False), bool):
            raise ValueError(f"The baseline {name!r} has `{flag}={flags[flag]!r}`: it must be True or False.")
    if flags.get("totals_only") and flags.get("per_token", True):
        raise ValueError(
            f"The baseline {name!r} has `totals_only=True` and `per_token=True`: totals of completions give no "
            "baseline per token. Set `per_token=False`, or leave `totals_only` out."
        )
    if flags.get("unbiased", False) not in (True, False, "leave_one_out"):
        raise ValueError(
            f"The baseline {name!r} has `unbiased={flags['unbiased']!r}`: it must be True, False or 'leave_one_out'."
        )
    if unknown := [read for read in flags.get("reads", ()) if read not in READS]:
        raise ValueError(
            f"The baseline {name!r} has `reads` with {unknown[0]!r}: it must be some of {', '.join(map(repr, READS))}."
        )
    if flags.get("totals_only") and set(flags.get("reads", ())) - {"prompt_key"}:
        raise ValueError(
            f"The baseline {name!r} has `totals_only=True` and reads {', '.join(map(repr, flags['reads']))}: beside "
            "totals of completions there is 'prompt_key' only. Leave `totals_only` out."
        )
    if flags.get("on_top_of") is not None:
        _check_on_top_of(name, flags)

    def register(function: Callable) -> Callable:
        if not callable(function):
            raise TypeError(f"The baseline {name!r} is a {type(function).__name__}: it must be a function.")
        _check_not_shared(name, function)
        _check_arguments(name, function)
        entry = _entry(name, function, **flags)
        taken = BASELINES.get(name)
        if taken is not None and (taken.built_in or _origin(taken.function) != _origin(function)):
            raise ValueError(
                f"The baseline {name!r} is registered already, by {'.'.join(_origin(taken.function))}: choose another "
                "name."
            )
        BASELINES[name] = entry
        return function

    return register


def _entry(name: str, function: Callable, **flags: Any) -> Baseline:
    """A class that remembers is given a whole generation batch, unless it is on top of another baseline."""
    if isinstance(function, type):
        lacking = [method for method in ("__call__", *REMEMBERING) if not _has(function, method)]
        if lacking:
            raise TypeError(
                f"The baseline {name!r} is a class without `{'`, `'.join(lacking)}`. A class is for baselines that "
                "remember, see `trl_otb.register_baseline`; write a function if yours does not."
            )
        flags["across_prompts"] = flags.get("on_top_of") is None
    return Baseline(name, function, **flags)


def _check_not_shared(name: str, function: Any) -> None:
    if hasattr(function, "update") and not isinstance(function, type):
        raise TypeError(
            f"The baseline {name!r} is an instance of {type(function).__name__}, and all trainers would share what it "
            "remembers. Give the class, of which each trainer makes an instance."
        )


def _check_arguments(name: str, function: Any) -> None:
    given, what = ((), "no arguments") if isinstance(function, type) else ((None,), "one argument, the group")
    try:
        signature = inspect.signature(function)
    except ValueError:  # of some functions that are not written in Python
        return
    try:
        signature.bind(*given)
    except TypeError as error:
        raise TypeError(f"The baseline {name!r} takes {signature}: it is called with {what}.") from error


def _has(function: type, method: str) -> bool:
    return any(method in vars(parent) for parent in function.__mro__)


def _check_on_top_of(name: str, flags: dict[str, Any]) -> None:
    below = find_baseline(flags["on_top_of"])
    if not below.totals_only or below.uses_energy or below.remembers:
        raise ValueError(
            f"The baseline {name!r} has `on_top_of={below.name!r}`, which needs more than returns: choose one that "
            "reads returns alone, such as 'rloo_pooled'."
        )
    if contrary := [flag for flag in ("across_prompts", "totals_only", "zero_tail") if flags.get(flag)]:
        raise ValueError(
            f"The baseline {name!r} has `on_top_of` and `{contrary[0]}=True`: it is given completions one by one, "
            "token by token. Leave one of them out."
        )
    if not flags.get("per_token", True):
        raise ValueError(f"The baseline {name!r} has `on_top_of` and `per_token=False`: it is one per token.")


def built_in(name: str = "", **flags: Any) -> Callable[[Callable], Callable]:
    """Register one of this package's own baselines, by default under its function's name."""

    def register(function: Callable) -> Callable:
        return _register(name or function.__name__, built_in=True, **flags)(function)

    return register


def _origin(function: Callable) -> tuple[str, str]:
    return function.__module__, getattr(function, "__qualname__", type(function).__qualname__)


def find_baseline(baseline: "str | Callable | Baseline") -> Baseline:
    """
    The entry that `baseline` stands for.

    Args:
        baseline (`str`, `Callable` or [`Baseline`]):
            A name in `BASELINES`; `"module:function"`, which is imported, also from the current folder; a function, a
            class, or an instance of a registered one; or an entry itself. What is not registered counts as a baseline
            per token that reads energies.

    Raises:
        ValueError: There is no such baseline. The message names those that there are.
    """
    if isinstance(baseline, Baseline):
        return baseline
    if callable(baseline):
        for entry in BASELINES.values():
            if entry.function is baseline:
                return entry
            if entry.function is type(baseline):
                return replace(entry, function=baseline)
        return _entry(_origin(baseline)[1], baseline)
    if isinstance(baseline, str) and baseline in BASELINES:
        return BASELINES[baseline]
    if isinstance(baseline, str) and ":" in baseline:
        found = import_object(baseline, "baseline")
        _check_not_shared(baseline, found)
        return find_baseline(found)
    raise ValueError(
        f"`baseline` is {baseline!r}: it must be one of {', '.join(map(repr, BASELINES))}, a name registered with "
        "`trl_otb.register_baseline` before the config is made, or 'module:function'."
    )


def check_options(
    baseline: str | Callable | Baseline,
    alignment: str = "generated",
    zero_tail: bool = True,
    leave_one_out: bool = False,
) -> None:
    """
    Raise a `ValueError` if an option is unknown or of the wrong type, or is set though `baseline` does not look at it.
    """
    rule = find_baseline(baseline)
    for option, value in (("zero_tail", zero_tail), ("leave_one_out", leave_one_out)):
        if not isinstance(value, bool):
            raise ValueError(f"`{option}` is {value!r}, a {type(value).__name__}: it must be True or False.")
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
