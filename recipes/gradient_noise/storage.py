"""What the tool has measured, one file per prompt, so that a run can be stopped and go on."""

import json
from collections.abc import Callable
from pathlib import Path

import torch

from recipes.common.errors import InputError

from .measure import Moments


SETTINGS = "settings.json"


class Storage:
    """
    A folder with one file per prompt.

    Args:
        folder (`Path`):
            Made if it is not there.
        settings (`dict`):
            What was asked for. A folder that was filled under other settings is refused.
        overwrite (`bool`):
            Whether such a folder is emptied instead.
        read_only (`bool`):
            Whether nothing is to be measured: then the folder must hold something, and its settings hold.

    Raises:
        InputError: The folder cannot be used.
    """

    def __init__(self, folder: Path, settings: dict, overwrite: bool = False, read_only: bool = False):
        self.folder = folder
        path = folder / SETTINGS
        if read_only:
            if len(self) < 2:
                raise InputError(f"nothing is saved under {folder} yet: run without --plot_only first.")
            self.settings = json.loads(path.read_text())
            return
        if path.is_file():
            before = json.loads(path.read_text())
            settings = json.loads(json.dumps(settings))
            # More prompts continue what was begun
            other = [k for k in sorted(before | settings) if k != "num_prompts" and before.get(k) != settings.get(k)]
            if other and not overwrite:
                named = ", ".join(f"{k} ({before.get(k)!r}, now {settings.get(k)!r})" for k in other)
                raise InputError(
                    f"{folder} was measured with other settings: {named}. Choose another --output_dir, or --overwrite."
                )
            if overwrite:
                for file in self._files():
                    file.unlink()
        folder.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(settings, indent=2) + "\n")
        self.settings = settings

    def __len__(self) -> int:
        return len(self._files())

    def _files(self) -> list[Path]:
        return sorted(self.folder.glob("prompt-*.pt"))

    def add(self, found: dict) -> None:
        path = self.folder / f"prompt-{len(self):05d}.pt"
        unfinished = path.with_suffix(".unfinished")
        torch.save(found, unfinished)
        unfinished.rename(path)

    def prompts(self) -> list[dict]:
        return [torch.load(path, weights_only=True) for path in self._files()]


def moments_of(
    prompts: list[dict], scale_of: Callable[[str, int], float | None] = lambda name, n: None
) -> dict[tuple[str, int], Moments]:
    """
    The moments of every estimator and group size over these prompts; products come from completions not shared.

    `scale_of` gives the [`Moments.scale`] of a name at a group size.
    """
    truth = torch.stack([prompt["truth"] for prompt in prompts]).double()  # (P, 2, k)
    found = {}
    for key in (key for key in prompts[0] if isinstance(key, tuple)):
        mean = torch.stack([prompt[key]["mean"] for prompt in prompts]).double()
        square = torch.tensor([prompt[key]["square"] for prompt in prompts], dtype=torch.float64)
        products = _products(mean, mean), _products(mean, truth), _products(truth, truth)
        found[key] = Moments(square, *products, scale_of(*key))
    return found


def _products(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """`(P, 2, k)` twice -> `(P, P)`, symmetric: of unlike halves where the prompt is the same."""
    between = a.mean(1) @ b.mean(1).T
    within = ((a[:, 0] * b[:, 1]).sum(1) + (a[:, 1] * b[:, 0]).sum(1)) / 2
    between.diagonal().copy_(within)
    return (between + between.T) / 2
