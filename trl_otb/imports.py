"""Imports functions that a user names as `module:function`."""

import importlib
import os
import sys
from collections.abc import Callable


def import_object(path: str, option: str) -> Callable:
    """
    Import the function or class `path`, a `"module:name"`. Modules are also searched for in the current
    folder.

    Raises:
        ValueError: It cannot be imported or called. The message names `option`, from which `path` comes.
    """
    module_name, colon, name = path.partition(":")
    if not colon:
        raise ValueError(f"`{option}` is {path!r}: it must read module:function.")
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
    return found
