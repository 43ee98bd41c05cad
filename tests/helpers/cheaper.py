"""Spares trainings what takes longest when the model is tiny."""

import gc
import sys
from functools import cache


def package_search() -> None:
    """A training asks a hundred times whether each of 30 packages is installed: from now on the answers are kept."""
    if imports := sys.modules.get("accelerate.utils.imports"):
        imports._is_package_available = cache(imports._is_package_available)


def search_for_garbage() -> None:
    """A training searches for garbage: from now on not among the half million objects that are there now."""
    gc.collect()
    gc.freeze()
