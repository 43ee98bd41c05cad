"""Loads verifiable problems and splits off the held-out ones."""

import difflib
import glob
import json
import math
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from decimal import Decimal
from pathlib import Path
from typing import Any

from datasets import Dataset, Value, config, load_dataset
from pandas.errors import ParserWarning

from .arguments import RecipeArguments
from .checks import FILE_FORMATS, REASONING_GYM
from .errors import InputError, explained
from .grading import grade_mathematics
from .launching import print_once
from .run_folder import sha256


PROMPT_COLUMNS = ("prompt", "question", "problem")
ANSWER_COLUMNS = ("answer", "solution", "target")
# Columns with a special meaning for the recipes or TRL.
RESERVED = set(
    "prompt prompts question answer entry before held_out completion completions completion_ids image images tools "
    "chat_template_kwargs environment environments trainer_state log_extra log_metric".split()
)


@dataclass
class Problems:
    """
    Training problems and held-out problems: datasets with columns `question` and `answer`, text or numbers, which are
    converted to text. Further columns: `entry`, the index by which the grader of a reasoning-gym task finds the
    problem; `before`, the messages before a conversation's question; and whatever else a reward reads. Raises an
    `InputError` if a column is missing.
    """

    train: Dataset
    held_out: Dataset
    grade: Callable[[str, str, int | None], float] = grade_mathematics  # of an answer found, `answer` and `entry`
    name: str = "data without a name"  # in messages
    duplicates: int = 0  # rows dropped because an earlier row asks the same question

    def __post_init__(self):
        self.train, self.held_out = (_in_text(data, self.name) for data in (self.train, self.held_out))

    def __str__(self):
        dropped = f"; {self.duplicates} duplicates dropped" if self.duplicates else ""
        return f"{len(self.train):,} problems to train on, {len(self.held_out):,} held out{dropped}"


def load_problems(settings: RecipeArguments, seed: int = 0) -> Problems:
    """
    Load the problems named by the options and hold some out, at most a fifth of a file or hub dataset.

    The held-out problems do not depend on `seed`, so runs can be compared. `seed` chooses the training problems that
    reasoning-gym generates. Raises an `InputError` if there are no such problems.
    """
    name = settings.dataset_name
    if name.startswith(REASONING_GYM):
        return _reasoning_gym(settings, seed)
    if settings.dataset_options:
        raise InputError(f"`dataset_options` is for reasoning-gym tasks, and `dataset_name` is {name!r}.")
    rows = _rows(_load(settings), settings)
    different = {}  # the first row of every question, ignoring whitespace
    for row in rows:
        different.setdefault((" ".join(row["question"].split()), json.dumps(row["before"])), row)
    if len(different) < 2:
        problem = f"{name} has {len(rows)} rows, but only {len(different)} different problem"
        raise InputError(f"{problem}: at least 2 are needed, one to train on and one to hold out.")
    held_out = max(1, min(settings.num_held_out_problems, len(different) // 5))
    train = min(settings.num_train_problems or len(different), len(different) - held_out)
    data = Dataset.from_list(list(different.values())).train_test_split(train_size=train, test_size=held_out, seed=0)
    return Problems(data["train"], data["test"], name=name, duplicates=len(rows) - len(different))


def _rows(data: Dataset, settings: RecipeArguments) -> list[dict[str, Any]]:
    name = settings.dataset_name
    prompts = _column(data, settings.prompt_column, PROMPT_COLUMNS, "prompt_column")
    answers = _column(data, settings.answer_column, ANSWER_COLUMNS, "answer_column")
    others = [column for column in data.column_names if column not in RESERVED | {prompts, answers}]
    if left_out := [column for column in data.column_names if column not in {prompts, answers, *others}]:
        print_once(f"Note: rewards do not get the columns {', '.join(left_out)}: TRL reserves these names.")
    rows = []
    for i, row in enumerate(data):
        before, question = _question(row[prompts], prompts, i, name)
        answer = _text(row[answers], answers, i, name, "--answer_column")
        answer = _text(answer.split("####")[-1].strip(), answers, i, name)  # GSM8K marks the final answer so
        own = {"question": question, "answer": answer, "entry": None, "before": before}
        rows.append({column: row[column] for column in others} | own)
    return rows


def _question(value: Any, column: str, row: int, name: str) -> tuple[list[dict[str, str]], str]:
    """The messages before the question, and the question: plain text or a conversation's last message."""
    if not (isinstance(value, list) and value and all(isinstance(m, dict) and "content" in m for m in value)):
        return [], _text(value, column, row, name, "--prompt_column", ", or messages that end with the user's")
    messages = []
    for message in value:
        content = message["content"]
        texts = [part.get("text") for part in content if isinstance(part, dict)] if isinstance(content, list) else []
        if isinstance(content, list) and len(texts) == len(content) and None not in texts:
            content = "".join(texts)
        if not isinstance(content, str) or not isinstance(message.get("role"), str):
            raise InputError(f"row {row} of {name}: a message in {column!r} has no role, or content that is not text.")
        messages.append({"role": message["role"], "content": content})
    if messages[-1]["role"] != "user" or not messages[-1]["content"].strip():
        raise InputError(f"row {row} of {name}: the conversation in {column!r} must end with a user's message.")
    return messages[:-1], messages[-1]["content"]


def _text(value: Any, column: str, row: int, name: str, flag: str = "", other: str = "") -> str:
    """Text as it is, a number as text without an exponent."""
    if isinstance(value, str) and value.strip():
        return value
    if isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value):
        if isinstance(value, float) and abs(value) >= 2**53:
            raise InputError(f"row {row} of {name}: {column!r} is too large for an exact float: write it as text.")
        return f"{Decimal(repr(value)):f}"
    is_empty = value is None or not str(value).strip()
    held = "nothing" if is_empty else f"a {type(value).__name__}, {str(value)[:60]}"
    remedy = f"Drop or fix such rows{f', or name another column with {flag}' if flag else ''}."
    raise InputError(f"row {row} of {name}: {column!r} holds {held}, and must hold text or a number{other}. {remedy}")


def _in_text(data: Dataset, name: str) -> Dataset:
    """`data` with questions and answers as text, for display and comparison."""
    for column in ("question", "answer"):
        if column not in data.column_names:
            raise InputError(f"{name} has no column {column!r}, only {', '.join(data.column_names)}.")
        if data.features[column] != Value("string") or None in data[column]:
            values = [_text(v, column, i, name) for i, v in enumerate(data[column])]
            data = data.remove_columns(column).add_column(column, values)
    return data


def _reasoning_gym(settings: RecipeArguments, seed: int) -> Problems:
    import reasoning_gym
    from reasoning_gym.factory import DATASETS

    task, text = settings.dataset_name.removeprefix(REASONING_GYM), settings.dataset_options or "{}"
    with explained(f"`dataset_options` is {text!r}: it is not JSON:"):
        options = json.loads(text)
    if not isinstance(options, dict):
        raise InputError(f"`dataset_options` is {text!r}: it must be a JSON object.")
    if task not in DATASETS:
        close = difflib.get_close_matches(task, DATASETS) or sorted(DATASETS)[:5]
        raise InputError(f"reasoning-gym has no task {task!r}. Close to it: {', '.join(close)}.")

    entries = []  # reasoning-gym's own problems: some tasks grade with more than the answer

    def generate(size, seed):
        with explained(f"reasoning-gym does not take {options} for {task!r}:"):
            data = reasoning_gym.create_dataset(task, size=size, seed=seed, **options)
        rows = []
        for problem in data:
            rows.append({"question": problem["question"], "answer": str(problem["answer"]), "entry": len(entries)})
            entries.append(problem)
        return data, rows

    scorer, held_out = generate(settings.num_held_out_problems, seed=10**9)
    held_out = {row["question"]: row for row in held_out}
    _, train = generate(settings.num_train_problems or 20_000, seed=10**6 * (seed + 1))
    train = [row for row in train if row["question"] not in held_out]
    if not train:
        raise InputError(f"every problem of {task!r} with {options} is held out: allow more varied problems.")

    def grade(answer: str, gold: str, entry: int | None) -> float:
        try:
            return float(scorer.score_answer(answer, entries[entry]) > 1 - 1e-6)  # some tasks give partial scores
        except Exception:  # several tasks fail on answers of an unexpected form
            return 0.0

    return Problems(Dataset.from_list(train), Dataset.from_list(list(held_out.values())), grade, settings.dataset_name)


def _load(settings: RecipeArguments) -> Dataset:
    name, path = settings.dataset_name, Path(settings.dataset_name)
    is_file = path.suffix in FILE_FORMATS
    if is_file and not path.is_file():
        raise InputError(f"the dataset file {name} does not exist.")
    if not is_file and path.exists():
        raise InputError(f"the dataset {name} must be a file that ends in {', '.join(FILE_FORMATS)}.")
    source, options = name, {"name": settings.dataset_config, "split": settings.dataset_split}
    try:
        if is_file:
            if path.suffix != ".parquet":
                path.read_text(encoding="utf-8")  # some readers fail on other bytes only when a row is read
            cache = Path(config.HF_DATASETS_CACHE) / sha256(path)  # by content; the default is by path and time
            source, options = FILE_FORMATS[path.suffix], {"cache_dir": str(cache), "split": "train"}
            options["data_files"] = glob.escape(name)
        if path.suffix == ".csv":  # read as text, so that 007, 1e-5 and text before an unquoted comma survive
            columns = {*PROMPT_COLUMNS, *ANSWER_COLUMNS, settings.prompt_column, settings.answer_column} - {None}
            options |= {"index_col": False, "converters": dict.fromkeys(columns, str)}
        with warnings.catch_warnings():
            warnings.simplefilter("error", ParserWarning)
            data = load_dataset(source, **options)
    except Exception as error:  # each reader raises its own kind
        cause = error.__cause__ or error
        remedies = {ParserWarning: ". Quote fields that hold a comma.", UnicodeDecodeError: ". Save it as UTF-8."}
        remedy = remedies.get(type(cause), "")
        raise InputError(f"the dataset {name} cannot be read: {type(cause).__name__}: {cause}{remedy}") from error
    if len(data) == 0:
        raise InputError(f"the dataset {name} has no rows.")
    return data


def _column(data: Dataset, asked_for: str | None, usual: tuple[str, ...], flag: str) -> str:
    held = ", ".join(data.column_names)
    if asked_for is not None and asked_for not in data.column_names:
        raise InputError(f"`{flag}` is {asked_for!r}: the dataset has {held}.")
    for column in usual if asked_for is None else (asked_for,):
        if column in data.column_names:
            return column
    raise InputError(f"the dataset has none of the columns {', '.join(usual)} but {held}: name one with --{flag}.")
