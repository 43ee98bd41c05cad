"""Objects that a user names on the command line or in YAML as `module:name`."""

import importlib
import os
import re
import sys
from typing import Any

from .errors import InputError


def is_named_object(text: str) -> bool:
    """Whether `text` reads `module:name` or `package.module:name`."""
    return re.fullmatch(r"[A-Za-z_][\w.]*:[A-Za-z_]\w*", text) is not None


def load_object(text: str, flag: str) -> Any:
    """
    The callable that `module:name` stands for; modules are also looked for in the current folder.

    Raises:
        InputError: There is no such module or name, the import fails, or the object cannot be called.
    """
    if not is_named_object(text):
        raise InputError(f"`{flag}` is {text!r}: it must read module:function.")
    module_name, name = text.split(":")
    if os.getcwd() not in sys.path:
        sys.path.append(os.getcwd())  # at the end: a file there must not hide an installed package
    try:
        module = importlib.import_module(module_name)
    except Exception as error:
        reason = f"importing {module_name} fails with {type(error).__name__}: {error}"
        raise InputError(f"`{flag}` is {text!r}: {reason}.") from error
    if not hasattr(module, name):
        raise InputError(f"`{flag}` is {text!r}: {module_name} ({module.__file__}) has no {name!r}.")
    found = getattr(module, name)
    if not callable(found):
        raise InputError(f"`{flag}` is {text!r}: it is a {type(found).__name__}, not a function.")
    return found
