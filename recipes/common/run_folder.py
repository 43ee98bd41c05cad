"""The folder of a run: what it may already hold, the options the run started with, and what is left to do."""

import hashlib
import json
import re
import shutil
import zipfile
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
from .errors import InputError, explained, input_errors, rank
from .launching import command, print_once, processes, without_flags


CONFIGURATION, RESULT, STATE = "configuration.json", "result.json", "trainer_state.json"
COUNTS = "held_out_counts.json"  # written last, so that a checkpoint that has it is complete
PACKAGES = ("trl-otb", "trl", "transformers", "torch", "accelerate", "datasets", "peft")
# The files of a run, which `--overwrite` removes; the tokenizer's files are simply replaced
WRITTEN = re.compile(
    r"checkpoint-\d+|(configuration|result|held_out(_counts)?|trainer_state|config|generation_config|adapter_config)\.json|"
    r"training\.png|training_args\.bin|(model|adapter_model|pytorch_model)(-\d+-of-\d+)?\.(safetensors|bin)(\.index\.json)?"
)
# Options that decide what is written, where, how often, and when to stop, but do not change the experiment.
NEUTRAL_STARTS = ("logging", "save", "eval_", "hub", "push_to_hub", "log_", "report", "dataloader_", "tqdm", "trackio")
NEUTRAL = set(
    "output_dir run_name disable_tqdm resume_from_checkpoint overwrite allow_changes traceback eval_only max_steps "
    "num_train_epochs num_completions_to_print per_device_eval_batch_size project local_rank ddp_timeout "
    "skip_memory_metrics restore_callback_states_from_checkpoint".split()
)


@dataclass
class RunFolder:
    """The folder of a run, from [`open_run`]."""

    path: Path
    configuration: dict[str, Any]  # all options, ready for JSON
    overwrite: bool  # whether `start` removes an earlier run
    argv: list[str]  # the command line, for the command that resumes
    checkpoint: Path | None = None  # the checkpoint to resume from
    trained: Path | None = None  # the weights, if only the last evaluation is missing
    finished: str | None = None  # the reason, if nothing is left to do
    lock: Any = None

    def take(self) -> None:
        """Lock the folder against other processes for the lifetime of this one."""
        if rank() == 0 and self.lock is None:
            with input_errors(ValueError):
                self.lock = lock(self.path, again=True)

    def start(self, is_main_process: bool) -> None:
        """Write the configuration, and only now remove an earlier run's files."""
        continues = self.checkpoint is not None and self.checkpoint.parent.resolve() == self.path.resolve()
        if not is_main_process or continues:
            return
        if self.overwrite:
            for old in (path for path in self.path.iterdir() if WRITTEN.fullmatch(path.name)):
                shutil.rmtree(old) if old.is_dir() else old.unlink()
        (self.path / CONFIGURATION).write_text(json.dumps(self.configuration, indent=2, sort_keys=True) + "\n")

    def resume_command(self) -> str:
        """The command that resumes from the newest checkpoint."""
        kept = without_flags(self.argv, "resume_from_checkpoint", "overwrite")
        return command([*kept, "--resume_from_checkpoint", "latest"])


def open_run(settings: RecipeArguments, args: OTBGRPOConfig, model_args: ModelConfig, argv: list[str]) -> RunFolder:
    """Lock and check a run's folder before anything is loaded, without changes; an `InputError` if it is unusable."""
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
    model = Path(model_args.model_name_or_path or "absent")
    if run.overwrite and model.is_dir() and model.resolve().is_relative_to(folder.resolve()):
        raise InputError(f"`model_name_or_path` is {str(model)!r}, which --overwrite would remove: move it first.")
    foreign = {*folder.glob(f"{PREFIX_CHECKPOINT_DIR}-*")} - {*checkpoints(folder)}
    if foreign and args.save_total_limit:
        raise InputError(f"{min(foreign)} is not a checkpoint, and `save_total_limit` would delete it: move it away.")
    return run


def configuration(settings: RecipeArguments, args: OTBGRPOConfig, model_args: ModelConfig) -> dict[str, Any]:
    """Every option of a run, its data, model and versions, as JSON would read them back."""
    data, model = Path(settings.dataset_name), Path(model_args.model_name_or_path or "absent")
    weights = {file.name: sha256(file, last=2**26) for file in model.glob("*.safetensors")}  # training changes all
    found = {package.name: package.version for package in reversed(list(distributions()))}  # the first on the path
    values = {
        "recipe": vars(settings),
        "trainer": args.to_dict(),
        "model": vars(model_args),
        "processes": processes(),
        "data_sha256": sha256(data) if data.is_file() else None,
        "model_sha256": weights or None,
        "versions": {name: found.get(name) for name in PACKAGES},
    }
    return json.loads(json.dumps(values, default=lambda value: value.value if isinstance(value, Enum) else str(value)))


def sha256(file: Path, last: int | None = None) -> str:
    """The hash of a file, or of its last bytes."""
    with open(file, "rb") as opened:
        opened.seek(max(0, file.stat().st_size - last) if last else 0)
        return hashlib.file_digest(opened, "sha256").hexdigest()


def differences(then: dict[str, Any], now: dict[str, Any]) -> list[str]:
    """The options that differ and change the experiment, as `name was 1 and is 2`."""
    parts = ("recipe", "trainer", "model")
    changed = [change for part in parts for change in _changes(then.get(part, {}), now[part])]
    counts = [name for name in ("processes", "steps") if then.get(name) != now.get(name)]
    changed += [f"there were {then.get(name)} {name} and now are {now[name]}" for name in counts]
    files = {"data_sha256": "the data file has changed", "model_sha256": "the model's weights have changed"}
    return changed + [what for key, what in files.items() if key in then and then[key] != now[key]]


def _changes(before: dict[str, Any], after: dict[str, Any]) -> list[str]:
    return [
        f"`{name}` was {before[name]!r} and is {after[name]!r}"
        for name in sorted(before.keys() & after.keys())
        if before[name] != after[name] and name not in NEUTRAL and not name.startswith(NEUTRAL_STARTS)
    ]


def checkpoints(folder: Path) -> list[Path]:
    """The checkpoints of a run, the newest last."""
    found = [path for path in folder.glob(f"{PREFIX_CHECKPOINT_DIR}-*") if re.fullmatch(r"\w+-\d+", path.name)]
    return sorted(found, key=lambda path: int(path.name.rpartition("-")[2]))


def latest_checkpoint(folder: Path) -> Path | None:
    """The newest complete checkpoint of a run. (`get_last_checkpoint` would also return an unfinished one.)"""
    return next((path for path in reversed(checkpoints(folder)) if (path / COUNTS).is_file()), None)


def check_safetensors(folder: Path) -> None:
    """Raise an `InputError` if a .safetensors file in `folder` is truncated or not in that format."""
    for path in folder.glob("*.safetensors"):
        with _readable(path), safe_open(path, framework="pt"):
            pass


def _find_checkpoint(run: RunFolder, args: OTBGRPOConfig, allow_changes: bool) -> None:
    asked = args.resume_from_checkpoint
    source = run.path if asked == "latest" else Path(asked).parent
    checkpoint = latest_checkpoint(source) if asked == "latest" else Path(asked)
    if checkpoint is None and (source / COUNTS).is_file():
        checkpoint = source  # after --save_strategy no
    has_result = (source / RESULT).is_file()
    if (checkpoint is None and not has_result) or (checkpoint is not None and not (checkpoint / COUNTS).is_file()):
        where = checkpoint or source
        raise InputError(f"`resume_from_checkpoint` is {asked!r}, and {where} holds no complete checkpoint.")
    if source.resolve() != run.path.resolve():
        _check_free(run)
    _check_unchanged(source, run.configuration, allow_changes)
    step, whole = _progress(checkpoint or source, args)
    if whole and has_result and _read(source / RESULT, "steps") >= [step]:
        held = f"{source} holds the result of the whole run"
        run.finished = f"Nothing left to do: {held}. Increase --max_steps to continue."
        return
    if checkpoint in (None, source) and not whole:
        held = f"the model of {step} steps and no checkpoint to resume from, as after --save_strategy no"
        raise InputError(f"{source} holds {held}: start over with --overwrite or another --output_dir.")
    _check_checkpoint(checkpoint, whole, allow_changes)
    run.checkpoint = checkpoint
    if whole:
        is_saved = (source / STATE).is_file() and _progress(source, args)[0] == step
        best = _read(checkpoint / STATE, "best_model_checkpoint")[0] if args.load_best_model_at_end else None
        run.trained = source if is_saved else Path(best or checkpoint)
        print_once("Nothing left to train: only the last evaluation is missing.")


def _check_checkpoint(checkpoint: Path, whole: bool, allow_changes: bool) -> None:
    """Find damaged files, and files that training needs and are missing, before anything is loaded."""
    _read(checkpoint / COUNTS)
    for path in [*checkpoint.glob("*.pt"), *checkpoint.glob("*.pth"), *checkpoint.glob("*.bin")]:
        with _readable(path):
            zipfile.ZipFile(path).close()
    check_safetensors(checkpoint)
    needed = {
        "state of the optimizer": r"optimizer.*|global_step\d+",  # ZeRO's holds the schedule too
        "state of the schedule": r"scheduler\.pt|global_step\d+",
        "random numbers": f"rng_state_{rank()}.pth" if processes() > 1 else "rng_state.pth",
    }
    names = [path.name for path in checkpoint.iterdir()]
    missing = [what for what, files in needed.items() if not any(re.fullmatch(files, name) for name in names)]
    if not missing or whole:
        return
    lacks = " and no ".join(missing)
    problem = f"{checkpoint} has no {lacks}, as after --save_only_model: training would start with new ones"
    if not allow_changes:
        raise InputError(f"{problem}. Accept that with --allow_changes, or resume from another checkpoint.")
    print_once(f"Note: {problem}.")


def _progress(checkpoint: Path, args: OTBGRPOConfig) -> tuple[int, bool]:
    """The step reached, and whether it is the last one requested."""
    step, steps, epochs = _read(checkpoint / STATE, "global_step", "max_steps", "num_train_epochs")
    if args.max_steps > 0:
        return step, step >= args.max_steps
    return step, step >= steps and epochs >= args.num_train_epochs


def _check_unchanged(folder: Path, now: dict[str, Any], allow_changes: bool) -> None:
    path = folder / CONFIGURATION
    if not path.is_file():
        return print_once(f"Note: {path} is missing, so options cannot be compared with the original ones.")
    with explained(f"{path} cannot be read. Remove it to resume without comparing options:"):
        then = json.loads(path.read_text())
    changed = differences(then, now)
    if changed and not allow_changes:
        remedy = "Resume with the same options, add --allow_changes, or start a new run with another --output_dir"
        raise InputError(f"{folder} started with other options: {'; '.join(changed)}. {remedy}.")
    changed += _changes(then["versions"], now["versions"])
    before, after = (options["trainer"].get("max_steps") for options in (then, now))
    if before != after and not str(now["trainer"].get("lr_scheduler_type")).startswith("constant"):
        changed.append(f"max_steps was {before} and is {after}, which stretches the learning rate's schedule")
    for change in changed:
        print_once(f"Note: {change}.")


def _check_free(run: RunFolder) -> None:
    folder = run.path
    weights = [file for pattern in ("*.safetensors", "pytorch_model*.bin") for file in folder.glob(pattern)]
    # A checkpoint that was being saved when its run was killed is not worth keeping
    saved = latest_checkpoint(folder) if (folder / CONFIGURATION).is_file() else checkpoints(folder)
    held = {"the result of a run": (folder / RESULT).is_file(), "checkpoints": saved, "a model": weights}
    what = next((what for what, is_there in held.items() if is_there), None)
    if what and not run.overwrite:
        ways = "--overwrite to replace it, or another --seed or --output_dir to keep it"
        raise InputError(f"{folder} holds {what}. Use --resume_from_checkpoint latest to continue it, {ways}.")
    if what and not (folder / CONFIGURATION).is_file():
        raise InputError(f"{folder} holds {what} but no {CONFIGURATION}, so no run wrote it: choose another folder.")


def _read(path: Path, *keys: str) -> list[Any]:
    with _readable(path):
        values = json.loads(path.read_text())
        return [values[key] for key in keys]


def _readable(path: Path):
    """Wraps reading a file that may be damaged."""
    remedy = "Resume from an earlier checkpoint, or restore the file"
    return explained(f"{path} is damaged: it cannot be read. {remedy}:")
