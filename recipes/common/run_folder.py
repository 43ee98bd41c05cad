"""The folder of a run: what it may hold before, what the run began with, and whether there is anything left to do."""

import hashlib
import json
import os
import shutil
from dataclasses import dataclass
from enum import Enum
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR
from trl import ModelConfig

from trl_otb import OTBGRPOConfig

from .arguments import RecipeArguments
from .checkpoints import check_checkpoint, latest_checkpoint, trained_to_the_end
from .errors import InputError
from .launching import command, processes, say, without_flags


CONFIGURATION, RESULT = "configuration.json", "result.json"
PACKAGES = ("trl-otb", "trl", "transformers", "torch", "accelerate", "datasets", "peft")
# What a run leaves behind, and `--overwrite` removes.
LEFT_BEHIND = (
    f"{PREFIX_CHECKPOINT_DIR}-*", CONFIGURATION, RESULT, "*.safetensors", "pytorch_model*.bin",
    "*.safetensors.index.json", "training.png", "held_out.json", "trainer_state.json",
)  # fmt: skip
# Options that decide what is written where, how often, and how far, but not which experiment this is.
NEUTRAL_STARTS = ("logging", "save", "eval_", "hub", "push_to_hub", "log_", "report", "dataloader_", "tqdm", "trackio")
NEUTRAL = set(
    "output_dir run_name disable_tqdm resume_from_checkpoint overwrite allow_changes traceback eval_only max_steps "
    "num_train_epochs num_completions_to_print per_device_eval_batch_size project local_rank ddp_timeout do_train "
    "do_eval do_predict skip_memory_metrics include_for_metrics load_best_model_at_end metric_for_best_model "
    "greater_is_better restore_callback_states_from_checkpoint enable_jit_checkpoint num_prompts prompts_per_batch "
    "plot_only".split()
)


@dataclass
class RunFolder:
    """
    A run's folder, opened by [`open_run`].

    Args:
        path (`Path`):
            The folder.
        configuration (`dict`):
            Everything that was asked for, ready for JSON.
        checkpoint (`Path`, *optional*):
            What the run resumes from.
        finished (`str`, *optional*):
            Why there is nothing left to do.
        overwrite (`bool`):
            Whether [`start`] removes what an earlier run left.
        argv (`list[str]`):
            The command line, for [`resume_command`].
    """

    path: Path
    configuration: dict[str, Any]
    checkpoint: Path | None
    finished: str | None
    overwrite: bool
    argv: list[str]

    def start(self, is_main_process: bool) -> None:
        """Make the folder and write down what the run begins with. Only now may an earlier run's files go."""
        if not is_main_process:
            return
        if self.overwrite and self.checkpoint is None:
            for pattern in LEFT_BEHIND:
                for old in self.path.glob(pattern):
                    shutil.rmtree(old) if old.is_dir() else old.unlink()
        if self.checkpoint is None:
            (self.path / CONFIGURATION).write_text(json.dumps(self.configuration, indent=2, sort_keys=True) + "\n")

    def resume_command(self) -> str:
        """The command that goes on from the newest checkpoint, ready to be pasted."""
        kept = without_flags(self.argv, "resume_from_checkpoint", "overwrite")
        return command([*kept, "--resume_from_checkpoint", "latest"])


def open_run(settings: RecipeArguments, args: OTBGRPOConfig, model_args: ModelConfig, argv: list[str]) -> RunFolder:
    """
    Look at the folder of a run before anything is loaded. Nothing is changed there yet, but a new folder is made.

    Raises:
        InputError: The folder cannot be written to or holds another run, or a resumed run was begun differently.
    """
    folder = Path(args.output_dir)
    now = configuration(settings, args, model_args)
    run = RunFolder(folder, now, None, None, settings.overwrite, argv)
    if args.max_steps == 0 or (args.max_steps < 0 and args.num_train_epochs == 0):
        run.finished = "Nothing left to do: `max_steps` is 0."
    elif settings.eval_only:
        pass
    elif args.resume_from_checkpoint is None:
        _check_free(folder, settings.overwrite)
    else:
        _find_checkpoint(run, args, settings.allow_changes)
    args.resume_from_checkpoint = None if run.checkpoint is None else str(run.checkpoint)
    if run.finished is None and not settings.eval_only:
        _check_writable(folder)
    return run


def configuration(settings: RecipeArguments, args: OTBGRPOConfig, model_args: ModelConfig) -> dict[str, Any]:
    """Every option of a run, and what it ran on."""
    data = Path(settings.dataset_name)
    return {
        "recipe": _plain(vars(settings)),
        "trainer": _plain(args.to_dict()),
        "model": _plain(vars(model_args)),
        "processes": processes(),
        "data_sha256": hashlib.sha256(data.read_bytes()).hexdigest() if data.is_file() else None,
        "versions": {name: _version(name) for name in PACKAGES},
    }


def differences(then: dict[str, Any], now: dict[str, Any]) -> list[str]:
    """Options that make another experiment, as `name was 1 and is 2`."""
    changed = []
    for part in ("recipe", "trainer", "model"):
        before, after = then.get(part, {}), now[part]
        for name in sorted(before.keys() & after.keys()):
            if name in NEUTRAL or name.startswith(NEUTRAL_STARTS):
                continue
            if before[name] != after[name]:
                changed.append(f"`{name}` was {before[name]!r} and is {after[name]!r}")
    if then.get("processes") != now["processes"]:
        changed.append(f"there were {then.get('processes')} processes and now are {now['processes']}")
    if then.get("data_sha256") != now["data_sha256"]:
        changed.append("the data file has changed")
    return changed


def _find_checkpoint(run: RunFolder, args: OTBGRPOConfig, allow_changes: bool) -> None:
    asked_for = args.resume_from_checkpoint
    if asked_for == "latest":
        source, checkpoint = run.path, latest_checkpoint(run.path)
        if checkpoint is None and not (run.path / RESULT).is_file():
            raise InputError(f"`resume_from_checkpoint` is 'latest', and {run.path} holds no complete checkpoint.")
    else:
        checkpoint = Path(asked_for)
        source = checkpoint.parent
        check_checkpoint(checkpoint)
        if source.resolve() != run.path.resolve():
            _check_free(run.path, run.overwrite)
    _check_unchanged(source, run.configuration, allow_changes)
    if checkpoint is not None and not trained_to_the_end(checkpoint, args):
        run.checkpoint = checkpoint
        check_checkpoint(checkpoint)
        return
    result = source / RESULT
    if result.is_file():
        run.finished = f"Nothing left to do: {source} holds the result of the whole run. More --max_steps go on."
    else:
        run.finished = (
            f"Nothing left to train: {checkpoint} is the last step. What it lacks is an evaluation: "
            + command([*without_flags(run.argv, "resume_from_checkpoint", "model_name_or_path"),
                       "--eval_only", "--model_name_or_path", str(checkpoint)])
        )  # fmt: skip


def _check_unchanged(folder: Path, now: dict[str, Any], allow_changes: bool) -> None:
    path = folder / CONFIGURATION
    if not path.is_file():
        say(f"Note: {path} is missing, so nothing says whether this run is resumed with the options it began with.")
        return
    try:
        then = json.loads(path.read_text())
    except json.JSONDecodeError as error:
        raise InputError(f"{path} cannot be read: {error}. Remove it to resume without a comparison.") from error
    changed = differences(then, now)
    if changed and not allow_changes:
        raise InputError(
            f"{folder} began with other options: {'; '.join(changed)}. Resume with the same options, say "
            "--allow_changes, or start a new run with another --output_dir."
        )
    for change in changed:
        say(f"Note: {change}.")
    for name, was in then["versions"].items():
        if was != now["versions"].get(name):
            say(f"Note: {name} was {was} and is {now['versions'].get(name)}.")
    steps = then["trainer"].get("max_steps"), now["trainer"].get("max_steps")
    if steps[0] != steps[1] and not str(now["trainer"].get("lr_scheduler_type")).startswith("constant"):
        say(f"Note: max_steps was {steps[0]} and is {steps[1]}, which stretches the learning rate's schedule.")


def _check_free(folder: Path, overwrite: bool) -> None:
    if overwrite or not folder.is_dir():
        return
    held = "the result of a run" if (folder / RESULT).is_file() else None
    if held is None and any(folder.glob(f"{PREFIX_CHECKPOINT_DIR}-*")):
        held = "checkpoints"
    if held is None and any(any(folder.glob(p)) for p in ("*.safetensors", "pytorch_model*.bin")):
        held = "a model"
    if held is not None:
        raise InputError(
            f"{folder} holds {held}. Say --resume_from_checkpoint latest to go on with it, --overwrite to replace it, "
            "or another --seed or --output_dir to keep it."
        )


def _check_writable(folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
        probe = folder / f".writable-{os.getpid()}"
        probe.write_text("a run was here\n")
        probe.unlink()
    except OSError as error:
        raise InputError(f"`output_dir` is {str(folder)!r}: {error.strerror}. Choose a folder to write to.") from error


def _plain(values: dict[str, Any]) -> dict[str, Any]:
    """Values as JSON reads them back."""

    def plain(value):
        if isinstance(value, Enum):
            return value.value
        return str(value) if isinstance(value, torch.dtype | Path) else value

    return json.loads(json.dumps({key: plain(value) for key, value in values.items()}, default=str))


def _version(name: str) -> str | None:
    try:
        return version(name)
    except Exception:
        return None
