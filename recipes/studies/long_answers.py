"""
A long answer of a language model: sums of two long numbers, worked out column by column, in about 175 tokens.

    python -m recipes.studies.long_answers   # supervised training of half an hour on one core, once; and some answers

Each line of an answer is a column, from the right: "7 + 8 + 1 = 16 -> 6". A wrong carry spoils the column after it. The
reward is the share of lines that are right, at their place: partial credit.
"""

import hashlib
import json
import random
import sys
import warnings
from pathlib import Path

from datasets import Dataset
from peft import LoraConfig
from trl import SFTConfig, SFTTrainer

from recipes import toy
from recipes.studies import language
from recipes.studies.tasks import PRECISION, Task, with_prompts


DIGITS, TOKENS = 12, 260
STEPS, RATE, ROWS = 60, 1e-3, 8  # of the supervised training


def worked(a: int, b: int) -> str:
    """The sum, column by column."""
    lines, carry = [], 0
    for place in range(DIGITS):
        x, y = (number // 10**place % 10 for number in (a, b))
        total = x + y + carry
        lines.append(f"{x} + {y} + {carry} = {total} -> {total % 10}")
        carry = total // 10
    return "\n".join(lines)


def problems(number: int, seed: int) -> list[dict[str, str]]:
    rng, least = random.Random(f"column sums {seed}"), 10 ** (DIGITS - 1)
    found = {}
    while len(found) < number:
        a, b = (rng.randrange(least, 10 * least) for _ in range(2))
        found[f"Add column by column, from the right: {a} + {b}"] = worked(a, b)
    return [{"question": question, "answer": answer} for question, answer in found.items()]


def lines_right(completions, answer, **kwargs) -> list[float]:
    """The share of the answer's lines that the completion has at their place; each line too many costs as much."""
    rewards = []
    for completion, goal in zip(completions, answer, strict=True):
        lines, right = language.final_text(completion).strip().split("\n"), goal.split("\n")
        hits = sum(line.strip() == of for line, of in zip(lines, right, strict=False))
        rewards.append((hits - max(len(lines) - len(right), 0)) / len(right))
    return rewards


def task(seed: int = 0) -> Task:
    train, held_out = (with_prompts(Dataset.from_list(problems(*of))) for of in ((2000, seed + 1), (60, 0)))
    return Task(policy(), train, held_out, lines_right, TOKENS, peft_config=LoraConfig(**language.LORA))


def policy() -> Path:
    """SmolLM2 after a short supervised training on answers of other sums; cached."""

    def make(folder: Path) -> None:
        data = with_prompts(Dataset.from_list(problems(STEPS * ROWS, seed=1000)))
        answers = [[{"role": "assistant", "content": answer}] for answer in data["answer"]]
        options = {"max_steps": STEPS, "learning_rate": RATE, "per_device_train_batch_size": ROWS, "logging_steps": 5}
        trainer = SFTTrainer(
            str(toy.smollm2()),
            args=SFTConfig(output_dir=str(folder), **(toy.QUIET | PRECISION | options)),
            train_dataset=data.select_columns("prompt").add_column("completion", answers),
            peft_config=LoraConfig(**language.LORA),
        )
        trainer.train()
        trainer.model.merge_and_unload().save_pretrained(folder)
        trainer.processing_class.save_pretrained(folder)

    dial = [DIGITS, STEPS, RATE, ROWS, worked(1, 1)]
    return toy.cached(f"column_sums-{hashlib.sha256(json.dumps(dial).encode()).hexdigest()[:8]}", make)


def main(argv: list[str]) -> None:
    import torch

    from recipes.studies.tasks import trainer_of
    from trl_otb.comparison.pools import at_rest, sample, training_examples

    trainer = trainer_of(task(), baseline="value", num_generations=8, per_device_train_batch_size=8)
    examples = list(training_examples(trainer))[:3]
    with at_rest(trainer, frozenset({"energy"})):
        for pool, rows in sample(trainer, examples, 8, seed=0):
            print(pool.whole_returns.flatten().tolist(), pool.lengths.flatten().tolist())
            print(trainer.processing_class.decode(rows[0]["completion_ids"][0]), flush=True)
    torch.manual_seed(0)


if __name__ == "__main__":
    warnings.filterwarnings("ignore")
    main(sys.argv[1:])
