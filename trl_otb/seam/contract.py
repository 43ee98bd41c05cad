"""
A contract with TRL: private parts that this package relies on. `parts.py` lists them, here and in
`experimental/async_grpo`. What is found when a trainer is made:

- TRL is too old, a part or an attribute is gone, or a part takes other parameters: an `ImportError`.
- A user put something in the place of a part that does not take its parameters: a `TypeError`.
- TRL is newer than the tested versions, or a part has another source than those that were read: a warning, and before
  the first step log-probs, energies, the advantages that reach the loss and the loss itself are checked.
"""

import contextlib
import hashlib
import inspect
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from pkgutil import resolve_name
from typing import Any

import accelerate
import torch
import transformers
import trl
from accelerate.logging import get_logger
from packaging.version import Version


logger = get_logger(__name__)

PINNED = Path(__file__).with_name("trl_sources.json")  # newest versions, hashes of the sources read; see `make hashes`
OLDEST = "1.9"  # minor version of TRL that works; `older_trl.py` has what it takes
TRIED_UNSLOTH = "2026.10.9"


def tested() -> dict[str, Any]:
    """The newest `versions` that were tested, and by part the hashes of the `sources` that were read."""
    return json.loads(PINNED.read_text())


def versions() -> dict[str, str]:
    """The installed versions of the packages whose private parts are used."""
    return {package.__name__: package.__version__ for package in (trl, transformers, accelerate)}


def unsloth_has_replaced() -> bool:
    """Whether Unsloth's class stands in the place of `trl.GRPOTrainer` now."""
    return getattr(vars(trl).get("GRPOTrainer"), "__name__", None) == "UnslothGRPOTrainer"


def incompatible_trl(what: str) -> ImportError:
    if unsloth_has_replaced():
        return ImportError(
            "trl_otb relies on parts of TRL that are different where Unsloth has replaced GRPOTrainer of trl "
            f"{trl.__version__}: {what}. Install the Unsloth that was tried: pip install 'unsloth=={TRIED_UNSLOTH}'."
        )
    return ImportError(
        f"trl_otb relies on parts of TRL that are different in trl {trl.__version__}: {what}. Install a version that "
        f"was tested, such as the newest: pip install 'trl=={tested()['versions']['trl']}'."
    )


def check_version() -> None:
    """Raise an `ImportError` if the installed TRL is too old."""
    if Version(installed := versions()["trl"]) < Version(OLDEST):
        raise ImportError(f"trl {installed} is installed, and trl_otb needs {OLDEST} or newer: pip install -U trl")


def is_newer() -> bool:
    """Whether the installed TRL is newer than the tested ones."""
    return Version(versions()["trl"]) > Version(tested()["versions"]["trl"])


try:
    from trl.models import utils as trl_models  # noqa: F401
    from trl.trainer import utils as trl_utils  # noqa: F401
    from trl.trainer.grpo_trainer import GRPOTrainer  # noqa: F401

    from .older_trl import LACKING
except ImportError as error:
    check_version()
    raise incompatible_trl(str(error)) from error


FOLDERS = [Path(str(of.__file__)).parent for of in (trl, transformers, torch, accelerate)] + [Path(__file__).parents[1]]
LIBRARIES = (contextlib.__file__, *(f"{folder}{os.sep}" for folder in FOLDERS))  # as the paths of their code begin


def _takes(function: Any, names: list[str]) -> bool:
    """Whether these are the leading parameters, or the function takes any."""
    parameters = inspect.signature(function).parameters
    takes_any = {"VAR_POSITIONAL", "VAR_KEYWORD"} <= {of.kind.name for of in parameters.values()}
    return takes_any or [*parameters][: len(names)] == names


@dataclass(frozen=True)
class Contract:
    """What is relied on of one of TRL's trainers."""

    trainer: str
    parts: dict[str, dict[str, str]]  # by `module` or `module:class`: functions, with their leading parameters
    attributes: dict[str, str]  # of instances, by class; of dicts, the keys

    def gone(self) -> list[str]:
        """A message for each part that is gone or takes other parameters."""
        messages = []
        for name, function, parameters in self._parts():
            if function is None:
                messages.append(f"`{name}` is gone")
            elif not _takes(function, parameters) and function.__module__.partition(".")[0] in versions():
                messages.append(f"`{name}` no longer takes ({', '.join(parameters)})")
        return messages

    def sources(self) -> dict[str, str]:
        """A short hash of the source of every part."""
        return {name: _hash(part) for name, part, _ in self._parts() if part is not None}

    def changed(self) -> list[str]:
        """The parts whose source is not the one that was read."""
        known = tested()["sources"]
        return sorted(name for name, source in self.sources().items() if source not in known.get(name, ()))

    def check(self) -> None:
        """
        Raise an `ImportError` if the installed TRL is too old, or does not keep the contract; a `TypeError` if what a
        user put in the place of a part does not take its parameters.
        """
        check_version()
        if messages := self.gone():
            raise incompatible_trl("; ".join(messages))
        for name, function, parameters in self._parts():
            if not _takes(function, parameters):
                raise TypeError(
                    f"`{name}` was replaced by `{function.__module__}.{function.__qualname__}`, which does not take "
                    f"({', '.join(parameters)}): let it take `*args, **kwargs`, or these."
                )

    def warn_if_changed(self) -> bool:
        """Whether this TRL is newer than the tested ones, or parts have changed, of which it warns once."""
        changed, newer = self.changed(), is_newer()
        if changed or newer:
            installed, known = (", ".join(map(" ".join, of.items())) for of in (versions(), tested()["versions"]))
            logger.warning_once(
                f"trl_otb was tested with up to {known}; installed: {installed}. Changed for {self.trainer}: "
                f"{', '.join(changed) or 'nothing that is relied on'}. Signatures still match, and what the first step "
                "trains is checked."
            )
        return bool(changed or newer)

    def check_attributes(self, owner: str, instance: Any) -> None:
        """Raise an `ImportError` if an attribute of an instance of `owner` is gone, or a key if it is a dict."""
        names = self.attributes[owner].split()
        known = instance if isinstance(instance, Mapping) else [name for name in names if hasattr(instance, name)]
        if gone := [name for name in names if name not in known]:
            raise incompatible_trl(", ".join(f"`{owner}.{name}` is gone" for name in gone))

    def _parts(self) -> list[tuple[str, Any, list[str]]]:
        """Names, the functions or classes that are there, and their expected parameters."""
        return [
            (f"{owner.rpartition(':')[2]}.{name}", _found(owner, name), parameters.split())
            for owner, functions in self.parts.items()
            for name, parameters in functions.items()
            if name not in LACKING
        ]


def _found(owner: str, name: str) -> Any:
    try:
        return getattr(resolve_name(owner), name, None)
    except (ImportError, AttributeError):
        return None


def from_library(function: Any) -> bool:
    """Whether its code is that of a library or of this package, whatever `functools.wraps` says."""
    return getattr(getattr(function, "__code__", None), "co_filename", "").startswith(LIBRARIES)


@cache
def _hash(part: Any) -> str:
    while hasattr(part, "__wrapped__") and from_library(part):  # not through a user's wrapper
        part = part.__wrapped__
    try:
        return hashlib.sha256(inspect.getsource(getattr(part, "__code__", part)).encode()).hexdigest()[:12]
    except (OSError, TypeError):
        return "without source"
