"""Spares trainings what takes longest when the model is tiny."""

import gc
import inspect
import sys
from collections import Counter
from functools import cache, wraps

from beartype import BeartypeConf, beartype


# Of a function in each test; a call takes two, of its arguments and of its result. Checks of all calls took up to a
# tenth of the time of `make test`
MOST_CHECKS = 100
_checks, _unchecked = Counter(), []


def checked(function):
    """
    Checks arguments and results of a function's first calls in a test, but not those of inner functions, which name no
    shapes and would be compiled at each call.
    """
    if "<locals>" in function.__qualname__:
        return function
    check = beartype(conf=BeartypeConf(is_random=False))(function)  # else it draws from Python's random numbers
    path = (function.__module__, *function.__qualname__.split("."))

    @wraps(check)
    def first_calls(*args, **kwargs):
        _checks[path] += 1
        if _checks[path] == MOST_CHECKS:
            found = sys.modules[path[0]]
            for name in path[1:]:
                found = inspect.getattr_static(found, name)
            found = getattr(found, "fget", None) or getattr(found, "__func__", found)  # of a property, a static method
            found.__no_type_check__ = True  # which jaxtyping looks for in each call
            _unchecked.append(found)
        return check(*args, **kwargs)

    return first_calls


def check_again() -> None:
    """Before a test."""
    _checks.clear()
    while _unchecked:
        _unchecked.pop().__no_type_check__ = False


def package_search() -> None:
    """A training asks a hundred times whether each of 30 packages is installed: from now on the answers are kept."""
    if imports := sys.modules.get("accelerate.utils.imports"):
        imports._is_package_available = cache(imports._is_package_available)


def seeds_of_absent_devices() -> None:
    """Each seed is kept for devices that may be there later, with a printed stack: where there are none it is not."""
    import torch

    for device in (torch.cuda, torch.mtia, torch.xpu):
        if not device.is_available():
            device._lazy_call = lambda *_, **__: None


def search_for_garbage() -> None:
    """A training searches for garbage: from now on not among the half million objects that are there now."""
    gc.collect()
    gc.freeze()
