"""
A long answer of a language model: sums of two long numbers, worked out column by column, in about 175 tokens.

    python -m recipes.studies.long_answers   # supervised training, once: minutes on a GPU; and some answers

The columns stand in the question, with letters; each line of an answer is one of them, from the last to the first:
"j: 7 + 8 + 1 = 16 -> 6", with the carry of the line before. A wrong carry spoils the lines after it. The reward is the
share of lines that are right, at their place: partial credit.
"""

import hashlib
import json
import random
import sys
import warnings
from pathlib import Path

import torch
from datasets import Dataset
from peft import LoraConfig
from transformers import AutoTokenizer, TrainerCallback

from recipes import toy
from recipes.studies import language
from recipes.studies.tasks import Task, with_prompts


DIGITS, TOKENS = 10, 220
# The supervised training ends when four in ten lines of new answers are right; this is checked every 10 steps
ENOUGH, LOOK, STEPS, RATE, ROWS = 0.4, 10, 300, 5e-4, 8


def worked(a: int, b: int) -> tuple[str, str]:
    """The question, and the sum column by column."""
    asked, lines, carry = [], [], 0
    for place, letter in zip(range(DIGITS), reversed("abcdefghij"), strict=True):
        x, y = (number // 10**place % 10 for number in (a, b))
        total = x + y + carry
        asked.append(f"{letter}: {x} + {y}")
        lines.append(f"{letter}: {x} + {y} + {carry} = {total} -> {total % 10}")
        carry = total // 10
    columns = "\n".join(reversed(asked))
    return f"Add these columns, from j to a, with carries:\n\n{columns}", "\n".join(lines)


def problems(number: int, seed: int) -> list[dict[str, str]]:
    rng = random.Random(f"column sums {seed}")
    found: dict[str, str] = {}
    while len(found) < number:
        found |= [worked(*(rng.randrange(10**DIGITS) for _ in range(2)))]
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


class UntilEnough(TrainerCallback):
    """Ends a supervised training when enough lines of the policy's answers to new problems are right."""

    def __init__(self, tokenizer) -> None:
        self.tokenizer, self.data = tokenizer, with_prompts(Dataset.from_list(problems(16, seed=999)))
        self.enough = False

    @torch.no_grad()
    def on_step_end(self, args, state, control, model=None, **kwargs):
        if state.global_step % LOOK:
            return
        asked = self.tokenizer.apply_chat_template(
            [*self.data["prompt"]],
            add_generation_prompt=True,
            padding=True,
            padding_side="left",
            return_tensors="pt",
            return_dict=True,
        ).to(model.device)
        model.eval()
        found = model.generate(**asked, do_sample=True, top_k=0, temperature=1.0, max_new_tokens=TOKENS)
        model.train()
        texts = self.tokenizer.batch_decode(found[:, asked["input_ids"].size(1) :], skip_special_tokens=True)
        rewards = lines_right(texts, self.data["answer"])
        print(f"step {state.global_step}: {sum(rewards) / len(rewards):.2f} of the lines", flush=True)
        self.enough = sum(rewards) >= ENOUGH * len(rewards)
        control.should_training_stop |= self.enough


def policy() -> Path:
    """SmolLM2 after a short supervised training on answers of other sums; cached."""

    def make(folder: Path) -> None:
        data = with_prompts(Dataset.from_list(problems(STEPS * ROWS, seed=1000)))
        answers = [[{"role": "assistant", "content": answer}] for answer in data["answer"]]
        rates = {"learning_rate": RATE, "lr_scheduler_type": "constant_with_warmup", "warmup_steps": 5}
        options = {"max_steps": STEPS, "per_device_train_batch_size": ROWS, "logging_steps": 10, **rates}
        until = UntilEnough(AutoTokenizer.from_pretrained(toy.smollm2()))
        language.supervised(toy.smollm2(), data, answers, folder, [until], **options)
        if not until.enough:
            raise RuntimeError(f"After {STEPS} steps less than {ENOUGH:.0%} of the lines are right: change RATE.")

    dial = [DIGITS, ENOUGH, LOOK, STEPS, RATE, ROWS, worked(1, 1)]
    return toy.cached(f"column_sums-{hashlib.sha256(json.dumps(dial).encode()).hexdigest()[:8]}", make)


def main(argv: list[str]) -> None:
    from recipes.studies.tasks import trainer_of
    from trl_otb.comparison.pools import at_rest, sample, training_examples

    trainer = trainer_of(task(), baseline="value", num_generations=8, per_device_train_batch_size=8)
    examples = list(training_examples(trainer))[:3]
    with at_rest(trainer, frozenset({"energy"})):
        for pool, rows in sample(trainer, examples, 8, seed=0):
            print(pool.whole_returns.flatten().tolist(), pool.lengths.flatten().tolist())
            print(trainer.processing_class.decode(rows[0]["completion_ids"][0]), flush=True)


if __name__ == "__main__":
    warnings.filterwarnings("ignore")
    main(sys.argv[1:])
