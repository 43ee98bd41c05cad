"""Verifiable problems: where they come from, how an answer is found in a completion, and how it is graded."""

import difflib
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from datasets import Dataset, load_dataset
from transformers import PreTrainedTokenizerBase

from .errors import InputError
from .sums import CHAIN_SUM


REASONING_GYM = "reasoning_gym:"
FILE_FORMATS = {".jsonl": "json", ".json": "json", ".parquet": "parquet", ".csv": "csv"}
PROMPT_COLUMNS = ("prompt", "question", "problem")
ANSWER_COLUMNS = ("answer", "solution", "target")


@dataclass
class Problems:
    """
    Args:
        train, held_out (`Dataset`):
            Columns `question` and `answer`, and `entry`, by which the grader of a reasoning-gym task finds the problem.
        grade (`Callable[[str, str, int | None], float]`):
            (answer found in a completion, `answer`, `entry`) -> 1.0 or 0.0.
    """

    train: Dataset
    held_out: Dataset
    grade: Callable[[str, str, int | None], float]


def load_problems(
    name: str,
    *,
    options: dict[str, Any] | None = None,
    config: str | None = None,
    split: str = "train",
    prompt_column: str | None = None,
    answer_column: str | None = None,
    num_train: int = 20_000,
    num_held_out: int = 200,
    seed: int = 0,
) -> Problems:
    """
    Load problems and hold some out; which ones does not depend on the seed, so that runs can be compared.

    Args:
        name (`str`):
            `reasoning_gym:TASK`, a `.jsonl`, `.json`, `.parquet` or `.csv` file, or a dataset id on the hub.
        options (`dict`, *optional*):
            Options of the reasoning-gym task.
        config, split (`str`):
            Configuration and split of a hub dataset.
        prompt_column, answer_column (`str`, *optional*):
            Columns of a file or hub dataset; by default the first of `PROMPT_COLUMNS` and of `ANSWER_COLUMNS` there.
        num_train, num_held_out (`int`):
            Problems to generate. Of a file or hub dataset, all are used, and at most a fifth are held out.
        seed (`int`):
            Of the training problems that reasoning-gym generates.

    Raises:
        InputError: The problems cannot be had as asked for.
    """
    if name.startswith(REASONING_GYM):
        return _reasoning_gym(name.removeprefix(REASONING_GYM), options or {}, num_train, num_held_out, seed)
    if options:
        raise InputError(f"`dataset_options` is for reasoning-gym tasks, and `dataset_name` is {name!r}.")
    data = _load(name, config, split)
    prompts = _column(data, prompt_column, PROMPT_COLUMNS, "prompt_column")
    answers = _column(data, answer_column, ANSWER_COLUMNS, "answer_column")
    for column in (prompts, answers):
        for i, value in enumerate(data[column]):
            if value is None or not str(value).strip():
                raise InputError(f"row {i} of {name} has an empty {column!r}: drop such rows.")
    data = Dataset.from_dict(
        {
            "question": [_text(q, prompts, i) for i, q in enumerate(data[prompts])],
            "answer": [str(a).split("####")[-1].strip() for a in data[answers]],  # GSM8K's mark of the final answer
            "entry": [None] * len(data),
        }
    )
    if len(data) < 2:
        raise InputError(f"{name} has {len(data)} row: at least 2 are needed, one to train on and one to hold out.")
    data = data.shuffle(seed=0)
    held_out = max(1, min(num_held_out, len(data) // 5))
    return Problems(data.select(range(held_out, len(data))), data.select(range(held_out)), grade_mathematics)


def _reasoning_gym(task: str, options: dict[str, Any], num_train: int, num_held_out: int, seed: int) -> Problems:
    import reasoning_gym
    from reasoning_gym.factory import DATASETS

    if task not in DATASETS:
        close = difflib.get_close_matches(task, DATASETS) or sorted(DATASETS)[:5]
        raise InputError(f"reasoning-gym has no task {task!r}. Close to it: {', '.join(close)}.")
    options = {**CHAIN_SUM, **options} if task == "chain_sum" else options

    entries = []  # the problems as reasoning-gym made them: some tasks grade by more than the answer

    def generate(size, seed):
        try:
            data = reasoning_gym.create_dataset(task, size=size, seed=seed, **options)
        except (TypeError, AssertionError, ValueError) as error:
            raise InputError(f"reasoning-gym does not take {options} for {task!r}: {error}") from error
        rows = []
        for problem in data:
            rows.append({"question": problem["question"], "answer": str(problem["answer"]), "entry": len(entries)})
            entries.append(problem)
        return data, rows

    scorer, held_out = generate(num_held_out, seed=10**9)
    held_out = list({row["question"]: row for row in held_out}.values())
    questions = {row["question"] for row in held_out}
    train = [row for row in generate(num_train, seed=10**6 * (seed + 1))[1] if row["question"] not in questions]
    if not train:
        raise InputError(f"every problem of {task!r} with {options} is held out: ask for more kinds of problem.")

    def grade(answer: str, gold: str, entry: int | None) -> float:
        try:
            return float(scorer.score_answer(answer, entries[entry]) > 1 - 1e-6)  # some tasks give part of the score
        except Exception:  # several tasks trip over an answer that is not of the form they expect
            return 0.0

    return Problems(Dataset.from_list(train), Dataset.from_list(held_out), grade)


def _text(question: Any, column: str, row: int) -> str:
    """A question as text; of a conversation, its last user message."""
    if isinstance(question, list) and all(isinstance(m, dict) and "content" in m for m in question):
        question = [m["content"] for m in question if m.get("role") == "user"][-1:]
        question = question[0] if question else None
    if not isinstance(question, str | int | float):
        raise InputError(f"row {row} of column {column!r} holds neither text nor messages with a user's turn in text.")
    return str(question)


def _load(name: str, config: str | None, split: str) -> Dataset:
    path = Path(name)
    if path.suffix in FILE_FORMATS:
        if not path.is_file():
            raise InputError(f"the dataset file {name} does not exist.")
        if path.stat().st_size == 0:
            raise InputError(f"the dataset file {name} is empty.")
    elif path.exists():
        raise InputError(f"the dataset {name} must be a file that ends in {', '.join(FILE_FORMATS)}.")
    try:
        if path.suffix in FILE_FORMATS:
            data = load_dataset(FILE_FORMATS[path.suffix], data_files=name, split="train")
        else:
            data = load_dataset(name, config, split=split)
    except Exception as error:  # whatever reader the library chose raises its own kind
        cause = error.__cause__ or error
        raise InputError(f"the dataset {name} cannot be read: {type(cause).__name__}: {cause}") from error
    if len(data) == 0:
        raise InputError(f"the dataset {name} has no rows.")
    return data


def _column(data: Dataset, asked_for: str | None, usual: tuple[str, ...], flag: str) -> str:
    if asked_for is not None and asked_for not in data.column_names:
        raise InputError(f"`{flag}` is {asked_for!r}: the dataset has {', '.join(data.column_names)}.")
    for column in usual if asked_for is None else (asked_for,):
        if column in data.column_names:
            return column
    raise InputError(
        f"the dataset has none of the columns {', '.join(usual)} but {', '.join(data.column_names)}: name one with "
        f"--{flag}."
    )


def with_prompts(data: Dataset, tokenizer: PreTrainedTokenizerBase, instruction: str, embedded: bool) -> Dataset:
    """
    Add the `prompt` column: a conversation for a tokenizer with a chat template, else plain text; for an embedded policy of
    the bare expression.

    Raises:
        InputError: The embedded policy cannot read a question.
    """

    def prompt(question: str):
        text = _squeeze(question, tokenizer) if embedded else f"{question}\n{instruction}".strip()
        if tokenizer.chat_template:
            return [{"role": "user", "content": text}]
        return f"{text}=" if embedded else f"{text}\n"

    return data.add_column("prompt", [prompt(question) for question in data["question"]])


def _squeeze(question: str, tokenizer: PreTrainedTokenizerBase) -> str:
    """`"... problem: 3 + 4 ="` -> `"3+4"`."""
    prompt = re.sub(r"\s", "", question.split(":")[-1]).removesuffix("=")
    vocabulary = tokenizer.get_vocab()
    known = "".join(sorted((token for token in vocabulary if len(token) == 1), key=vocabulary.get))
    unknown = sorted(set(prompt) - set(known))
    if unknown:
        raise InputError(
            f"the embedded policy reads only the characters {known}, and a question holds {unknown[0]!r}: "
            f"{question[:80]!r}. Choose a model with --model_name_or_path."
        )
    return prompt


def find_answer(completion: str) -> str:
    """The last `<answer>…</answer>`, else the last `\\boxed{…}`, else what follows the last `=`, else everything."""
    tagged = re.findall(r"<answer>(.*?)</answer>", completion, flags=re.DOTALL)
    if tagged:
        return tagged[-1].strip()
    start = completion.rfind(r"\boxed{")
    if start >= 0:
        depth, begin = 1, start + len(r"\boxed{")
        for end in range(begin, len(completion)):
            depth += {"{": 1, "}": -1}.get(completion[end], 0)
            if depth == 0:
                return completion[begin:end].strip()
    return completion.split("=")[-1].strip()


def grade_mathematics(answer: str, gold: str, entry: int | None = None, seconds: int = 3) -> float:
    """
    Whether two answers of unknown form are equal, to the letter or as mathematics (math-verify). What takes longer than
    `seconds` to work out, such as 9^9^9^9, is wrong. Call it in the main thread: math-verify keeps time by its signals.
    """
    from math_verify import parse, verify

    if answer == gold:
        return 1.0
    # Both as LaTeX, which reads 1/2, \frac{1}{2} and 0.5 alike
    gold_parsed, answer_parsed = (parse(f"${text}$", parsing_timeout=seconds) for text in (gold, answer))
    return float(verify(gold_parsed, answer_parsed, timeout_seconds=seconds))
