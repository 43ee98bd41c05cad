"""The folder of a run: what it may hold before, what the run began with, and what of it is left to do."""

import hashlib
import json
import shutil
import tempfile
import zipfile
from contextlib import AbstractContextManager
from dataclasses import dataclass
from enum import Enum
from importlib.metadata import distributions
from pathlib import Path
from typing import Any

from safetensors import safe_open
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR
from trl import ModelConfig

from trl_otb import OTBGRPOConfig

from .arguments import RecipeArguments
from .errors import InputError, explained
from .launching import command, print_once, processes, without_flags


CONFIGURATION, RESULT = "configuration.json", "result.json"
COUNTS = "held_out_counts.json"  # written last, so that a checkpoint that has it is complete
PACKAGES = ("trl-otb", "trl", "transformers", "torch", "accelerate", "datasets", "peft")
# What a run leaves behind, by what a message calls it; `--overwrite` removes it.
LEFT_BEHIND = {
    "the result of a run": [RESULT],
    "checkpoints": [f"{PREFIX_CHECKPOINT_DIR}-*"],
    "a model": ["*.safetensors", "pytorch_model*.bin"],
}
ALSO_REMOVED = [CONFIGURATION, "*.safetensors.index.json", "training.png", "held_out.json", "trainer_state.json"]
# Options that decide what is written where, how often, and how far, but not which experiment this is.
NEUTRAL_STARTS = ("logging", "save", "eval_", "hub", "push_to_hub", "log_", "report", "dataloader_", "tqdm", "trackio")
NEUTRAL = set(
    "output_dir run_name disable_tqdm resume_from_checkpoint overwrite allow_changes traceback eval_only max_steps "
    "num_train_epochs num_completions_to_print per_device_eval_batch_size project local_rank ddp_timeout do_train "
    "do_eval do_predict skip_memory_metrics include_for_metrics load_best_model_at_end metric_for_best_model "
    "greater_is_better restore_callback_states_from_checkpoint enable_jit_checkpoint".split()
)


@dataclass
class RunFolder:
    """A run's folder, opened by [`open_run`]."""

    path: Path
    configuration: dict[str, Any]  # everything that was asked for, ready for JSON
    overwrite: bool  # whether `start` removes what an earlier run left
    argv: list[str]  # the command line, for the commands that go on
    checkpoint: Path | None = None  # what the run resumes from
    finished: str | None = None  # why there is nothing left to do

    def start(self, is_main_process: bool) -> None:
        """Write down what the run begins with. Only now may an earlier run's files go."""
        if not is_main_process or self.checkpoint is not None:
            return
        if self.overwrite:
            for pattern in sum(LEFT_BEHIND.values(), ALSO_REMOVED):
                for old in self.path.glob(pattern):
                    shutil.rmtree(old) if old.is_dir() else old.unlink()
        (self.path / CONFIGURATION).write_text(json.dumps(self.configuration, indent=2, sort_keys=True) + "\n")

    def resume_command(self) -> str:
        """The command that goes on from the newest checkpoint, ready to be pasted."""
        kept = without_flags(self.argv, "resume_from_checkpoint", "overwrite")
        return command([*kept, "--resume_from_checkpoint", "latest"])

    def evaluation_command(self, model: Path) -> str:
        """The command that measures the held-out accuracy of a model that this run saved."""
        kept = without_flags(self.argv, "resume_from_checkpoint", "model_name_or_path", "overwrite")
        return command([*kept, "--eval_only", "--model_name_or_path", str(model)])


def open_run(settings: RecipeArguments, args: OTBGRPOConfig, model_args: ModelConfig, argv: list[str]) -> RunFolder:
    """
    Look at the folder of a run before anything is loaded. Nothing is changed there yet, but a new folder is made.

    Raises:
        InputError: The folder cannot be written to or holds another run, or a resumed run was begun differently.
    """
    folder = Path(args.output_dir)
    run = RunFolder(folder, configuration(settings, args, model_args), settings.overwrite, argv)
    if args.max_steps == 0 or (args.max_steps < 0 and args.num_train_epochs == 0):
        run.finished = "Nothing left to do: `max_steps` is 0."
    elif args.resume_from_checkpoint is not None and not settings.eval_only:
        _find_checkpoint(run, args, settings.allow_changes)
    elif not settings.eval_only:
        _check_free(folder, settings.overwrite)
    args.resume_from_checkpoint = None if run.checkpoint is None else str(run.checkpoint)
    if run.finished is None and not settings.eval_only:
        with explained(f"`output_dir` is {str(folder)!r}: it cannot be written to. Choose a folder to write to:"):
            folder.mkdir(parents=True, exist_ok=True)
            tempfile.TemporaryFile(dir=folder).close()
    return run


def configuration(settings: RecipeArguments, args: OTBGRPOConfig, model_args: ModelConfig) -> dict[str, Any]:
    """Every option of a run, and what it ran on, as JSON reads it back."""
    data = Path(settings.dataset_name)
    found = {package.name: package.version for package in reversed(list(distributions()))}  # the first on the path
    values = {
        "recipe": vars(settings),
        "trainer": args.to_dict(),
        "model": vars(model_args),
        "processes": processes(),
        "data_sha256": hashlib.sha256(data.read_bytes()).hexdigest() if data.is_file() else None,
        "versions": {name: found.get(name) for name in PACKAGES},
    }
    return json.loads(json.dumps(values, default=lambda value: value.value if isinstance(value, Enum) else str(value)))


def differences(then: dict[str, Any], now: dict[str, Any]) -> list[str]:
    """Options that make another experiment, as `name was 1 and is 2`."""
    parts = ("recipe", "trainer", "model")
    changed = [change for part in parts for change in _changes(then.get(part, {}), now[part])]
    if then.get("processes") != now["processes"]:
        changed.append(f"there were {then.get('processes')} processes and now are {now['processes']}")
    if then.get("data_sha256") != now["data_sha256"]:
        changed.append("the data file has changed")
    return changed


def _changes(before: dict[str, Any], after: dict[str, Any]) -> list[str]:
    return [
        f"`{name}` was {before[name]!r} and is {after[name]!r}"
        for name in sorted(before.keys() & after.keys())
        if before[name] != after[name] and name not in NEUTRAL and not name.startswith(NEUTRAL_STARTS)
    ]


def latest_checkpoint(folder: Path) -> Path | None:
    """The newest complete checkpoint of a run. (`get_last_checkpoint` also takes one that was being written.)"""
    complete = [path.parent for path in folder.glob(f"{PREFIX_CHECKPOINT_DIR}-*/{COUNTS}")]
    return max(complete, key=lambda path: int(path.name.removeprefix(f"{PREFIX_CHECKPOINT_DIR}-")), default=None)


def check_safetensors(folder: Path) -> None:
    """Raise an `InputError` if a .safetensors file in `folder` is cut short or is none."""
    for path in folder.glob("*.safetensors"):
        with _readable(path), safe_open(path, framework="pt"):
            pass


def _find_checkpoint(run: RunFolder, args: OTBGRPOConfig, allow_changes: bool) -> None:
    if args.resume_from_checkpoint == "latest":
        source, checkpoint = run.path, latest_checkpoint(run.path)
        if checkpoint is None and not (run.path / RESULT).is_file():
            raise InputError(f"`resume_from_checkpoint` is 'latest', and {run.path} holds no complete checkpoint.")
    else:
        checkpoint = Path(args.resume_from_checkpoint)
        source = checkpoint.parent
        _check_checkpoint(checkpoint)
        if source.resolve() != run.path.resolve():
            _check_free(run.path, run.overwrite)
    _check_unchanged(source, run.configuration, allow_changes)
    if checkpoint is not None and not _is_trained_to_the_end(checkpoint, args):
        run.checkpoint = checkpoint
        _check_checkpoint(checkpoint)
    elif (source / RESULT).is_file():
        run.finished = f"Nothing left to do: {source} holds the result of the whole run. More --max_steps go on."
    else:
        run.finished = (
            f"Nothing left to train: {checkpoint} is the last step. What it lacks is an evaluation: "
            + run.evaluation_command(checkpoint)
        )


def _check_checkpoint(checkpoint: Path) -> None:
    """A damaged file is better found before anything is loaded."""
    if not (checkpoint / COUNTS).is_file():
        raise InputError(
            f"`resume_from_checkpoint` is {str(checkpoint)!r}: no complete checkpoint of a recipe is there."
        )
    _progress(checkpoint)
    with _readable(checkpoint / COUNTS):
        json.loads((checkpoint / COUNTS).read_text())
    for path in [*checkpoint.glob("*.pt"), *checkpoint.glob("*.pth"), *checkpoint.glob("*.bin")]:
        with _readable(path):
            zipfile.ZipFile(path).close()
    check_safetensors(checkpoint)


def _progress(checkpoint: Path) -> tuple[int, int, int]:
    """The step that was reached, the steps of the run, and its epochs."""
    with _readable(checkpoint / "trainer_state.json"):
        state = json.loads((checkpoint / "trainer_state.json").read_text())
        return state["global_step"], state["max_steps"], state["num_train_epochs"]


def _is_trained_to_the_end(checkpoint: Path, args: OTBGRPOConfig) -> bool:
    step, steps, epochs = _progress(checkpoint)
    if args.max_steps > 0:
        return step >= args.max_steps
    return step >= steps and epochs >= args.num_train_epochs


def _check_unchanged(folder: Path, now: dict[str, Any], allow_changes: bool) -> None:
    path = folder / CONFIGURATION
    if not path.is_file():
        return print_once(f"Note: {path} is missing, so nothing says whether the options are those it began with.")
    with explained(f"{path} cannot be read. Remove it to resume without a comparison:"):
        then = json.loads(path.read_text())
    changed = differences(then, now)
    if changed and not allow_changes:
        raise InputError(
            f"{folder} began with other options: {'; '.join(changed)}. Resume with the same options, say "
            "--allow_changes, or start a new run with another --output_dir."
        )
    changed += _changes(then["versions"], now["versions"])
    before, after = (options["trainer"].get("max_steps") for options in (then, now))
    if before != after and not str(now["trainer"].get("lr_scheduler_type")).startswith("constant"):
        changed.append(f"max_steps was {before} and is {after}, which stretches the learning rate's schedule")
    for change in changed:
        print_once(f"Note: {change}.")


def _check_free(folder: Path, overwrite: bool) -> None:
    for held, patterns in LEFT_BEHIND.items():
        if not overwrite and any(any(folder.glob(pattern)) for pattern in patterns):
            raise InputError(
                f"{folder} holds {held}. Say --resume_from_checkpoint latest to go on with it, --overwrite to replace "
                "it, or another --seed or --output_dir to keep it."
            )


def _readable(path: Path) -> AbstractContextManager[None]:
    """Around reading a file that may be damaged."""
    remedy = "Resume from an earlier checkpoint, or get the file again"
    return explained(f"{path} is damaged: it cannot be read. {remedy}:")
