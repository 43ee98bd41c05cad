"""
Policies for long runs on a CPU: the first four blocks of SmolLM2, or all 30, with the vocabulary of a task.

    python -m recipes.studies.blocks --task blocks_columns   # supervised training, once: minutes; and some answers

Both begin after a supervised training on the work of a careless pupil. *blocks*: 14 million parameters, of which a core
samples and trains 1,000 tokens in two seconds. They are not a small language model: what they know of a task comes from
the supervised training, so that likeness to SmolLM2 ends with its width, tokens and kind of weights. *whole*: SmolLM2
but for the tokens that the task never uses, with adapters in the last ten blocks; 1,000 tokens take eight seconds.

*columns*: sums of two numbers of six digits, column by column, in 51 tokens: "3+8+1=12". The pupil forgets a carry, or
writes a neighbouring digit. The reward is 1 if every line is right.

*counting*: the same digit is added 13 times, in 155 tokens: "1047+8=1055". The pupil writes a neighbouring sum and goes
on from it. The reward is the share of right lines.

*sorting*: ten digits are sorted in ten rounds, in 110 tokens. Neighbours change places where the first is larger: the
pairs of even places in one round, of odd places in the next. The pupil overlooks a pair, which a later round may mend,
or writes a neighbouring digit, which none mends. The reward is 1 if the last line is right.
"""

import argparse
import hashlib
import json
import random
import sys
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from datasets import Dataset
from peft import LoraConfig
from tokenizers import Tokenizer
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerFast

from recipes import toy
from recipes.studies import language
from recipes.studies.tasks import Task


DIGITS = 6
LINES = 13  # of counting
PLACES = 10  # of sorting


def columns_problem(rng: random.Random) -> tuple[str, str, str]:
    """The question, the right answer, and the pupil's."""
    a, b = (rng.randrange(10**DIGITS) for _ in range(2))
    return f"{a:0{DIGITS}d}+{b:0{DIGITS}d}:", columns(a, b, None), columns(a, b, rng)


def columns(a: int, b: int, careless: random.Random | None) -> str:
    lines, carry = [], 0
    for place in range(DIGITS):
        x, y = (number // 10**place % 10 for number in (a, b))
        if careless and careless.random() < 0.25:
            carry = 0
        total = x + y + carry
        if careless and careless.random() < 0.06:
            total = max(total + careless.choice((-1, 1)), 0)
        lines.append(f"{x}+{y}+{carry}={total}")
        carry = total // 10
    return "\n".join(lines)


def counting_problem(rng: random.Random) -> tuple[str, str, str]:
    """The question, the right answer, and the pupil's."""
    start, by = rng.randrange(10_000), rng.randrange(1, 10)
    return f"{start:04d}+{by}:", counting(start, by, None), counting(start, by, rng)


def counting(number: int, by: int, careless: random.Random | None) -> str:
    lines = []
    for _ in range(LINES):
        after = number + by
        if careless and careless.random() < 0.1:
            after += careless.choice((-1, 1))
        lines.append(f"{number:04d}+{by}={after % 10_000:04d}")
        number = after % 10_000
    return "\n".join(lines)


def sorting_problem(rng: random.Random) -> tuple[str, str, str]:
    """The question, the right answer, and the pupil's."""
    digits = [rng.randrange(10) for _ in range(PLACES)]
    return f"{''.join(map(str, digits))}:", sorting(digits, None), sorting(digits, rng)


def sorting(digits: list[int], careless: random.Random | None) -> str:
    lines = []
    for turn in range(PLACES):
        digits = digits.copy()
        for i in range(turn % 2, PLACES - 1, 2):
            if digits[i] > digits[i + 1] and not (careless and careless.random() < 0.1):
                digits[i : i + 2] = digits[i + 1], digits[i]
        for i, digit in enumerate(digits):
            if careless and careless.random() < 0.004:
                digits[i] = (digit + careless.choice((-1, 1))) % 10
        lines.append("".join(map(str, digits)))
    return "\n".join(lines)


def lines_right(completions, answer, **kwargs) -> list[float]:
    """The share of the answer's lines that the completion has at their place."""
    pairs = ((text.strip().split("\n"), goal.split("\n")) for text, goal in zip(completions, answer, strict=True))
    return [sum(a == b for a, b in zip(text, goal, strict=False)) / len(goal) for text, goal in pairs]


def all_right(completions, answer, **kwargs) -> list[float]:
    return [float(text.strip() == goal) for text, goal in zip(completions, answer, strict=True)]


def last_right(completions, answer, **kwargs) -> list[float]:
    last = ([text.strip().split("\n")[-1] for text in texts] for texts in (completions, answer))
    return [float(a == b) for a, b in zip(*last, strict=True)]


@dataclass(frozen=True)
class Kind:
    problem: Callable[[random.Random], tuple[str, str, str]]
    reward: Callable[..., list[float]]
    tokens: int
    answers: int  # in a step of supervised training


@dataclass(frozen=True)
class Size:
    """How many blocks of SmolLM2; their supervised training; and the modules that have adapters after it."""

    blocks: int
    steps: int
    rate: float
    adapted: str


KINDS = {
    "columns": Kind(columns_problem, all_right, 64, 16),
    "counting": Kind(counting_problem, lines_right, 160, 8),
    "sorting": Kind(sorting_problem, last_right, 120, 8),
}
SIZES = {"blocks": Size(4, 500, 1e-3, "all-linear"), "whole": Size(30, 120, 3e-4, r".*layers\.2\d\..*_proj")}
NAMES = [f"{size}_{kind}" for size in SIZES for kind in KINDS]


def parts_of(name: str) -> tuple[str, Kind, Size]:
    """Of one of `NAMES`."""
    size, kind = name.split("_")
    return kind, KINDS[kind], SIZES[size]


def problems(kind: str, number: int, seed: int) -> list[dict[str, str]]:
    rng, found = random.Random(f"{kind} {seed}"), {}
    while len(found) < number:
        question, answer, attempt = KINDS[kind].problem(rng)
        found[question] = {"prompt": question, "answer": answer, "attempt": attempt}
    return list(found.values())


def cut_tokenizer(texts: list[str]) -> tuple[PreTrainedTokenizerFast, list[int]]:
    """SmolLM2's tokenizer with the tokens of these texts alone, and their numbers in the whole one."""
    whole = AutoTokenizer.from_pretrained(toy.smollm2())
    used = {token for text in texts for token in whole.tokenize(text)}
    data = json.loads(whole.backend_tokenizer.to_str())
    vocabulary = data["model"]["vocab"]
    special = [token["content"] for token in data["added_tokens"]]
    kept = special + sorted(
        (token for token in vocabulary if token not in special and any(token in of for of in used)), key=vocabulary.get
    )
    merges = [pair if isinstance(pair, list) else pair.split(" ") for pair in data["model"]["merges"]]
    data["model"]["merges"] = [pair for pair in merges if {*pair, "".join(pair)} <= {*kept}]
    data["model"]["vocab"] = {token: i for i, token in enumerate(kept)}
    for token in data["added_tokens"]:
        token["id"] = kept.index(token["content"])
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer.from_str(json.dumps(data)),
        eos_token=whole.eos_token,
        pad_token=whole.pad_token,
        padding_side="left",
    )
    return tokenizer, whole.convert_tokens_to_ids(kept)


def cut(texts: list[str], blocks: int):
    """The first blocks of SmolLM2 with the tokens of these texts."""
    tokenizer, rows = cut_tokenizer(texts)
    model = AutoModelForCausalLM.from_pretrained(toy.smollm2(), dtype=torch.float32)
    embeddings = model.get_input_embeddings().weight.data[rows].clone()
    model.model.layers = model.model.layers[:blocks]
    model.config.num_hidden_layers = blocks
    if getattr(model.config, "layer_types", None):
        model.config.layer_types = model.config.layer_types[:blocks]
    model.resize_token_embeddings(len(rows))
    model.get_input_embeddings().weight.data.copy_(embeddings)
    for config in (model.config, model.generation_config):
        config.bos_token_id, config.eos_token_id = None, tokenizer.eos_token_id
        config.pad_token_id = tokenizer.pad_token_id
    return model, tokenizer


def policy(name: str) -> Path:
    """After a supervised training on the pupil's answers; cached."""
    kind, of, how = parts_of(name)

    def make(folder: Path) -> None:
        torch.manual_seed(0)
        rows = problems(kind, of.answers * how.steps, seed=1000)
        model, tokenizer = cut([row[key] for row in rows[:2000] for key in ("prompt", "answer", "attempt")], how.blocks)
        print(f"{sum(p.numel() for p in model.parameters()):,} parameters, {len(tokenizer)} tokens", flush=True)
        optimizer = torch.optim.AdamW(model.parameters(), lr=how.rate, weight_decay=0.0)
        for step in range(how.steps):
            some = rows[of.answers * step : of.answers * (step + 1)]
            asked, said = (tokenizer([row[key] for row in some])["input_ids"] for key in ("prompt", "attempt"))
            ids = [[*q, *a, tokenizer.eos_token_id] for q, a in zip(asked, said, strict=True)]
            longest = max(map(len, ids))
            batch = torch.tensor([[*x, *[tokenizer.pad_token_id] * (longest - len(x))] for x in ids])
            labels = batch.clone()
            for i, (x, q) in enumerate(zip(ids, asked, strict=True)):
                labels[i, : len(q)] = labels[i, len(x) :] = -100
            for group in optimizer.param_groups:
                group["lr"] = how.rate * min((step + 1) / 20, 1, (how.steps - step) / (how.steps / 4))
            with torch.autocast("cpu", dtype=torch.bfloat16):
                loss = model(batch, labels=labels).loss
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            if step % 25 == 24:
                print(f"step {step + 1}: {loss.item():.3f}", flush=True)
            if step % (how.steps // 5) == how.steps // 5 - 1:
                print(f"reward {sampled(kind, model, tokenizer, 64):.2f}", flush=True)
        model.save_pretrained(folder)
        tokenizer.save_pretrained(folder)

    dial = [kind, how.blocks, how.rate, how.steps, of.answers, of.tokens, problems(kind, 20, seed=1000)]
    return toy.cached(f"{kind}-{hashlib.sha256(json.dumps(dial).encode()).hexdigest()[:8]}", make)


@torch.no_grad()
def sampled(kind: str, model, tokenizer, number: int, show: int = 0) -> float:
    rows = problems(kind, number, seed=999)
    asked = tokenizer([row["prompt"] for row in rows], return_tensors="pt", padding=True)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = model.generate(**asked, do_sample=True, top_k=0, temperature=1.0, max_new_tokens=KINDS[kind].tokens)
    texts = tokenizer.batch_decode(found[:, asked["input_ids"].size(1) :], skip_special_tokens=True)
    for row, text in [*zip(rows, texts, strict=True)][:show]:
        print(row["prompt"], text, sep="\n", end="\n\n")
    rewards = KINDS[kind].reward(texts, [row["answer"] for row in rows])
    return sum(rewards) / number


def task(name: str, seed: int = 0) -> Task:
    kind, of, size = parts_of(name)
    train, held_out = (Dataset.from_list(problems(kind, *of)) for of in ((2000, seed + 1), (100, 0)))
    lora = LoraConfig(**language.LORA | {"target_modules": size.adapted})
    return Task(policy(name), train, held_out, of.reward, of.tokens, peft_config=lora)


def main(argv: list[str]) -> None:
    parser = argparse.ArgumentParser(prog="blocks", description=__doc__.splitlines()[1])
    parser.add_argument("--task", choices=NAMES, default=NAMES[0])
    args = parser.parse_args(argv)
    folder = policy(args.task)
    model, tokenizer = AutoModelForCausalLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    print(f"reward {sampled(parts_of(args.task)[0], model, tokenizer, 256, show=3):.2f}")


if __name__ == "__main__":
    warnings.filterwarnings("ignore")
    main(sys.argv[1:])
