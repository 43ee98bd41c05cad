"""What the tool has measured, one file per prompt, so that a run can be stopped and go on."""

import json
from collections.abc import Callable
from pathlib import Path

import torch

from recipes.common.errors import InputError
from recipes.common.run_folder import differences

from .measure import Moments


SETTINGS = "settings.json"


class Storage:
    """
    A folder with one file per prompt.

    Args:
        folder (`Path`):
            Made once there is something to keep.
        settings (`dict`):
            What the report needs to know, and `configuration`, all that was asked for. A folder that was filled under
            another configuration is refused.
        overwrite (`bool`):
            Whether what the folder holds makes way for what is measured now.
        read_only (`bool`):
            Whether nothing is to be measured: then the folder must hold something, and its settings hold.

    Raises:
        InputError: The folder cannot be used.
    """

    def __init__(self, folder: Path, settings: dict, overwrite: bool = False, read_only: bool = False):
        self.folder = folder
        self.settings = json.loads(json.dumps(settings))
        self._overwrite = overwrite  # until there is something to take the place of what is there
        if folder.exists() and not folder.is_dir():
            raise InputError(f"`output_dir` is {str(folder)!r}, which is a file: name a folder.")
        if read_only:
            if len(self) < 2:
                raise InputError(f"nothing is saved under {folder} yet: run without --plot_only first.")
            self.settings = json.loads((folder / SETTINGS).read_text())
        elif len(self):
            before = json.loads((folder / SETTINGS).read_text()).get("configuration", {})
            other = differences(before, self.settings["configuration"])
            if other:
                raise InputError(
                    f"{folder} was measured otherwise: {'; '.join(other)}. Choose another --output_dir, or "
                    "--overwrite."
                )

    def __len__(self) -> int:
        return len(self._files())

    def _files(self) -> list[Path]:
        return [] if self._overwrite else sorted(self.folder.glob("prompt-*.pt"))

    def add(self, found: dict) -> None:
        if self._overwrite:
            self._overwrite = False
            for file in self._files():
                file.unlink()
        self.folder.mkdir(parents=True, exist_ok=True)
        (self.folder / SETTINGS).write_text(json.dumps(self.settings, indent=2) + "\n")
        path = self.folder / f"prompt-{len(self):05d}.pt"
        unfinished = path.with_suffix(".unfinished")
        torch.save(found, unfinished)
        unfinished.rename(path)

    def prompts(self) -> list[dict]:
        return [torch.load(path, weights_only=True) for path in self._files()]


def moments_of(
    prompts: list[dict], scale_of: Callable[[str, int], float | None] | None = None
) -> dict[tuple[str, int], Moments]:
    """
    The moments of every estimator and group size over these prompts; products come from completions not shared.

    `scale_of` gives the [`Moments.scale`] of a name at a group size; without it none is known.
    """
    truth = torch.stack([prompt["truth"] for prompt in prompts]).double()  # (P, 2, k)
    found = {}
    for key in (key for key in prompts[0] if isinstance(key, tuple)):
        mean = torch.stack([prompt[key]["mean"] for prompt in prompts]).double()
        square = torch.tensor([prompt[key]["square"] for prompt in prompts], dtype=torch.float64)
        products = _products(mean, mean), _products(mean, truth), _products(truth, truth)
        found[key] = Moments(square, *products, scale_of(*key) if scale_of else None)
    return found


def _products(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """`(P, 2, k)` twice -> `(P, P)`, symmetric: of unlike halves where the prompt is the same."""
    between = a.mean(1) @ b.mean(1).T
    within = ((a[:, 0] * b[:, 1]).sum(1) + (a[:, 1] * b[:, 0]).sum(1)) / 2
    between.diagonal().copy_(within)
    return (between + between.T) / 2
