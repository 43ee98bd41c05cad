"""Stores measurements, one file per prompt, so that they can be stopped and resumed."""

import json
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from filelock import BaseFileLock, FileLock, Timeout


SETTINGS = "settings.json"


class Storage:
    """
    The measured prompts, in memory or in a folder with one file per prompt.

    Args:
        folder (`Path`, *optional*):
            The folder, locked by [`only_writer`].
        settings (`dict`):
            Settings of the report, and `measured`, everything that the numbers depend on.
        overwrite (`bool`):
            Whether to replace the contents of the folder.
        prompts (`list[dict]`, *optional*):
            Prompts measured elsewhere, if there is no folder.

    Raises:
        ValueError: The folder holds a measurement with other settings, or foreign files.
    """

    def __init__(
        self,
        folder: Path | None,
        settings: dict[str, Any],
        *,
        overwrite: bool = False,
        prompts: list[dict[Any, Any]] | None = None,
    ) -> None:
        self.folder = folder
        self.settings = json.loads(json.dumps(settings, default=str))
        self._prompts = list(prompts or [])
        self._overwrite = overwrite  # until the first prompt is measured
        if folder is None:
            return
        found = None if overwrite else load(folder)
        if found is None:
            return
        before, self._prompts = found
        other = _differences(before.get("measured", {}), self.settings["measured"])
        if other:
            raise ValueError(
                f"{folder} was measured differently: {'; '.join(other)}. Choose another folder, or remove this one."
            )

    def add(self, index: int, found: dict[Any, Any]) -> None:
        if self.folder is not None:
            for file in self.folder.glob("prompt-*.pt") if self._overwrite else ():
                file.unlink()
            self._overwrite = False
            text = json.dumps(self.settings, indent=2) + "\n"
            _replace(self.folder / SETTINGS, lambda path: path.write_text(text, encoding="utf-8"))
            _replace(self.folder / f"prompt-{index:05d}.pt", lambda path: torch.save(found, path))
        self._prompts.append(found)

    def prompts(self) -> list[dict[Any, Any]]:
        return list(self._prompts)


def load(folder: Path) -> tuple[dict[str, Any], list[dict[Any, Any]]] | None:
    """
    The settings and prompts of a folder; `None` if it holds no prompt.

    Raises:
        ValueError: A file is damaged or foreign.
    """
    files = sorted(folder.glob("prompt-*.pt"))
    if not files:
        return None
    try:
        settings = json.loads((folder / SETTINGS).read_text(encoding="utf-8"))
        settings["measured"]["seed"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        problem = f"{type(error).__name__}: {error}"
        raise ValueError(f"{folder / SETTINGS} cannot be read ({problem}). Choose another folder.") from error
    prompts = []
    for file in files:
        try:
            prompts.append(torch.load(file, weights_only=True))
            dict(prompts[-1])["example"]
        except Exception as error:  # torch, zip and pickle each raise their own kind
            raise ValueError(
                f"{file} is damaged or not a measurement ({type(error).__name__}). Remove it: its prompt will be "
                "measured again."
            ) from error
    return settings, prompts


def lock(folder: Path, doing: str = "writes", *, again: bool = False) -> BaseFileLock:
    """
    Lock `folder`, which is created, against other writers. The lock ends with the object or the process. `again` lets
    this process take it a second time; `doing` is for the message.

    Raises:
        ValueError: Another process holds the lock, or the folder cannot be written to.
    """
    if folder.exists() and not folder.is_dir():
        raise ValueError(f"`output_dir` is {str(folder)!r}, which is a file: name a folder.")
    held = FileLock(folder / ".lock", is_singleton=again)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        held.acquire(timeout=0)
        tempfile.TemporaryFile(dir=folder).close()
    except Timeout as error:
        raise ValueError(
            f"Another process {doing} into {folder} right now: wait for it, or choose another folder."
        ) from error
    except OSError as error:
        problem = f"`output_dir` is {str(folder)!r}: it cannot be written to ({type(error).__name__}: {error})"
        raise ValueError(f"{problem}. Choose a folder to write to.") from error
    return held


@contextmanager
def only_writer(folder: Path | None) -> Iterator[None]:
    """Context in which no other process measures into `folder`, see [`lock`]."""
    held = None if folder is None else lock(folder, "measures")
    try:
        yield
    finally:
        if held is not None:
            held.release()


def _replace(path: Path, write: Any) -> None:
    unfinished = path.with_suffix(".unfinished")
    write(unfinished)
    unfinished.replace(path)


def _differences(before: dict[str, Any], now: dict[str, Any]) -> list[str]:
    """The settings that differ, in words."""
    return [
        f"`{name}` was {_short(before.get(name))} and is {_short(now.get(name))}"
        for name in sorted(before.keys() | now.keys())
        if before.get(name) != now.get(name)
    ]


def _short(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= 80 else f"{text[:77]}..."
