"""A cache of model folders that several processes share."""

import os
import shutil
from collections.abc import Callable
from pathlib import Path

from filelock import FileLock


def cached(name: str, make: Callable[[Path], None]) -> Path:
    """The folder `name` of the cache. One process makes it, the others wait; half a folder never stays."""
    folder = Path(os.environ.get("TRL_OTB_CACHE", "~/.cache/trl_otb")).expanduser() / name
    folder.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(f"{folder}.lock"):
        if not folder.exists():
            unfinished = folder.with_name(f"{name}.unfinished")
            shutil.rmtree(unfinished, ignore_errors=True)
            try:
                make(unfinished)
            except BaseException:
                shutil.rmtree(unfinished, ignore_errors=True)
                raise
            unfinished.rename(folder)
    return folder
