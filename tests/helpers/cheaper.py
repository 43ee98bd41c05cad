"""Spares trainings what takes longest when the model is tiny."""

import gc
import sys
from functools import cache

from beartype import BeartypeConf, beartype


check = beartype(conf=BeartypeConf(is_random=False))  # else it draws from Python's random numbers


def checked(function):
    """Arguments and results, but not of inner functions, which name no shapes and would be compiled at each call."""
    return function if "<locals>" in function.__qualname__ else check(function)


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
