"""Checkpoints: which is the newest complete one, and whether one can be resumed."""

import json
import zipfile
from pathlib import Path

from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR
from trl import GRPOConfig

from .errors import InputError


COUNTS = "held_out_counts.json"  # written last, so that a checkpoint that has it is complete


def global_step(checkpoint: Path) -> int:
    return int(checkpoint.name.removeprefix(f"{PREFIX_CHECKPOINT_DIR}-"))


def latest_checkpoint(folder: Path) -> Path | None:
    """The newest complete checkpoint of a run."""
    complete = [path.parent for path in folder.glob(f"{PREFIX_CHECKPOINT_DIR}-*/{COUNTS}")]
    return max(complete, key=global_step, default=None)


def trained_to_the_end(checkpoint: Path, args: GRPOConfig) -> bool:
    state = _state(checkpoint)
    if args.max_steps > 0:
        return state["global_step"] >= args.max_steps
    return state["global_step"] >= state["max_steps"] and state["num_train_epochs"] >= args.num_train_epochs


def check_checkpoint(checkpoint: Path) -> None:
    """
    Raises:
        InputError: There is no checkpoint of a recipe, or a file in it is damaged.
    """
    if not (checkpoint / COUNTS).is_file():
        raise InputError(
            f"`resume_from_checkpoint` is {str(checkpoint)!r}: no complete checkpoint of a recipe is there."
        )
    _state(checkpoint)
    _json(checkpoint / COUNTS)
    for path in [*checkpoint.glob("*.pt"), *checkpoint.glob("*.pth"), *checkpoint.glob("*.bin")]:
        if not zipfile.is_zipfile(path):
            raise _damaged(path, "it is cut short")
    check_safetensors(checkpoint)


def check_safetensors(folder: Path) -> None:
    """
    Raises:
        InputError: A .safetensors file in `folder` is cut short or is none.
    """
    from safetensors import SafetensorError, safe_open

    for path in folder.glob("*.safetensors"):
        try:
            with safe_open(path, framework="pt"):
                pass
        except (SafetensorError, OSError) as problem:
            raise _damaged(path, str(problem)) from problem


def _state(checkpoint: Path) -> dict:
    state = _json(checkpoint / "trainer_state.json")
    for key in ("global_step", "max_steps", "num_train_epochs"):
        if not isinstance(state, dict) or key not in state:
            raise _damaged(checkpoint / "trainer_state.json", f"it has no {key}")
    return state


def _json(path: Path):
    try:
        return json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise _damaged(path, str(error)) from error


def _damaged(path: Path, reason: str) -> InputError:
    return InputError(f"{path} is damaged: {reason}. Resume from an earlier checkpoint, or get the file again.")
