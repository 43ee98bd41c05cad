"""What a function keeps where Python can see it: to find out whether a call changed it."""

import functools
import hashlib
import inspect
import pickle
import site
import sys
import sysconfig
from types import CodeType, FunctionType, ModuleType
from typing import Any


# Beside a user's own classes, objects that can be looked into; of all others only their identity counts
PLAIN = ("collections", "datetime", "decimal", "fractions", "itertools", "numpy", "random", "torch")
PATHS = {sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")}
INSTALLED = (*PATHS, *site.getsitepackages(), site.getusersitepackages())


def visible_state(function: Any) -> bytes:
    """
    A hash, of a function or an object that can be called: of its attributes, closure and defaults, and of the globals
    that it names, with those of the user's functions, classes and modules among them. Empty if it cannot be pickled.
    What a library's object keeps is not seen.
    """
    written = _Hashed()
    try:
        _Reachable(written).dump(function)
    except Exception:  # of a user's class, of all kinds
        return b""
    return written.hash.digest()


class _Hashed:
    """A file that keeps a hash."""

    def __init__(self) -> None:
        self.hash = hashlib.blake2b(digest_size=16)

    def write(self, content: Any) -> None:
        self.hash.update(content)


class _Reachable(pickle.Pickler):
    """Writes what can be reached; it is never read again."""

    def __init__(self, file: Any) -> None:
        super().__init__(file)
        self.seen: dict[int, Any] = {}

    def reducer_override(self, value: Any) -> Any:
        parts = [id(value)] if id(value) in self.seen else _parts(value)
        self.seen[id(value)] = value
        return NotImplemented if parts is None else (list, (parts,))


def _parts(value: Any) -> list[Any] | None:
    """What an object is made of; `None` to pickle it as usual."""
    if isinstance(value, functools.partial):
        return [value.func, value.args, value.keywords]
    if inspect.ismethod(value) or isinstance(value, classmethod | staticmethod):
        return [getattr(value, "__self__", None), value.__func__]
    if isinstance(value, FunctionType | type):
        if not _is_users(value.__module__):
            return None if isinstance(value, type) else [id(value)]
        if isinstance(value, FunctionType):
            return [vars(value), *_of_function(value)]
        own = [vars(of) for of in value.__mro__ if _is_users(of.__module__)]
        return [[{key: of[key] for key in of if not key.startswith("__") or key == "__call__"} for of in own]]
    if _is_users(type(value).__module__):
        content = [*value.items()] if isinstance(value, dict) else [*value] if isinstance(value, list | set) else []
        slots = [getattr(value, name, None) for of in type(value).__mro__ for name in getattr(of, "__slots__", ())]
        return [type(value), getattr(value, "__dict__", None), slots, content]
    plain = isinstance(value, bytearray) or type(value).__module__.partition(".")[0] in PLAIN
    return None if plain and not callable(value) else [id(value)]


def _of_function(function: FunctionType) -> list[Any]:
    named, codes = set(), [function.__code__]
    while codes:  # with functions, lambdas and comprehensions inside
        code = codes.pop()
        named |= {*code.co_names}
        codes += [of for of in code.co_consts if isinstance(of, CodeType)]
    known = function.__globals__
    closure = [cell.cell_contents for cell in function.__closure__ or () if cell != type(cell)()]  # but for empty ones
    of_globals = {name: known[name] for name in sorted(named & known.keys())}
    modules = [of for of in of_globals.values() if isinstance(of, ModuleType) and _is_users(of.__name__)]
    of_modules = [{name: vars(of)[name] for name in sorted(named & vars(of).keys())} for of in modules]
    return [closure, function.__defaults__, function.__kwdefaults__, of_globals, of_modules]


def _is_users(module: str | None) -> bool:
    file = getattr(sys.modules.get(module or ""), "__file__", None)
    return module == "__main__" or (file is not None and not file.startswith(INSTALLED))
