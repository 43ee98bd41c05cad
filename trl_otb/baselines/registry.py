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


@dataclass(frozen=True)
class Baseline:
    """
    An entry of `BASELINES`: what [`register_baseline`] was given, and whether the baseline is `built_in`, so that its
    results are not checked. `rule` is a function, a class, or an instance of one.
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
        """Whether it depends on each completion's own prefix, in `adjust`."""
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
        """Let it learn, and return its metrics as `name/…`."""
        metrics = self.rule.update(own if self.per_token else own.totals(), base, gather)
        if not isinstance(metrics, dict | None):
            raise ValueError(
                f"The baseline {self.name!r} returned {metrics!r} from `update`: give a `dict` of numbers."
            )
        metrics = metrics or {}
        return {f"{self.name}/{name}": float(value) for name, value in metrics.items()}

    def state(self) -> dict[str, Any]:
        """What a checkpoint would give back of what it has learned; a `ValueError` if that is no `dict`."""
        state, file = self.rule.state_dict(), io.BytesIO()
        try:
            torch.save(state, file)
            file.seek(0)
            return dict(torch.load(file, weights_only=True, map_location="cpu"))
        except Exception as error:  # of pickle, of all kinds
            raise ValueError(
                f"The baseline {self.name!r} returned a {type(state).__name__} from `state_dict`, which no checkpoint "
                f"would give back ({type(error).__name__}): it must return a `dict` of tensors, numbers and text."
            ) from error


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

    The function receives [`Completions`], which it must not modify, and returns B, broadcastable to `(B, T)`, or to
    `(B, 1)` if `per_token` is `False`, and finite wherever there is a token.

    **A baseline that learns** is a class. Each trainer makes an instance, without arguments, and calls it like the
    function. Its other methods:

    - `update(own, base, gather)`, called once per generation batch in training, after its advantages. `own` are the
      completions of this process, as the call sees them, `base`, `(B, 1)` or `(B, T)`, is what it returned, and
      `gather(tensor)` concatenates the tensors of all processes, which must have one shape; all call it. What it
      learns applies from the next batch on, so an unbiased baseline stays unbiased. It may return a `dict` of numbers,
      which are logged as `otb/<name>/…`.
    - `state_dict()`, a `dict` of tensors, numbers and text, and `load_state_dict(state)`, for checkpoints.
    - `adjust(own, base)`, *optional*: B for this process's completions, from what each has written so far. Then the
      call itself receives returns and lengths only; energies, log-probs and states are in `own`.

    Args:
        name (`str`): A name that no other baseline has. The same function may be registered again, as in a notebook's
            cell; existing trainers keep the old one.
        needs (`Collection[str]`, *optional*): What it reads in addition to returns, mask and lengths: some of `NEEDS`.
            `"energy"` includes `weights`.
        per_token (`bool`, *optional*): Whether B is subtracted from the reward-to-go of every token, or is one number
            per completion.
        scope (`str`, *optional*): The rows that it must see together: `"group"` or `"batch"`, the generation batch of
            all processes.
        unbiased (`bool`, *optional*): Whether B never depends on the completion it is subtracted from, except that B_t
            may depend on what precedes token t. Then the plain sum of gradients is unbiased, if no completion is
            excluded because of its content (masked for its length, or without a reward).
        scalable (`bool`, *optional*): Whether A is 0 if the group's returns are equal, so that `scale_rewards` may
            divide it by their deviation.

    Raises:
        ValueError: The name is taken, empty, or contains a colon; or `needs` or `scope` is unknown.
        TypeError: The decorated object is neither a function nor a class with the methods above.
    """
    needs = frozenset((needs,) if isinstance(needs, str) else needs)
    if not isinstance(name, str) or not name or ":" in name:
        raise ValueError(f"`name` is {name!r}: a baseline's name must be nonempty text without a colon.")
    if not needs <= {*NEEDS} or scope not in ("group", "batch"):
        raise ValueError(
            f"The baseline {name!r} has `needs={sorted(needs)}` and `scope={scope!r}`: they must be some of "
            f"{', '.join(map(repr, NEEDS))}, and 'group' or 'batch'."
        )
    return _register(name, needs=needs, per_token=per_token, scope=scope, unbiased=unbiased, scalable=scalable)


def built_in(name: str = "", needs: Collection[str] = (), **flags: Any) -> Callable[[Callable], Callable]:
    """Register one of this package's own baselines, by default under its function's name."""
    return lambda rule: _register(name or rule.__name__, needs=frozenset(needs), built_in=True, **flags)(rule)


def _register(name: str, **flags: Any) -> Callable[[Callable], Callable]:
    def entered(rule: Callable) -> Callable:
        _check_rule(name, rule)
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
    The entry for a baseline: a name in `BASELINES`; `"module:function"`, which is imported, also from the current
    folder; a function, a class, or an instance of a registered one; or an entry. An unregistered function counts as a
    baseline per token that needs energies. Raises a `ValueError` that lists the available ones if there is none.
    """
    if isinstance(baseline, Baseline):
        return baseline
    if isinstance(baseline, str) and baseline in BASELINES:
        return BASELINES[baseline]
    if isinstance(baseline, str) and ":" in baseline:
        return find_baseline(_imported(baseline))
    if callable(baseline):
        for entry in BASELINES.values():
            if entry.rule is baseline:
                return entry
            if entry.rule is type(baseline):
                return replace(entry, rule=baseline)
        name = _origin(baseline)[1]
        _check_rule(name, baseline, shared=False)
        return Baseline(name, baseline, needs=frozenset({"energy"}), per_token=True)
    close = difflib.get_close_matches(str(baseline), BASELINES, n=1)
    raise ValueError(
        f"`baseline` is {baseline!r}: it must be one of {', '.join(map(repr, BASELINES))}, a name registered with "
        "`trl_otb.register_baseline` before the config is made, or 'module:function'."
        + "".join(f" Did you mean {name!r}?" for name in close)
    )


def _imported(path: str) -> Any:
    """The function or class `"module:name"`. Modules are also searched for in the current folder."""
    module_name, _, name = path.partition(":")
    if os.getcwd() not in sys.path:
        sys.path.append(os.getcwd())  # at the end, so that it hides no other module
    try:
        rule = getattr(importlib.import_module(module_name), name)
    except (Exception, SystemExit) as error:  # a user's module can raise anything
        raise ValueError(
            f"`baseline` is {path!r}, which cannot be imported: {type(error).__name__}: {error}. Write "
            "'module:function', with the module's file in the current folder or on PYTHONPATH."
        ) from error
    _check_rule(path, rule)
    return rule


def _check_rule(name: str, rule: Any, shared: bool = True) -> None:
    """Raise a `TypeError` unless `rule` can be called as it will be, and by several trainers."""
    problem, arguments = None, list[Any]()
    if not callable(rule):
        problem = "it must be a function"
    elif isinstance(rule, type):
        lacking = [m for m in ("__call__", *MEMORY) if not any(m in vars(parent) for parent in rule.__mro__)]
        if lacking:
            problem = f"a baseline that learns lacks `{'`, `'.join(lacking)}`, see `trl_otb.register_baseline`"
    else:
        arguments = [None]
        if shared and hasattr(rule, "update"):
            problem = "all trainers would share what this instance learns. Give the class"
    try:
        if problem is None:
            inspect.signature(rule).bind(*arguments)
    except TypeError:
        given = "the completions" if arguments else "nothing"
        problem = f"it takes {inspect.signature(rule)}, and is called with {given}"
    except ValueError:
        pass  # a signature that cannot be read
    if problem is not None:
        kind = "class" if isinstance(rule, type) else type(rule).__name__
        raise TypeError(f"The baseline {name!r} is a {kind}: {problem}.")


def _origin(rule: Callable) -> tuple[str, str]:
    return rule.__module__, getattr(rule, "__qualname__", type(rule).__qualname__)
