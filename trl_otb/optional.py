"""Imports packages that only tables and pictures need, on first use."""

import importlib
from typing import Any


def require(module: str, purpose: str) -> Any:
    """
    Import `module`.

    Raises:
        ImportError: It is not installed. The message names the purpose and the line that installs it.
    """
    try:
        return importlib.import_module(module)
    except ImportError as error:
        package = module.partition(".")[0]
        raise ImportError(f"{purpose} needs {package}, which is not installed: pip install {package}") from error
