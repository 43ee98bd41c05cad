"""The registry of baselines: their names, what they need, and lookup."""

import difflib
import importlib
import inspect
import io
import os
import sys
from collections.abc import Callable, Collection
from dataclasses import dataclass, replace
from typing import Any

import torch

from .completions import NEEDS


MEMORY = ("update", "state_dict", "load_state_dict")  # methods of a baseline that learns
# Names that 0.2 had, and what to write instead
MOVED = {
    name: f"Set `baseline='recipes.more_baselines:{name}'` in a checkout, or copy the function from that file."
    for name in ("opo", "otb_shrunk", "ogb_pooled_damped")
}


@dataclass(frozen=True)
class Baseline:
    """
    An entry of `BASELINES`.

    Args:
        name (`str`):
            Its name in a config.
        rule (`Callable`):
            A function from [`Completions`] to B, or a class whose instances are called in the same way: see
            [`register_baseline`].
        needs (`frozenset[str]`):
            What it reads in addition to returns, mask and lengths: some of `NEEDS`. `"energy"` includes `weights`.
        per_token (`bool`):
            Whether B is subtracted from the reward-to-go of every token, or is one number per completion.
        scope (`str`):
            The rows that it must see together: `"group"` or `"batch"`, the generation batch of all processes.
        unbiased (`bool`):
            Whether B never depends on the completion it is subtracted from, so that the gradient is unbiased; B_t may
            depend on what precedes token t. This holds for the plain sum of gradients, if no completion is excluded
            because of its content (masked for its length, or without a reward).
        scalable (`bool`):
            Whether A vanishes where the group's returns are equal, so that it may be divided by their deviation.
        built_in (`bool`):
            Whether it belongs to this package, so that its results are not checked.
    """

    name: str
    rule: Any
    needs: frozenset[str] = frozenset()
    per_token: bool = False
    scope: str = "group"
    unbiased: bool = False
    scalable: bool = False
    built_in: bool = False

    @property
    def adjusts(self) -> bool:
        """Whether it looks at each completion's own prefix, in `adjust`."""
        return hasattr(self.rule, "adjust")

    @property
    def learns(self) -> bool:
        """Whether it has an `update`."""
        return hasattr(self.rule, "update")

    @property
    def summary(self) -> str:
        """The first line of its docstring."""
        return (self.rule.__doc__ or "").strip().partition("\n")[0]

    def instance(self) -> "Baseline":
        """The same entry with a class replaced by a new instance."""
        return replace(self, rule=self.rule()) if isinstance(self.rule, type) else self

    def learn(self, own: Any, base: torch.Tensor, gather: Callable[[torch.Tensor], torch.Tensor]) -> dict[str, float]:
        """
        Let it learn from a generation batch, and return its metrics as `name/…`.

        Raises:
            ValueError: `update` returned something other than a `dict` of numbers.
        """
        result = self.rule.update(own, base, gather)
        try:
            return {f"{self.name}/{name}": float(value) for name, value in (result or {}).items()}
        except (AttributeError, TypeError, ValueError, RuntimeError) as error:
            raise ValueError(
                f"The baseline {self.name!r} returned {result!r} from `update`: it must return a `dict` of numbers, "
                "which are logged, or nothing."
            ) from error

    def state(self) -> dict[str, Any]:
        """
        What a baseline that learns has to keep, as a checkpoint would give it back.

        Raises:
            ValueError: It is no `dict`, or holds what a checkpoint cannot give back.
        """
        state, file = self.rule.state_dict(), io.BytesIO()
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


BASELINES: dict[str, Baseline] = {}


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
        return x.mean(x.weights)
    ```

    The function receives [`Completions`] and returns B, broadcastable to `(B, T)`, or to `(B, 1)` if `per_token` is
    `False`, and finite wherever there is a token. It must not modify its argument.

    **A baseline that learns** is a class. Each trainer makes an instance, without arguments, and calls it like the
    function. Its other methods:

    - `update(own, base, gather)`, called once per generation batch in training, after its advantages. `own` are the
      completions of this process, `base`, `(B, 1)` or `(B, T)`, is what the call returned for them, and
      `gather(tensor)` concatenates the tensors of all processes, which must have one shape; all call it. What it learns
      applies from the next batch on, so an unbiased baseline stays unbiased. It may return a `dict` of numbers, which
      are logged as `otb/<name>/…`.
    - `state_dict()`, a `dict` of tensors, numbers and text, and `load_state_dict(state)`, for checkpoints.
    - `adjust(own, base)`, *optional*: B for this process's completions, from what each has written so far. Then the
      call itself receives returns and lengths only; energies, log-probs and states are in `own`.

    Args:
        name (`str`):
            A name that no other baseline has. The same function may be registered again, as in a notebook's cell;
            existing trainers keep the old one.
        needs, per_token, scope, unbiased, scalable:
            See [`~trl_otb.baselines.Baseline`].

    Returns:
        `Callable`: a decorator that returns the function or class unchanged.

    Raises:
        ValueError: The name is taken, empty, or contains a colon; or `needs` or `scope` is unknown.
        TypeError: The decorated object is neither a function nor a class with the methods above.
    """
    needs = (needs,) if isinstance(needs, str) else needs
    if not isinstance(name, str) or not name or ":" in name:
        raise ValueError(f"`name` is {name!r}: a baseline's name must be nonempty text without a colon.")
    if unknown := [need for need in needs if need not in NEEDS]:
        raise ValueError(
            f"The baseline {name!r} has `needs` with {unknown[0]!r}: it must be some of {', '.join(map(repr, NEEDS))}."
        )
    if scope not in ("group", "batch"):
        raise ValueError(f"The baseline {name!r} has `scope={scope!r}`: it must be 'group' or 'batch'.")
    flags = {"needs": frozenset(needs), "per_token": per_token, "scope": scope}
    return _register(name, **flags, unbiased=unbiased, scalable=scalable)


def built_in(name: str = "", **flags: Any) -> Callable[[Callable], Callable]:
    """Register one of this package's own baselines, by default under its function's name."""
    flags["needs"] = frozenset(flags.get("needs", ()))
    return lambda rule: _register(name or rule.__name__, built_in=True, **flags)(rule)


def _register(name: str, **flags: Any) -> Callable[[Callable], Callable]:
    def entered(rule: Callable) -> Callable:
        _check_rule(name, rule)
        _check_not_shared(name, rule)
        taken = BASELINES.get(name)
        if taken is not None and (taken.built_in or _origin(taken.rule) != _origin(rule)):
            raise ValueError(
                f"The baseline {name!r} is already registered by {'.'.join(_origin(taken.rule))}: choose another name."
            )
        BASELINES[name] = Baseline(name, rule, **flags)
        return rule

    return entered


def find_baseline(baseline: "str | Callable | Baseline") -> Baseline:
    """
    The entry for a baseline.

    Args:
        baseline (`str`, `Callable` or [`Baseline`]):
            A name in `BASELINES`; `"module:function"`, which is imported, also from the current folder; a function, a
            class, or an instance of a registered one; or an entry. An unregistered function counts as a baseline per
            token that needs energies.

    Raises:
        ValueError: There is no such baseline. The message lists the available ones.
    """
    if isinstance(baseline, Baseline):
        return baseline
    if callable(baseline):
        for entry in BASELINES.values():
            if entry.rule is baseline:
                return entry
            if entry.rule is type(baseline):
                return replace(entry, rule=baseline)
        name = _origin(baseline)[1]
        _check_rule(name, baseline)
        return Baseline(name, baseline, needs=frozenset({"energy"}), per_token=True)
    if isinstance(baseline, str) and baseline in BASELINES:
        return BASELINES[baseline]
    if isinstance(baseline, str) and ":" in baseline:
        return find_baseline(import_object(baseline, "baseline"))
    close = difflib.get_close_matches(str(baseline), BASELINES, n=1)
    raise ValueError(
        f"`baseline` is {baseline!r}: it must be one of {', '.join(map(repr, BASELINES))}, a name registered with "
        "`trl_otb.register_baseline` before the config is made, or 'module:function'."
        + (f" {MOVED[baseline]}" if baseline in MOVED else "".join(f" Did you mean {name!r}?" for name in close))
    )


def import_object(path: str, option: str) -> Any:
    """
    Import the function or class `path`, a `"module:name"`. Modules are also searched for in the current folder.

    Raises:
        ValueError: It cannot be imported or called. The message names `option`, from which `path` comes.
    """
    module_name, _, name = path.partition(":")
    if os.getcwd() not in sys.path:
        sys.path.append(os.getcwd())  # at the end, so that it hides no other module
    try:
        found = getattr(importlib.import_module(module_name), name)
    except (Exception, SystemExit) as error:  # a user's module can raise anything
        raise ValueError(
            f"`{option}` is {path!r}, which cannot be imported: {type(error).__name__}: {error}. Write "
            "'module:function', with the module's file in the current folder or on PYTHONPATH."
        ) from error
    if not callable(found):
        raise ValueError(f"`{option}` is {path!r}, which is a {type(found).__name__}: it must be a function.")
    _check_not_shared(path, found)
    return found


def _check_not_shared(name: str, rule: Any) -> None:
    if hasattr(rule, "update") and not isinstance(rule, type):
        raise TypeError(
            f"The baseline {name!r} is an instance of {type(rule).__name__}, and all trainers would share what it "
            "learns. Give the class, of which each trainer makes an instance."
        )


def _check_rule(name: str, rule: Any) -> None:
    """Raise a `TypeError` unless `rule` can be called as it will be."""
    if not callable(rule):
        raise TypeError(f"The baseline {name!r} is a {type(rule).__name__}: it must be a function.")
    expected = "with one argument, the completions"
    if isinstance(rule, type):
        lacking = [m for m in ("__call__", *MEMORY) if not any(m in vars(parent) for parent in rule.__mro__)]
        if lacking:
            raise TypeError(
                f"The baseline {name!r} is a class without `{'`, `'.join(lacking)}`. Classes are for baselines that "
                "learn, see `trl_otb.register_baseline`; otherwise write a function."
            )
        expected = "with no arguments, to make an instance"
    try:
        inspect.signature(rule).bind(*([] if isinstance(rule, type) else [None]))
    except TypeError:
        raise TypeError(f"The baseline {name!r} takes {inspect.signature(rule)}: it is called {expected}.") from None
    except ValueError:
        pass  # a signature that cannot be read


def _origin(rule: Callable) -> tuple[str, str]:
    return rule.__module__, getattr(rule, "__qualname__", type(rule).__qualname__)
