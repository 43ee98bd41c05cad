"""
What the recipes share: the command line, checkpoints, stopping, problems of datasets and of reasoning-gym.

Copy it with a recipe. It needs `pip install '.[recipes]'`, and nothing else of this folder.
"""

import csv
import json
import logging
import os
import re
import sys
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from importlib import import_module
from math import isfinite
from pathlib import Path
from typing import Any

import math_verify
import torch
from datasets import Dataset, load_dataset
from datasets.exceptions import DatasetGenerationError
from filelock import FileLock, Timeout
from transformers import PrinterCallback, ProgressCallback, Trainer, TrainingArguments
from trl import TrlParser

from trl_otb.stopping import StopAfterStep, end_quietly_on_interrupt, latest_checkpoint


# Modules that options name as `module:name`: `recipes.toy`, and those of the current folder
sys.path += [str(Path(__file__).resolve().parent.parent), os.getcwd()]

LOCKS: list[FileLock] = []  # held until the process ends


def option(default: Any, help: str) -> Any:
    return field(default=default, metadata={"help": help})


# The command line


def parse(argv: list[str], kinds: tuple[type, ...], file: str, config: str | None = None) -> tuple:
    """
    The recipe's own options, the trainer's, TRL's ModelConfig if it is in `kinds`, and the checkpoint to resume from.

    Defaults are those of the YAML file `config` beside the script `file`, by default `<script>_cpu.yaml`, if it is
    there; `--config` names another. Wrong options end the run.
    """
    script, usage = Path(file), "%(prog)s [--config FILE.yaml] [--option value ...]"
    parser = TrlParser(kinds, prog=script.name, usage=usage, allow_abbrev=False)
    parser.set_defaults(baseline="value")  # as the README advises
    if not torch.accelerator.is_available():
        parser.set_defaults(use_cpu=True, bf16=False)
    defaults = script.with_name(config or f"{script.stem}_cpu.yaml")
    if "--config" not in argv and defaults.is_file():
        argv = ["--config", str(defaults), *argv]
    try:
        options, args, *model_args = parser.parse_args_and_config(argv)
        for name, value in {
            "learning_rate": [args.learning_rate],
            "reward_weights": getattr(args, "reward_weights", None),
        }.items():
            if not all(map(isfinite, value or ())):
                raise ValueError(f"--{name} is {value[0] if len(value) == 1 else value}: give finite numbers.")
        for name in ("dataset_options", "compare_baselines"):
            check_json(name, getattr(options, name, None))
        name = f"{args.baseline.replace(':', '.')}-seed{args.seed}"
        args.run_name = args.run_name or name
        if args.output_dir == "trainer_output":  # not given
            args.output_dir = f"runs/{script.stem}/{name}"
        if (model_args or [options])[0].model_name_or_path is None:
            raise ValueError("--model_name_or_path is missing: give a hub id or a folder.")
        checkpoint = None
        trains = not getattr(options, "compare_baselines", None)
        if trains or args.resume_from_checkpoint:
            checkpoint = find_checkpoint(args, trains)
        if trains:
            keep_to_this_run(Path(args.output_dir))
    except ZeroDivisionError:
        parser.error("--num_generations and batch sizes must be 1 or more.")
    except (ValueError, OSError) as error:
        parser.error(str(error))
    for of in model_args:
        loading = {"revision": of.model_revision, "attn_implementation": of.attn_implementation, "dtype": of.dtype}
        args.model_init_kwargs = {**loading, **(args.model_init_kwargs or {})}
    return options, args, *model_args, checkpoint


def check_json(name: str, text: str | None) -> None:
    try:
        json.loads(text or "{}")
    except ValueError as error:
        raise ValueError(f"--{name} is {text}, which is not JSON: {error}.") from error


def find_checkpoint(args: TrainingArguments, trains: bool = True) -> str | None:
    """The checkpoint to resume from, or to measure. A folder with a run is an error unless the run is to be resumed."""
    folder, asked = Path(args.output_dir), args.resume_from_checkpoint
    if asked is None:
        if any(folder.glob("checkpoint-*")) or (folder / "trainer_state.json").is_file():
            raise ValueError(
                f"{folder} holds a run already: continue it with --resume_from_checkpoint latest, or choose another "
                "--output_dir."
            )
        return None
    checkpoint = latest_checkpoint(folder) if asked.lower() in ("latest", "true") else asked
    if checkpoint is None or not Path(checkpoint).is_dir():
        raise ValueError(f"--resume_from_checkpoint is {asked}: there is no checkpoint in {checkpoint or folder}.")
    if trains and 0 < args.max_steps <= int(Path(checkpoint).name.rpartition("-")[2]):
        raise ValueError(f"{checkpoint} is the end of a run of {args.max_steps} steps: raise --max_steps to go on.")
    return checkpoint


def keep_to_this_run(folder: Path) -> None:
    """An error if a run that has not ended writes to `folder`; else none can begin there until this one has ended."""
    if os.environ.get("RANK", "0") == "0":
        folder.mkdir(parents=True, exist_ok=True)
        lock = FileLock(folder.resolve() / ".lock", is_singleton=True)  # so that this process may begin again
        try:
            lock.acquire(timeout=0)
        except Timeout:
            raise ValueError(f"{folder} is that of a run that has not ended: choose another --output_dir.") from None
        LOCKS.append(lock)


def load_object(name: str) -> Any:
    """What `module:attribute` names."""
    module, _, attribute = name.partition(":")
    try:
        return getattr(import_module(module), attribute)
    except SystemExit as error:
        raise ValueError(
            f"{name!r} ends the program when it is imported: put that under `if __name__ == '__main__':`."
        ) from error


def model_of(name: str) -> str:
    """The hub id or folder, also of `module:function`, whose function returns it."""
    return str(load_object(name)()) if ":" in name else name


# Around training


class ShortProgress(ProgressCallback):
    """The progress bar with the reward beside it; trainer_state.json has the whole log."""

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
        if self.training_bar is not None:
            shown = {key: f"{float(logs[key]):.3g}" for key in ("reward", "eval_reward") if key in logs}
            self.training_bar.set_postfix(shown)


def quieten() -> None:
    """Libraries' warnings to each other are not shown, nor a traceback after Ctrl-C; trl_otb's notes are."""
    warnings.filterwarnings("ignore", category=FutureWarning)
    logging.basicConfig(format="%(message)s")
    logging.getLogger("trl_otb").setLevel(logging.INFO)
    end_quietly_on_interrupt()


def prepare(trainer: Trainer) -> None:
    """Ctrl-C and SIGTERM stop after a step, and no line is printed per log."""
    trainer.remove_callback(PrinterCallback)
    if trainer.pop_callback(ProgressCallback):
        trainer.add_callback(ShortProgress())
    trainer.add_callback(StopAfterStep())


# Problems


@dataclass
class ProblemOptions:
    """Options of a recipe: which problems it loads, and further rewards."""

    dataset_name: str = option("reasoning_gym:chain_sum", "`reasoning_gym:TASK`, a hub dataset or a file.")
    dataset_options: str = option("{}", "Options of the reasoning-gym task, as JSON.")
    dataset_config: str | None = option(None, "Configuration of the hub dataset.")
    dataset_split: str = option("train", "Split of the hub dataset.")
    prompt_column: str | None = option(None, "Column of the problem; by default prompt, question or problem.")
    answer_column: str | None = option(None, "Column of the answer; by default answer, solution or target.")
    num_train_problems: int | None = option(None, "Training problems; by default 20,000 of a task, all of a dataset.")
    num_held_out_problems: int = option(200, "Held-out problems; of a dataset at most a fifth.")
    instruction: str = option(r"Put your final answer within \boxed{}.", "Appended to every problem.")
    reward_funcs: list[str] | None = option(None, "More rewards, as `module:function`.")
    compare_baselines: str | None = option(
        None, "Train nothing; print what `trl_otb.compare_baselines` finds. Its options as JSON; {} for its defaults."
    )


def messages(question: str | list[dict[str, str]], instruction: str) -> list[dict[str, str]]:
    """The question as a conversation that ends with the instruction."""
    *before, last = question if isinstance(question, list) else [{"role": "user", "content": str(question)}]
    return [*before, {**last, "content": f"{last['content']}\n{instruction}" if instruction else last["content"]}]


def read_problems(options: ProblemOptions) -> Dataset:
    """The rows of a file or hub dataset, each question once, with the columns `question`, `answer` and `solution`."""
    name, formats = options.dataset_name, {".jsonl": "json", ".json": "json", ".csv": "csv", ".parquet": "parquet"}
    if file := formats.get(Path(name).suffix):
        unused = {"dataset_split": "train", "dataset_config": None}
        for option_of_hub, default in unused.items():
            if (value := getattr(options, option_of_hub)) != default:
                raise ValueError(f"--{option_of_hub} is {value}, and {name} is a file, which has none.")
        if file == "csv" and Path(name).is_file():
            check_csv(Path(name))
        try:
            data = load_dataset(file, data_files=name, split="train")
        except (StopIteration, ValueError, DatasetGenerationError) as error:
            raise ValueError(f"{name} cannot be read: {error.__cause__ or error or 'it is empty'}.") from None
        if len(data) == 0:
            raise ValueError(f"{name} has no rows.")
    else:
        data = load_dataset(name, options.dataset_config, split=options.dataset_split)
    asked = find_column(data, options.prompt_column, "prompt", "question", "problem")
    wanted = find_column(data, options.answer_column, "answer", "solution", "target")

    def problem(row: dict[str, Any], i: int) -> dict[str, Any]:
        answer = str(row[wanted]).split("####")[-1].strip()  # as GSM8K marks the final answer
        # math_verify reads a formula in $…$ whole; of words it would read letters as factors
        solution = answer if "$" in answer or re.match(r"[^\W\d_]{2}", answer) else f"${answer}$"
        if not row[asked] or not answer or isinstance(row[wanted], dict | list) or not math_verify.parse(solution):
            raise ValueError(
                f"row {i} of {name} has {row[asked]!r} in {asked!r} and {row[wanted]!r} in {wanted!r}: remove it, or "
                "give a question, and a number or a formula in $…$."
            )
        return {"question": row[asked], "answer": answer, "solution": solution}

    data = data.map(problem, with_indices=True)
    data = data.select(sorted({str(question): i for i, question in enumerate(data["question"])}.values()))
    if len(data) < 2:
        raise ValueError(f"{name} has a single problem: give 2 or more, as one of them is held out.")
    return data


def check_csv(path: Path) -> None:
    """A `ValueError` if a row has more or fewer fields than the first: a reader would shift them without a word."""
    csv.field_size_limit(2**31 - 1)  # of a solution; the usual limit is 128 kB
    with path.open(newline="", encoding="utf-8") as file:
        rows = csv.reader(file)
        header = next(rows, [])
        for row in rows:
            if row and len(row) != len(header):
                raise ValueError(
                    f"{path}, line {rows.line_num}, has {len(row)} fields, and the first line {len(header)}: give "
                    f"each column a field, and put a text that holds a comma in quotes. The row begins with "
                    f"{','.join(row)[:60]!r}."
                )


def find_column(data: Dataset, chosen: str | None, *usual: str) -> str:
    for name in [chosen] if chosen else usual:
        if name in data.column_names:
            return name
    wanted = repr(chosen) if chosen else ", ".join(usual)
    raise ValueError(
        f"the dataset has the columns {', '.join(data.column_names)}, and none of {wanted}: "
        "name yours with --prompt_column and --answer_column."
    )


def generate_problems(options: ProblemOptions, seed: int) -> tuple[Dataset, Dataset, Callable[..., list[float]]]:
    """
    Problems of reasoning-gym to train on, held-out problems, which are the same for every `seed`, and the reward: by
    the task's own grading, since some tasks have several right answers. No question is in both.
    """
    import reasoning_gym

    for name in ("prompt_column", "answer_column", "dataset_config"):
        if (value := getattr(options, name, None)) is not None:
            raise ValueError(f"--{name} is {value}, and {options.dataset_name} makes its problems: leave it out.")
    sizes = {10**9: options.num_held_out_problems, 10**6 * (seed + 1): options.num_train_problems or 20_000}
    task, chosen = options.dataset_name.partition(":")[2], json.loads(options.dataset_options)
    held_out, train = (reasoning_gym.create_dataset(task, size=n, seed=s, **chosen) for s, n in sizes.items())
    entries, rows = [*held_out, *train], []
    for i, (question, answer) in enumerate((entry["question"], str(entry["answer"])) for entry in entries):
        prompt = messages(question, options.instruction)
        rows.append({"prompt": prompt, "question": question, "answer": answer, "entry": i})
    asked = {row["question"]: row for row in rows[: len(held_out)]}
    others = [row for row in rows[len(held_out) :] if row["question"] not in asked]

    def accuracy(completions: list[Any], entry: list[int], **kwargs: Any) -> list[float]:
        return [is_solved(final_answer(c), entries[i]) for c, i in zip(completions, entry, strict=True)]

    def is_solved(answer: str, entry: dict) -> float:
        try:
            return float(train.score_answer(answer, entry) > 1 - 1e-6)  # some tasks give partial scores
        except Exception:  # some tasks fail on answers of an unexpected form
            return 0.0

    return Dataset.from_list(others), Dataset.from_list([*asked.values()]), accuracy


def final_answer(completion: str | list[dict]) -> str:
    r"""The last `<answer>…</answer>`, else the last `\boxed{…}`, else the text after the last `=`, else all of it."""
    text = completion if isinstance(completion, str) else completion[-1].get("content") or ""
    for pattern in (r"<answer>(.*?)</answer>", r"\\boxed\{((?:[^{}]|\{[^{}]*\})*)\}", "=([^=]*)$"):
        if found := re.findall(pattern, text, flags=re.DOTALL):
            return found[-1].strip()
    return text.strip()
