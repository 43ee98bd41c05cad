"""
How noisy is the gradient of a pretrained language model? SmolLM2-135M-Instruct with LoRA, answers of about 50 tokens.

    OMP_NUM_THREADS=1 python -m recipes.studies.language words                    # an hour on one core
    OMP_NUM_THREADS=1 python -m recipes.studies.language copy --stage trained     # a quarter of an hour more
    OMP_NUM_THREADS=1 python -m recipes.studies.language copy --num_prompts 8     # minutes
    python -m recipes.studies.language copy --stage trained --plot_only --publish   # its column, and copy.png

Two tasks on which the energy of tokens means different things. *words*: a short story that uses a given word; most
choices are free, in good and bad stories alike. *copy*: a text is to be repeated, and what departs from it is both
improbable and wrong; the reward is the likeness, between 0 and 1. The stage `trained` first trains for a few steps. A
run that was stopped goes on where it was.
"""

import argparse
import difflib
import json
import random
import sys
from pathlib import Path

from datasets import Dataset
from peft import LoraConfig

from recipes import toy
from recipes.common.grading import final_text
from recipes.common.launching import tidy_output
from recipes.studies import render
from recipes.studies.tasks import Task, cells_of, compared, noise_flags, trainer_of, with_prompts
from trl_otb import OTBGRPOTrainer


STEPS = {"words": 5, "copy": 4}  # which take rewards from 0.5 to 0.8 and from 0.3 to 0.7
GROUP_SIZE, COMPLETIONS, TOKENS = 4, 16, 80
LAST_BLOCKS = r"layers\.2[6-9]\."


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


def problems(task: str, number: int, seed: int) -> list[dict[str, str]]:
    make, rng, found = TASKS[task][0], random.Random(f"{task} {seed}"), {}
    while len(found) < number:
        question, answer = make(rng)
        found[question] = {"question": question, "answer": answer}
    return list(found.values())


def trainer_at(name: str, stage: str, seed: int, folder: Path) -> OTBGRPOTrainer:
    """The trainer of a task, which has trained where the stage asks for it; `folder` keeps the adapter."""
    data = with_prompts(Dataset.from_list(problems(name, 500, seed=1)))
    trainer = trainer_of(
        Task(toy.smollm2(), data, data, TASKS[name][1], TOKENS),
        peft_config=LoraConfig(r=16, lora_alpha=32, target_modules="all-linear", task_type="CAUSAL_LM"),
        num_generations=8,
        per_device_train_batch_size=16,
        learning_rate=5e-4,
        lr_scheduler_type="constant_with_warmup",
        warmup_steps=2,
        max_steps=STEPS[name],
        seed=seed,
        disable_tqdm=False,
    )
    if stage == "trained":
        policy = folder / f"{name}-policy-seed{seed}"
        if not (policy / "adapter_model.safetensors").exists():
            trainer.train()
            trainer.save_model(policy)
        trainer.model.load_adapter(policy, "default", is_trainable=True)
    return trainer


def main(argv: list[str]) -> None:
    parser = argparse.ArgumentParser(prog="language", description=__doc__.splitlines()[1])
    parser.add_argument("task", choices=TASKS)
    parser.add_argument("--stage", choices=["start", "trained"], default="start")
    noise_flags(parser, seed=42, num_prompts=60)
    args = parser.parse_args(argv)
    if args.publish and args.seed != render.load("language")["seed"]:
        parser.error(f"--publish is for the seed of the page, {render.load('language')['seed']}")
    output = args.output_dir or Path("runs/studies/language")
    folder = output / f"{args.task}-{args.stage}"
    try:
        report = compared(
            folder,
            lambda: trainer_at(args.task, args.stage, args.seed, output),
            args,
            completions_per_prompt=COMPLETIONS,
            group_sizes=[GROUP_SIZE],
            parameters=LAST_BLOCKS,
        )
        columns = {f"{args.task}, {args.stage}": cells_of(report)}
        render.report(columns, folder)
        print(report.verdict)
        report.plot(folder / "noise.png")
        if args.publish:
            render.publish("language", columns)
            if (args.task, args.stage) == ("copy", "trained"):
                report.plot(render.HERE / "copy.png")
    except ValueError as error:
        parser.error(str(error))


if __name__ == "__main__":
    tidy_output()
    main(sys.argv[1:])
