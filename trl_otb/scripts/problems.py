"""
What scripts with verifiable answers need: problems, their grading, and a calculator for the policy to call.

It needs `pip install trl-otb[recipes]`, and nothing else of this package imports it.
"""

import ast
import json
import operator
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from decimal import Decimal, InvalidOperation
from pathlib import Path
from typing import Any

import math_verify
from datasets import Dataset, load_dataset


def option(default: Any, help: str) -> Any:
    return field(default=default, metadata={"help": help})


@dataclass
class ProblemOptions:
    """Options of a script: which problems [`load_problems`] loads, and further rewards."""

    dataset_name: str = option(
        "reasoning_gym:chain_sum", "`reasoning_gym:TASK`, a .jsonl, .json, .csv or .parquet file, or a hub dataset."
    )
    dataset_options: str = option("{}", "Options of the reasoning-gym task, as JSON.")
    dataset_config: str | None = option(None, "Configuration of the hub dataset.")
    dataset_split: str = option("train", "Split of the hub dataset.")
    prompt_column: str | None = option(None, "Column of the problem; by default prompt, question or problem.")
    answer_column: str | None = option(None, "Column of the answer; by default answer, solution or target.")
    num_train_problems: int | None = option(None, "Training problems; by default 20,000 of a task, all of a dataset.")
    num_held_out_problems: int = option(200, "Held-out problems; of a dataset at most a fifth.")
    instruction: str = option(r"Put your final answer within \boxed{}.", "Appended to every problem.")
    reward_funcs: list[str] | None = option(None, "More rewards, as `module:function`.")


# Problems


def load_problems(options: ProblemOptions, seed: int) -> tuple[Dataset, Dataset, Callable[..., list[float]]]:
    """
    Problems to train on, held-out problems, and the reward: 1 for a right answer, 0 for a wrong one.

    Both datasets have the columns `prompt` (messages), `question` and `answer`, and the dataset's other columns, which
    rewards receive. The held-out problems are the same for every `seed`, and no question is in both.
    """
    if options.dataset_name.startswith("reasoning_gym:"):
        return generate_problems(options, seed)
    formats = {".jsonl": "json", ".json": "json", ".csv": "csv", ".parquet": "parquet"}
    if file := formats.get(Path(options.dataset_name).suffix):
        data = load_dataset(file, data_files=options.dataset_name, split="train")
    else:
        data = load_dataset(options.dataset_name, options.dataset_config, split=options.dataset_split)
    asked = find_column(data, options.prompt_column, "prompt", "question", "problem")
    wanted = find_column(data, options.answer_column, "answer", "solution", "target")
    rows: dict[str, dict[str, Any]] = {}
    for i, row in enumerate(data):
        if row[asked] in (None, "", []) or row[wanted] in (None, ""):
            raise ValueError(f"row {i} of {options.dataset_name} has no {asked!r} or no {wanted!r}: remove it.")
        question, answer = row[asked], str(row[wanted]).split("####")[-1].strip()  # as GSM8K marks the final answer
        new = {"prompt": messages(question, options.instruction), "question": str(question), "answer": answer}
        rows.setdefault(" ".join(str(question).split()), {**row, **new})  # the first of those that ask the same
    if len(rows) < 2:
        raise ValueError(f"{options.dataset_name} has {len(rows)} different problem: training needs at least 2.")
    held_out = max(1, min(options.num_held_out_problems, len(rows) // 5))
    train = min(options.num_train_problems or len(rows), len(rows) - held_out)
    data = Dataset.from_list([*rows.values()]).train_test_split(train_size=train, test_size=held_out, seed=0)

    def accuracy(completions: list[Any], answer: list[str], **kwargs: Any) -> list[float]:
        return [float(is_right(final_answer(c), a)) for c, a in zip(completions, answer, strict=True)]

    return data["train"], data["test"], accuracy


def generate_problems(options: ProblemOptions, seed: int) -> tuple[Dataset, Dataset, Callable[..., list[float]]]:
    """Problems of reasoning-gym, which also grades the answers: some tasks have several right ones."""
    import reasoning_gym

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


def find_column(data: Dataset, chosen: str | None, *usual: str) -> str:
    for name in [chosen] if chosen else usual:
        if name in data.column_names:
            return name
    wanted = repr(chosen) if chosen else ", ".join(usual)
    raise ValueError(
        f"the dataset has the columns {', '.join(data.column_names)}, and none of {wanted}: "
        "name yours with --prompt_column and --answer_column."
    )


def messages(question: str | list[dict[str, str]], instruction: str) -> list[dict[str, str]]:
    """The question as a conversation that ends with the instruction."""
    *before, last = question if isinstance(question, list) else [{"role": "user", "content": str(question)}]
    return [*before, {**last, "content": f"{last['content']}\n{instruction}" if instruction else last["content"]}]


# Grading


def final_answer(completion: str | list[dict]) -> str:
    r"""The last `<answer>…</answer>`, else the last `\boxed{…}`, else the text after the last `=`, else all of it."""
    text = completion if isinstance(completion, str) else completion[-1].get("content") or ""
    if tagged := re.findall(r"<answer>(.*?)</answer>", text, flags=re.DOTALL):
        return tagged[-1].strip()
    depth, boxed = 1, text.rpartition(r"\boxed{")
    for end, character in enumerate(boxed[2] if boxed[1] else ""):
        depth += {"{": 1, "}": -1}.get(character, 0)
        if depth == 0:
            return boxed[2][:end].strip()
    return text.rpartition("=")[2].strip()


def is_right(answer: str, gold: str) -> bool:
    """Whether both are the same words, the same number, or equal as mathematics."""
    answer, gold = (re.sub(r"\\text\{(.*?)\}", r"\1", text).strip().rstrip(".") for text in (answer, gold))
    if answer.casefold().split() == gold.casefold().split() or not answer:
        return bool(answer)
    if re.fullmatch(r"[^\W\d_]{2,}([\s.,;:!?'’-]+[^\W\d_]+)*", gold):
        return False  # words: as mathematics, letters are factors, and anagrams are equal
    try:
        return Decimal(answer) == Decimal(gold)
    except InvalidOperation:
        return math_verify.verify(math_verify.parse(f"${gold}$"), math_verify.parse(f"${answer}$"))


# The calculator


OPERATORS: dict[type, Callable[..., Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
    ast.Pow: operator.pow,
    ast.UAdd: operator.pos,
    ast.USub: operator.neg,
}


def calculator_tool(max_operations: int) -> Callable[[str], str]:
    """The tool. TRL shows its name, arguments and docstring to the policy, and an error as the result of a call."""

    def calculator(expression: str) -> str:
        """
        Works out an arithmetic expression.

        Args:
            expression: Numbers, parentheses, and + - * / // % **, such as 12 * (7 - 2.5).

        Returns:
            The result.
        """
        if len(expression) > 200:
            raise ValueError(f"the expression has {len(expression)} characters, more than 200")
        tree = ast.parse(expression.strip(), mode="eval")
        operations = sum(isinstance(node, ast.BinOp) for node in ast.walk(tree))
        if operations > max_operations:
            raise ValueError(f"the expression has {operations} operations, more than {max_operations}")
        return str(value_of(tree.body))

    return calculator


def value_of(node: ast.expr) -> Any:
    """The number that an arithmetic expression is. Nothing is executed, and no number grows beyond 40 digits."""
    if isinstance(node, ast.Constant) and type(node.value) in (int, float):
        value: Any = node.value
    elif isinstance(node, ast.UnaryOp) and type(node.op) in OPERATORS:
        value = OPERATORS[type(node.op)](value_of(node.operand))
    elif isinstance(node, ast.BinOp) and type(node.op) in OPERATORS:
        left, right = value_of(node.left), value_of(node.right)
        if isinstance(node.op, ast.Pow) and abs(right) > 100:
            raise ValueError(f"the power {left} ** {right} is too large")
        value = OPERATORS[type(node.op)](left, right)
    else:
        raise ValueError(f"{ast.unparse(node)!r} is not arithmetic on numbers")
    if isinstance(value, complex) or not abs(value) < 10**40:
        raise ValueError(f"{ast.unparse(node)} is not a real number of at most 40 digits")
    return int(value) if isinstance(value, float) and value.is_integer() and abs(value) < 2**53 else value
