"""
Tasks of pretrained language models with LoRA: SmolLM2-135M-Instruct and Gemma-3-270m, answers of 10 to 80 tokens.

The energy of tokens means different things on them. *words*: a short story that uses a given word; most choices are
free, in good and bad stories alike. *copy*: a text is to be repeated, and what departs from it is both improbable and
wrong; the reward is the likeness, between 0 and 1.
Two of reasoning-gym's tasks, which SmolLM2 never gets right by itself, begin after a short supervised training; their
reward is the likeness, too. Gemma, a base model, does them all; it tells stories without supervised training.
"""

import difflib
import hashlib
import json
import random
from collections.abc import Sequence
from pathlib import Path

from datasets import Dataset
from peft import LoraConfig
from trl import SFTConfig, SFTTrainer

from recipes import toy
from recipes.common import ProblemOptions
from recipes.math import load_problems
from recipes.studies import tasks
from recipes.studies.tasks import MACHINE, Task, trainer_of, with_prompts
from trl_otb import OTBGRPOTrainer


# Of tasks of reasoning-gym: options, steps of supervised training that bring SmolLM2 to 10 to 90 %, tokens
REASONING = {
    "word_sequence_reversal": ({"min_words": 7, "max_words": 7}, 25, 40),
    "word_sorting": ({"min_words": 4, "max_words": 4, "min_word_length": 3, "max_word_length": 6}, 25, 24),
}
LORA = {"r": 16, "lora_alpha": 32, "target_modules": "all-linear", "task_type": "CAUSAL_LM"}
# The task of recipes/math_smollm2.yaml, of which SmolLM2 gets one in ten right by itself
CHAIN_SUM = {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1}
TOKENS = 80
LONG = ("column_sums",)  # of long_answers.py
# Steps of supervised training, by the task
GEMMA = {"gemma_copy": 2, "gemma_words": 0, "gemma_word_sequence_reversal": 15, "gemma_word_sorting": 8}


def measured(name: str) -> dict:
    """Options of [`~trl_otb.compare_baselines`]: small pools, and the gradients of the last four blocks."""
    if name.startswith("blocks_"):  # which has four
        return {"completions_per_prompt": 16, "group_sizes": [4]}
    blocks = r"layers\.1[4-7]\." if name in GEMMA else r"layers\.2[6-9]\."
    return {"completions_per_prompt": 16, "group_sizes": [4], "parameters": blocks}


def final_text(completion: str | list[dict]) -> str:
    """The text of a completion; of a conversation, its last message."""
    return completion if isinstance(completion, str) else completion[-1].get("content") or ""


def has_word(completions, answer, **kwargs) -> list[float]:
    """1 where the completion holds `answer`, also within a longer word."""
    return [float(word in final_text(text).lower()) for text, word in zip(completions, answer, strict=True)]


def likeness(completions, answer, **kwargs) -> list[float]:
    """Of the completion's words and those of `answer`: 1 where they are the same, 0 where none is shared."""
    return [
        difflib.SequenceMatcher(None, final_text(text).split(), goal.split(), autojunk=False).ratio()
        for text, goal in zip(completions, answer, strict=True)
    ]


VOCABULARY = json.loads((Path(__file__).parent / "vocabulary.json").read_text())


def words_problem(rng: random.Random) -> tuple[str, str]:
    word, topic = rng.choice(VOCABULARY["words"]), rng.choice(VOCABULARY["topics"])
    return f'Write a short story of three sentences about {topic}. Use the word "{word}".', word


def copy_problem(rng: random.Random) -> tuple[str, str]:
    times, people = (rng.sample(VOCABULARY[kind], 3) for kind in ("times", "people"))
    deeds = [rng.sample(VOCABULARY["deeds"], 2) for _ in range(3)]
    text = " ".join(
        f"{time}, {person[0].lower() + person[1:]} {first} and {second}."
        for time, person, (first, second) in zip(times, people, deeds, strict=True)
    )
    return f"Repeat this text word for word:\n\n{text}", text


TASKS = {"words": (words_problem, has_word), "copy": (copy_problem, likeness)}


def problems_of(task: str, number: int, seed: int) -> list[dict[str, str]]:
    make, rng, found = TASKS[task][0], random.Random(f"{task} {seed}"), {}
    while len(found) < number:
        question, answer = make(rng)
        found[question] = {"question": question, "answer": answer}
    return list(found.values())


def names() -> set[str]:
    """The tasks of this module."""
    return {"chain_sum", *TASKS, *REASONING, *GEMMA, *LONG}


def any_task(name: str, seed: int = 0) -> Task:
    """Of a language model, of blocks of one, or a toy's."""
    from recipes.studies import blocks  # which uses this module

    if name in blocks.NAMES:
        return blocks.task(name, seed)
    return task_of(name, seed) if name in names() else tasks.task_of(name, seed)


def task_of(name: str, seed: int = 0) -> Task:
    """One of `TASKS` or `GEMMA`, "chain_sum", or one of `REASONING`, whose problems to train on `seed` chooses."""
    lora = LoraConfig(**LORA)
    if name in LONG:
        from recipes.studies import long_answers  # which uses this module

        return long_answers.task(seed)
    if name in GEMMA:
        train, held_out = gemma_problems(name, seed=1)
        policy, of = fine_tuned(name) if GEMMA[name] else toy.gemma3(), name.removeprefix("gemma_")
        reward, tokens = (likeness, REASONING[of][-1]) if of in REASONING else (TASKS[of][1], TOKENS)
        return Task(policy, train, held_out, reward, tokens, peft_config=lora)
    if name == "chain_sum":
        options = {"dataset_name": "reasoning_gym:chain_sum", "dataset_options": json.dumps(CHAIN_SUM)}
        asked = ProblemOptions(
            **options, instruction=r"Answer with the number alone, as \boxed{number}.", num_held_out_problems=60
        )
        return Task(toy.smollm2(), *load_problems(asked, seed), 24, peft_config=lora)
    if name in REASONING:
        train, held_out = reasoning_problems(name, seed)
        return Task(fine_tuned(name), train, held_out, likeness, REASONING[name][-1], peft_config=lora)
    data = with_prompts(Dataset.from_list(problems_of(name, 550, seed=1)))
    return Task(toy.smollm2(), data.take(500), data.skip(500), TASKS[name][1], TOKENS, peft_config=lora)


def reasoning_problems(name: str, seed: int) -> list[Dataset]:
    """Problems to train on, and held-out ones."""
    options = {"dataset_name": f"reasoning_gym:{name}", "dataset_options": json.dumps(REASONING[name][0])}
    sizes = {"num_train_problems": 2000, "num_held_out_problems": 100}
    return load_problems(ProblemOptions(**options, **sizes, instruction=""), seed)[:2]


def gemma_problems(name: str, seed: int) -> list[Dataset]:
    """Problems to train on, and held-out ones, with plain prompts: the base model has no chat template."""
    of = name.removeprefix("gemma_")
    if of in REASONING:
        some = [data.remove_columns("prompt") for data in reasoning_problems(of, seed)]
    else:
        data = Dataset.from_list(problems_of(of, 550, seed))
        some = [data.take(500), data.skip(500)]
    return [data.map(lambda row: {"prompt": f"{row['question']}\n\n"}) for data in some]


def fine_tuned(name: str) -> Path:
    """The folder of the model after a short supervised training on the answers of a task; cached."""

    def make(folder: Path) -> None:
        if name in GEMMA:
            model, problems, steps = toy.gemma3(), gemma_problems(name, seed=1000)[0].take(400), GEMMA[name]
            answers, sizes = problems["answer"], {"per_device_train_batch_size": 4}
        else:
            model, (problems, _), steps = toy.smollm2(), reasoning_problems(name, seed=1000), REASONING[name][1]
            answers = [[{"role": "assistant", "content": answer}] for answer in problems["answer"]]
            sizes = {"per_device_train_batch_size": 16}
        supervised(model, problems, answers, folder, max_steps=steps, learning_rate=5e-4, **sizes)

    dial = GEMMA[name] if name in GEMMA else REASONING[name][:2]
    return toy.cached(f"{name}-{hashlib.sha256(json.dumps(dial).encode()).hexdigest()[:8]}", make)


def supervised(model: Path, problems: Dataset, answers: Sequence, folder: Path, callbacks: Sequence = (), **options):
    """Put into `folder` the model after a supervised training on the answers, by LoRA."""
    trainer = SFTTrainer(
        str(model),
        args=SFTConfig(output_dir=str(folder), **(toy.QUIET | MACHINE | options)),
        train_dataset=problems.select_columns("prompt").add_column("completion", [*answers]),
        peft_config=LoraConfig(**LORA),
        callbacks=[*callbacks],
    )
    trainer.train()
    trainer.model.merge_and_unload().save_pretrained(folder)
    trainer.processing_class.save_pretrained(folder)


def trainer_at(name: str, seed: int, **options) -> OTBGRPOTrainer:
    """The trainer of a task, to compare baselines with."""
    sizes = {"num_generations": 8, "max_steps": 1, "per_device_train_batch_size": 16, "per_device_eval_batch_size": 64}
    return trainer_of(any_task(name), seed=seed, disable_tqdm=False, **sizes, **options)
