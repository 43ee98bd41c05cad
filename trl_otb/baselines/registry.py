"""The registry of baselines: their names, flags and lookup."""

import difflib
import inspect
import io
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch

from ..imports import import_object
from .groups import ALIGNMENTS, left_as_it_is


# What a baseline may read in addition to returns, energies and lengths
READS = ("logps", "states", "completion_ids", "turn", "prompt_key")
REMEMBERING = ("update", "state_dict", "load_state_dict")  # methods of a baseline with memory


@dataclass(frozen=True)
class Baseline:
    """
    An entry of `BASELINES`.

    Args:
        name (`str`):
            Its name in a config.
        function (`Callable`):
            A function from [`~trl_otb.baselines.Groups`] to B, broadcastable to `(G, N, T)`. Or, for a baseline with
            memory, a class; each trainer makes an instance and calls it in the same way: see [`register_baseline`].
        per_token (`bool`):
            Whether B is subtracted from the reward-to-go of every token, or is one number per completion that is
            subtracted from its return. `alignment` applies to the former only.
        uses_energy (`bool`):
            Whether the function reads energies. If not, the trainer never runs a forward to obtain them.
        zero_tail (`bool`):
            Whether the option `zero_tail` applies: B = 0 on the lone tail.
        leaves_one_out (`bool`):
            Whether it always leaves out a completion's own return, so that the option `leave_one_out` does not apply.
        across_prompts (`bool`):
            Whether it compares prompts. If so, it receives the whole generation batch of all processes.
        totals_only (`bool`):
            Whether the function receives [`~trl_otb.baselines.Completions`], a few numbers per completion, instead of
            tokens. If a group spans processes, only these numbers are sent.
        unbiased (`bool` or `"leave_one_out"`):
            Whether B never depends on the completion it is subtracted from, so that the gradient is unbiased: always
            (`True`), with the option `leave_one_out` (`"leave_one_out"`), or never (`False`). B_t may depend on what
            precedes token t. This holds for the plain sum of gradients, if no completion is excluded because of its
            content (masked for its length, or without a reward).
        reads (`tuple[str, ...]`):
            What the function reads in addition to returns, energies and lengths: some of `"logps"`, `"states"`,
            `"completion_ids"`, `"turn"` and `"prompt_key"`; see [`~trl_otb.baselines.Groups`].
        on_top_of (`str` or [`Baseline`], *optional*):
            The name of a baseline that reads returns only; in an instance, its entry. It is computed first, and the
            function receives [`~trl_otb.baselines.Tokens`], single completions with that baseline as `base`, instead
            of groups. So each completion is credited by itself, in any micro-batch.
        compares (`bool`):
            Whether it compares completions; all built-in baselines except `none` do.
        built_in (`bool`):
            Whether it belongs to this package, so that its results are not checked.
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
        """Whether the function reads anything that only a forward of the policy provides."""
        return self.uses_energy or not {"logps", "states"}.isdisjoint(self.reads)

    @property
    def compares_prompts(self) -> bool:
        """Whether it, or the baseline below it, compares the prompts of a generation batch."""
        return self.across_prompts or (self.on_top_of is not None and find_baseline(self.on_top_of).across_prompts)

    @property
    def cancels_equal_returns(self) -> bool:
        """Whether A = 0 if all returns of a group are equal, except on a lone tail."""
        return self.on_top_of is None and not self.across_prompts and self.compares

    def instance(self) -> "Baseline":
        """The same entry with a class replaced by an instance, and names by entries."""
        function = self.function() if isinstance(self.function, type) else self.function
        below = None if self.on_top_of is None else find_baseline(self.on_top_of)
        return replace(self, function=function, on_top_of=below)

    def of(self, group: Any) -> Any:
        """B for a group, which the function must not modify."""
        with nullcontext() if self.built_in else left_as_it_is(group, self.name):
            return self.function(group)

    def learn(self, group: Any) -> dict[str, float]:
        """
        Update a baseline with memory from the data it was called with, and return its metrics.

        Raises:
            ValueError: `update` returned something other than a `dict` of numbers.
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
        """`energy` if the function reads it, else `None`, so that reading it is an error."""
        return energy if self.uses_energy else None

    def is_unbiased(self, leave_one_out: bool = False, zero_tail: bool = True) -> bool:
        """Whether the gradient is unbiased under these options."""
        if leave_one_out and self.zero_tail and not zero_tail:
            return False  # tokens without another completion are skipped
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

    The function receives [`~trl_otb.baselines.Groups`]: `returns`, `energy` and `present`, each `(G, N, T)` or
    broadcastable to it, `total_energy` and `lengths`, and `mean(weights)`, which respects `leave_one_out`. It returns
    B, broadcastable to `(G, N, T)` and finite wherever a completion is present. The G prompts are those of a rollout
    or a micro-batch: do not mix them, unless `across_prompts` requests the whole generation batch.

    **A baseline with memory** is a class. Each trainer makes an instance, without arguments, and calls it like the
    function. It has three more methods:

    - `update(group)`, called once per generation batch in training, after that batch's baselines and with the same
      data. What it learns applies from the next batch on, so an unbiased baseline stays unbiased. It may return a
      `dict` of numbers, which are logged as `otb/<name>/…`.
    - `state_dict()`, a `dict` of tensors, numbers and text, and `load_state_dict(state)`, for checkpoints.

    It receives the completions of the whole generation batch from all processes, so it learns the same on each. With
    `on_top_of` it receives those of its own process, and `tokens.gather` collects sums from the others. Evaluation
    calls it without updating it.

    Args:
        name (`str`):
            A name that no other baseline has. The same function may be registered again, as in a notebook's cell;
            existing trainers keep the old one.
        per_token, uses_energy, zero_tail, leaves_one_out, across_prompts, totals_only, unbiased, reads, on_top_of:
            See [`~trl_otb.baselines.Baseline`]. `across_prompts` is set automatically for a class.

    Returns:
        `Callable`: a decorator that returns the function or class unchanged.

    Raises:
        ValueError: The name is taken, empty, or contains a colon; a flag is not a bool; or flags contradict each
            other.
        TypeError: The decorated object is neither a function nor a class with the methods above.
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
        raise ValueError(f"`name` is {name!r}: a baseline's name must be nonempty text without a colon.")
    for flag in ("per_token", "uses_energy", "zero_tail", "leaves_one_out", "across_prompts", "totals_only"):
        if not isinstance(flags.get(flag, False), bool):
            raise ValueError(f"The baseline {name!r} has `{flag}={flags[flag]!r}`: it must be True or False.")
    if flags.get("totals_only") and flags.get("per_token", True):
        raise ValueError(
            f"The baseline {name!r} has `totals_only=True` and `per_token=True`: totals of completions give no "
            "baseline per token. Set `per_token=False`, or drop `totals_only`."
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
            f"The baseline {name!r} has `totals_only=True` and reads {', '.join(map(repr, flags['reads']))}: with "
            "totals of completions only 'prompt_key' is available. Drop `totals_only`."
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
                f"The baseline {name!r} is already registered by {'.'.join(_origin(taken.function))}: choose another "
                "name."
            )
        BASELINES[name] = entry
        return function

    return register


def _entry(name: str, function: Callable, **flags: Any) -> Baseline:
    """A baseline; a class receives the whole generation batch, unless it is on top of another baseline."""
    if isinstance(function, type):
        lacking = [method for method in ("__call__", *REMEMBERING) if not _has(function, method)]
        if lacking:
            raise TypeError(
                f"The baseline {name!r} is a class without `{'`, `'.join(lacking)}`. Classes are for baselines with "
                "memory, see `trl_otb.register_baseline`; otherwise write a function."
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
            "reads returns only, such as 'rloo_pooled'."
        )
    if contrary := [flag for flag in ("across_prompts", "totals_only", "zero_tail") if flags.get(flag)]:
        raise ValueError(
            f"The baseline {name!r} has `on_top_of` and `{contrary[0]}=True`, but it receives single "
            "completions, token by token. Drop one of the two."
        )
    if not flags.get("per_token", True):
        raise ValueError(f"The baseline {name!r} has `on_top_of` and `per_token=False`: it is always per token.")


def built_in(name: str = "", **flags: Any) -> Callable[[Callable], Callable]:
    """Register one of this package's own baselines, by default under its function's name."""

    def register(function: Callable) -> Callable:
        return _register(name or function.__name__, built_in=True, **flags)(function)

    return register


def _origin(function: Callable) -> tuple[str, str]:
    return function.__module__, getattr(function, "__qualname__", type(function).__qualname__)


def find_baseline(baseline: "str | Callable | Baseline") -> Baseline:
    """
    The entry for a baseline.

    Args:
        baseline (`str`, `Callable` or [`Baseline`]):
            A name in `BASELINES`; `"module:function"`, which is imported, also from the current folder; a function, a
            class, or an instance of a registered one; or an entry. An unregistered function counts as a baseline per
            token that reads energies.

    Raises:
        ValueError: There is no such baseline. The message lists the available ones.
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
    close = difflib.get_close_matches(str(baseline), BASELINES, n=1)
    raise ValueError(
        f"`baseline` is {baseline!r}: it must be one of {', '.join(map(repr, BASELINES))}, a name registered with "
        "`trl_otb.register_baseline` before the config is made, or 'module:function'."
        + "".join(f" Did you mean {name!r}?" for name in close)
    )


def check_options(
    baseline: str | Callable | Baseline,
    alignment: str = "generated",
    zero_tail: bool = True,
    leave_one_out: bool = False,
) -> None:
    """
    Raise a `ValueError` if an option is unknown, has the wrong type, or is set although `baseline` ignores it.
    """
    rule = find_baseline(baseline)
    for option, value in (("zero_tail", zero_tail), ("leave_one_out", leave_one_out)):
        if not isinstance(value, bool):
            raise ValueError(f"`{option}` is {value!r}, a {type(value).__name__}: it must be True or False.")
    if alignment not in ALIGNMENTS:
        raise ValueError(f"`alignment` is {alignment!r}: it must be one of {', '.join(map(repr, ALIGNMENTS))}.")
    if alignment != "generated" and not rule.per_token:
        raise ValueError(
            f"`alignment` is {alignment!r} and `baseline` is {rule.name!r}: a baseline per completion compares no "
            f"tokens. Drop `alignment`, or choose a baseline per token: {_names('per_token')}."
        )
    if not zero_tail and not rule.zero_tail:
        raise ValueError(
            f"`zero_tail` is False and `baseline` is {rule.name!r}, which has no special rule for the lone tail. "
            f"Drop `zero_tail`, or choose {_names('zero_tail')}."
        )
    if leave_one_out and rule.leaves_one_out:
        raise ValueError(
            f"`leave_one_out` is True and `baseline` is {rule.name!r}, which always leaves one out. Drop the option."
        )


def _names(flag: str) -> str:
    return ", ".join(repr(name) for name, entry in BASELINES.items() if getattr(entry, flag))
