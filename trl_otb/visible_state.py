"""What a function keeps where Python can see it: to find out whether a call changed it."""

import functools
import inspect
import io
import pickle
import sys
import sysconfig
from types import CodeType, FunctionType, ModuleType
from typing import Any

import torch


# Of these, and of a user's own classes, objects are looked into; all others count as one thing that does not change
PLAIN = ("builtins", "collections", "datetime", "decimal", "fractions", "itertools", "numpy", "random", "torch")
INSTALLED = tuple({sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")})


def visible_state(function: Any) -> dict[str, bytes]:
    """
    Of a function, or an object that can be called: the object and its attributes, closures, defaults, and the globals
    that it names, also those of other functions that it names, as bytes. Left out are installed libraries, models, and
    what cannot be pickled.
    """
    found: dict[str, bytes] = {}
    seen: set[int] = set()

    def add(name: str, value: Any) -> None:
        if id(value) in seen or isinstance(value, ModuleType | torch.nn.Module):
            return
        seen.add(id(value))
        parts: dict[str, Any] = {}
        if isinstance(value, functools.partial):
            parts = {"function": value.func, "args": value.args, "keywords": value.keywords}
        elif inspect.ismethod(value):
            parts = {"self": value.__self__, "function": value.__func__}
        elif isinstance(value, FunctionType):
            if _is_users(value.__module__):
                parts = _of_function(value)
        elif isinstance(value, type):
            if _is_users(value.__module__):
                parts = {key: of for key, of in vars(value).items() if not key.startswith("__") or key == "__call__"}
        else:
            if _is_users(type(value).__module__):
                parts = {"class": type(value), **getattr(value, "__dict__", {})}
            if (content := _pickled(value)) is not None:
                found[name] = content
        for key, of in parts.items():
            add(f"{name}.{key}", of)

    add(getattr(function, "__name__", type(function).__name__), function)
    return found


def _of_function(function: FunctionType) -> dict[str, Any]:
    named, codes = set(), [function.__code__]
    while codes:  # with functions, lambdas and comprehensions inside
        code = codes.pop()
        named |= {*code.co_names}
        codes += [of for of in code.co_consts if isinstance(of, CodeType)]
    cells = zip(function.__code__.co_freevars, function.__closure__ or (), strict=True)
    closure = {}
    for name, cell in cells:
        try:
            closure[name] = cell.cell_contents
        except ValueError:  # not filled yet
            continue
    of_globals = {name: function.__globals__[name] for name in sorted(named & function.__globals__.keys())}
    defaults = {"defaults": function.__defaults__, "keywords": function.__kwdefaults__}
    return of_globals | closure | defaults | vars(function)


def _is_users(module: str) -> bool:
    file = getattr(sys.modules.get(module), "__file__", None)
    return module == "__main__" or (file is not None and not file.startswith(INSTALLED))


class _Pickler(pickle.Pickler):
    def persistent_id(self, value: Any) -> str | None:
        module = type(value).__module__.partition(".")[0]
        looked_into = module in PLAIN or _is_users(type(value).__module__)
        opaque = isinstance(value, ModuleType | torch.nn.Module) or callable(value)
        return None if looked_into and not opaque else f"{type(value)} {id(value)}"


def _pickled(value: Any) -> bytes | None:
    buffer = io.BytesIO()
    try:
        _Pickler(buffer).dump(value)
    except Exception:  # of a user's class, of all kinds
        return None
    return buffer.getvalue()
