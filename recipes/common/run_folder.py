"""The folder of a run: what it may hold before, what the run began with, and what of it is left to do."""

import hashlib
import json
import re
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
from trl_otb.comparison.storage import lock

from .arguments import RecipeArguments
from .errors import InputError, explained, input_errors
from .launching import command, is_main, print_once, processes, without_flags


CONFIGURATION, RESULT, STATE = "configuration.json", "result.json", "trainer_state.json"
COUNTS = "held_out_counts.json"  # written last, so that a checkpoint that has it is complete
PACKAGES = ("trl-otb", "trl", "transformers", "torch", "accelerate", "datasets", "peft")
# What a run leaves beside checkpoints, and `--overwrite` removes; the tokenizer's files are written anew
WRITTEN = re.compile(
    r"(configuration|result|held_out|trainer_state|config|generation_config|adapter_config)\.json|training\.png|"
    r"training_args\.bin|(model|adapter_model|pytorch_model)(-\d+-of-\d+)?\.(safetensors|bin)(\.index\.json)?"
)
MODEL_FILES = ("*.safetensors", "*.bin", "*config.json", "token*", "vocab*", "merges.txt", "*.jinja", "*.model")
# Options that decide what is written where, how often, and how far, but not which experiment this is.
NEUTRAL_STARTS = ("logging", "save", "eval_", "hub", "push_to_hub", "log_", "report", "dataloader_", "tqdm", "trackio")
NEUTRAL = set(
    "output_dir run_name disable_tqdm resume_from_checkpoint overwrite allow_changes traceback eval_only max_steps "
    "num_train_epochs num_completions_to_print per_device_eval_batch_size project local_rank ddp_timeout "
    "skip_memory_metrics restore_callback_states_from_checkpoint".split()
)


@dataclass
class RunFolder:
    """A run's folder, opened by [`open_run`]."""

    path: Path
    configuration: dict[str, Any]  # everything that was asked for, ready for JSON
    overwrite: bool  # whether `start` removes what an earlier run left
    argv: list[str]  # the command line, for the commands that go on
    checkpoint: Path | None = None  # what the run resumes from
    trained: Path | None = None  # the weights of a run that lacks only its last evaluation
    finished: str | None = None  # why there is nothing left to do
    lock: Any = None

    def take(self) -> None:
        """Keep other processes from writing into the folder as long as this one lives."""
        problem = f"`output_dir` is {str(self.path)!r}: it cannot be written to. Choose a folder to write to:"
        if is_main() and self.lock is None:
            if self.path.exists() and not self.path.is_dir():
                raise InputError(f"{problem} it is a file.")
            with explained(problem), input_errors(ValueError):
                self.lock = lock(self.path, again=True)
                tempfile.TemporaryFile(dir=self.path).close()

    def start(self, is_main_process: bool) -> None:
        """Write down what the run begins with. Only now may an earlier run's files go."""
        goes_on = self.checkpoint is not None and self.checkpoint.parent.resolve() == self.path.resolve()
        if not is_main_process or goes_on:
            return
        if self.overwrite:
            for old in checkpoints(self.path):
                shutil.rmtree(old)
            for old in self.path.iterdir():
                if WRITTEN.fullmatch(old.name):
                    old.unlink()
        (self.path / CONFIGURATION).write_text(json.dumps(self.configuration, indent=2, sort_keys=True) + "\n")

    def resume_command(self) -> str:
        """The command that goes on from the newest checkpoint, ready to be pasted."""
        kept = without_flags(self.argv, "resume_from_checkpoint", "overwrite")
        return command([*kept, "--resume_from_checkpoint", "latest"])


def open_run(settings: RecipeArguments, args: OTBGRPOConfig, model_args: ModelConfig, argv: list[str]) -> RunFolder:
    """
    Look at the folder of a run before anything is loaded. Nothing is changed there yet, but a new folder is made, and
    no other process can write into it from now on.

    Raises:
        InputError: The folder cannot be written to, is in use or holds another run, or a resumed run was begun
            differently.
    """
    folder = Path(args.output_dir)
    run = RunFolder(folder, configuration(settings, args, model_args), settings.overwrite, argv)
    if settings.eval_only:
        return run
    if args.max_steps == 0 or (args.max_steps < 0 and args.num_train_epochs == 0):
        run.finished = "Nothing left to do: `max_steps` is 0."
        return run
    if folder.exists():
        run.take()
    if args.resume_from_checkpoint is not None:
        _find_checkpoint(run, args, settings.allow_changes)
    else:
        _check_free(run)
    args.resume_from_checkpoint = None if run.checkpoint is None else str(run.checkpoint)
    run.take()
    model = Path(model_args.model_name_or_path or "")
    if run.overwrite and model.is_dir() and folder.resolve() in [model.resolve(), *model.resolve().parents]:
        raise InputError(
            f"`model_name_or_path` is {str(model)!r}, which lies in the folder that --overwrite replaces: choose "
            "another --output_dir."
        )
    foreign = {*folder.glob(f"{PREFIX_CHECKPOINT_DIR}-*")} - {*checkpoints(folder)}
    if foreign and args.save_total_limit:
        raise InputError(
            f"{min(foreign)} is no checkpoint of a run, and `save_total_limit` would delete it as one: move it to "
            "another folder."
        )
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
        "data_sha256": sha256(data) if data.is_file() else None,
        "model_sha256": _sha256_of_model(Path(model_args.model_name_or_path or "")),
        "versions": {name: found.get(name) for name in PACKAGES},
    }
    return json.loads(json.dumps(values, default=lambda value: value.value if isinstance(value, Enum) else str(value)))


def sha256(file: Path) -> str:
    with open(file, "rb") as opened:
        return hashlib.file_digest(opened, "sha256").hexdigest()


def _sha256_of_model(folder: Path) -> str | None:
    """Of a local model's files; of large ones, 64 parts, since training changes all weights."""
    if not (folder / "config.json").is_file() and not (folder / "adapter_config.json").is_file():
        return None
    found = hashlib.sha256()
    for file in sorted({file for pattern in MODEL_FILES for file in folder.glob(pattern)}):
        size = file.stat().st_size
        found.update(f"{file.name} {size}".encode())
        with open(file, "rb") as opened:
            for start in range(0, size, max(size // 64, 2**20)):
                opened.seek(start)
                found.update(opened.read(2**20))
    return found.hexdigest()


def differences(then: dict[str, Any], now: dict[str, Any]) -> list[str]:
    """Options that make another experiment, as `name was 1 and is 2`."""
    parts = ("recipe", "trainer", "model")
    changed = [change for part in parts for change in _changes(then.get(part, {}), now[part])]
    if then.get("processes") != now["processes"]:
        changed.append(f"there were {then.get('processes')} processes and now are {now['processes']}")
    files = {"data_sha256": "the data file has changed", "model_sha256": "the model's files have changed"}
    return changed + [what for key, what in files.items() if key in then and then[key] != now[key]]


def _changes(before: dict[str, Any], after: dict[str, Any]) -> list[str]:
    return [
        f"`{name}` was {before[name]!r} and is {after[name]!r}"
        for name in sorted(before.keys() & after.keys())
        if before[name] != after[name] and name not in NEUTRAL and not name.startswith(NEUTRAL_STARTS)
    ]


def checkpoints(folder: Path) -> list[Path]:
    """Those of a run, the newest last."""
    found = [path for path in folder.glob(f"{PREFIX_CHECKPOINT_DIR}-*") if re.fullmatch(r"\w+-\d+", path.name)]
    return sorted(found, key=lambda path: int(path.name.rpartition("-")[2]))


def latest_checkpoint(folder: Path) -> Path | None:
    """The newest complete checkpoint of a run. (`get_last_checkpoint` also takes one that was being written.)"""
    return next((path for path in reversed(checkpoints(folder)) if (path / COUNTS).is_file()), None)


def check_safetensors(folder: Path) -> None:
    """Raise an `InputError` if a .safetensors file in `folder` is cut short or is none."""
    for path in folder.glob("*.safetensors"):
        with _readable(path), safe_open(path, framework="pt"):
            pass


def _find_checkpoint(run: RunFolder, args: OTBGRPOConfig, allow_changes: bool) -> None:
    result = run.path / RESULT
    if args.resume_from_checkpoint == "latest":
        source, checkpoint = run.path, latest_checkpoint(run.path)
        if checkpoint is None and not result.is_file():
            raise InputError(f"`resume_from_checkpoint` is 'latest', and {run.path} holds no complete checkpoint.")
    else:
        checkpoint = Path(args.resume_from_checkpoint)
        source = checkpoint.parent
        _check_checkpoint(checkpoint)
        if source.resolve() != run.path.resolve():
            _check_free(run)
    _check_unchanged(source, run.configuration, allow_changes)
    step, whole = _progress(checkpoint or source, args)
    if whole and _steps_of_result(source) >= step:
        run.finished = f"Nothing left to do: {source} holds the result of the whole run. More --max_steps go on."
        return
    if checkpoint is None:
        raise InputError(
            f"{source} holds the result of {step} steps and no checkpoint to go on from, as after --save_strategy no: "
            "begin anew with --overwrite or another --output_dir."
        )
    _check_checkpoint(checkpoint)
    run.checkpoint = checkpoint
    if whole:
        is_saved = (source / STATE).is_file() and _progress(source, args)[0] == step
        run.trained = source if is_saved else checkpoint
        return print_once("Nothing left to train: what is missing is the last evaluation.")
    missing = [name for name, patterns in _needed().items() if not any(any(checkpoint.glob(p)) for p in patterns)]
    if missing:
        lacks = " and no ".join(missing)
        problem = f"{checkpoint} has no {lacks}, as after --save_only_model: training would go on with new ones"
        if not allow_changes:
            raise InputError(f"{problem}. Say --allow_changes for that, or resume from another checkpoint.")
        print_once(f"Note: {problem}.")


def _steps_of_result(folder: Path) -> int:
    path = folder / RESULT
    with _readable(path):
        return json.loads(path.read_text())["steps"] if path.is_file() else -1


def _needed() -> dict[str, list[str]]:
    """What training goes on with beside the weights, and the files of a checkpoint that may hold it."""
    ranks = [f"rng_state_{rank}.pth" for rank in range(processes())] if processes() > 1 else ["rng_state.pth"]
    zero = "global_step*"
    return {
        "state of the optimizer": ["optimizer.*", "optimizer_*", zero],
        "state of the schedule": ["scheduler.pt", zero],
        **{f"random numbers ({file})": [file] for file in ranks},
    }


def _check_checkpoint(checkpoint: Path) -> None:
    """A damaged file is better found before anything is loaded."""
    if not (checkpoint / COUNTS).is_file():
        raise InputError(
            f"`resume_from_checkpoint` is {str(checkpoint)!r}: no complete checkpoint of a recipe is there."
        )
    with _readable(checkpoint / STATE):
        json.loads((checkpoint / STATE).read_text())["global_step"]
    with _readable(checkpoint / COUNTS):
        json.loads((checkpoint / COUNTS).read_text())
    for path in [*checkpoint.glob("*.pt"), *checkpoint.glob("*.pth"), *checkpoint.glob("*.bin")]:
        with _readable(path):
            zipfile.ZipFile(path).close()
    check_safetensors(checkpoint)


def _progress(checkpoint: Path, args: OTBGRPOConfig) -> tuple[int, bool]:
    """The step that was reached, and whether it is the last one that is asked for."""
    with _readable(checkpoint / STATE):
        state = json.loads((checkpoint / STATE).read_text())
        step, steps, epochs = state["global_step"], state["max_steps"], state["num_train_epochs"]
    if args.max_steps > 0:
        return step, step >= args.max_steps
    return step, step >= steps and epochs >= args.num_train_epochs


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


def _check_free(run: RunFolder) -> None:
    folder = run.path
    weights = [file for pattern in ("*.safetensors", "pytorch_model*.bin") for file in folder.glob(pattern)]
    held = {"the result of a run": (folder / RESULT).is_file(), "checkpoints": checkpoints(folder), "a model": weights}
    for what in (what for what, is_there in held.items() if is_there):
        if not run.overwrite:
            raise InputError(
                f"{folder} holds {what}. Say --resume_from_checkpoint latest to go on with it, --overwrite to replace "
                "it, or another --seed or --output_dir to keep it."
            )
        if not (folder / CONFIGURATION).is_file():
            raise InputError(
                f"{folder} holds {what} that no run wrote, since {CONFIGURATION} is missing, and --overwrite replaces "
                "only runs: choose another --output_dir."
            )


def _readable(path: Path) -> AbstractContextManager[None]:
    """Around reading a file that may be damaged."""
    remedy = "Resume from an earlier checkpoint, or get the file again"
    return explained(f"{path} is damaged: it cannot be read. {remedy}:")
