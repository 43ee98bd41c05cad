"""
How noisy is the gradient of a pretrained language model? SmolLM2-135M-Instruct with LoRA, answers of about 50 tokens.

    OMP_NUM_THREADS=1 python -m recipes.studies.language words                    # an hour on one core
    OMP_NUM_THREADS=1 python -m recipes.studies.language copy --stage trained     # a quarter of an hour more
    OMP_NUM_THREADS=1 python -m recipes.studies.language copy --num_prompts 8     # minutes

Two tasks on which the energy of tokens means different things. *words*: a short story that uses a given word; most
choices are free, in good and bad stories alike. *copy*: a text is to be repeated, and what departs from it is both
improbable and wrong; the reward is the likeness, between 0 and 1. The stage `trained` first trains for a few steps.
Flags that are not named here go to recipes.gradient_noise, which can be stopped and run again.
"""

import argparse
import difflib
import json
import random
import subprocess
import sys
from pathlib import Path

from recipes.common.grading import final_text
from recipes.common.launching import tidy_output


ROOT = Path(__file__).parents[2]
CONFIG = ROOT / "recipes" / "math_smollm2.yaml"
STEPS = {"words": 5, "copy": 4}  # which take rewards from 0.5 to 0.8 and from 0.3 to 0.7
TRAIN = (
    "--learning_rate 5e-4 --num_generations 8 --per_device_train_batch_size 16 "
    "--max_completion_length 80 --num_held_out_problems 10 --seed 7"
)
MEASURE = (
    "--num_prompts 60 --completions_per_prompt 16 --group_sizes 4 --max_completion_length 80 "
    r"--parameters layers\.2[6-9]\. "
    "--baselines opo ogb otb otb_shrunk rloo_pooled ogb_pooled ogb_pooled_damped"
)


def has_word(completions, answer, **kwargs) -> list[float]:
    """1 where the completion holds `answer`, also within a longer word."""
    return [float(word in final_text(text).lower()) for text, word in zip(completions, answer, strict=True)]


def likeness(completions, answer, **kwargs) -> list[float]:
    """Of the completion's words and those of `answer`: 1 where they are the same, 0 where none is shared."""
    return [
        difflib.SequenceMatcher(None, final_text(text).split(), goal.split(), autojunk=False).ratio()
        for text, goal in zip(completions, answer, strict=True)
    ]


TOPICS = (
    "a garden, the sea, a dog, winter, a small shop, the first day of school, an old clock, a train journey, a rainy "
    "afternoon, a farmer, two sisters, a lost key, the moon, a birthday, a mountain village, a baker, a boat, a cat, "
    "the market, a painter, a long night, a teacher, the forest, a letter, a broken window, a new neighbour"
).split(", ")
WORDS = (
    "silver, window, quickly, bridge, bread, yellow, music, quiet, paper, river, seven, coat, bell, sugar, apple, "
    "ladder, green, whisper, stone, basket, cloud, chair, honest, wooden, soup, mirror, blanket, slowly, lamp, brave"
).split(", ")
PEOPLE = (
    "The old man, A young girl, The captain, My neighbour, The baker, A tall woman, The teacher, Our doctor".split(
        ", "
    )
)
DEEDS = (
    "walked slowly along the river, carried a basket of apples, opened the green door, wrote a long letter, counted "
    "the boats in the harbour, bought three loaves of bread, listened to the music, waited for the morning train, "
    "painted the wooden fence, looked for a small key, sang an old song, cooked a pot of soup"
).split(", ")
TIMES = "On Monday, In the evening, After the rain, Early in the morning, Late at night, One winter day".split(", ")


def words_problem(rng: random.Random) -> tuple[str, str]:
    word = rng.choice(WORDS)
    return f'Write a short story of three sentences about {rng.choice(TOPICS)}. Use the word "{word}".', word


def copy_problem(rng: random.Random) -> tuple[str, str]:
    text = " ".join(
        f"{time}, {person[0].lower() + person[1:]} {first} and {second}."
        for time, person, (first, second) in zip(
            rng.sample(TIMES, 3), rng.sample(PEOPLE, 3), [rng.sample(DEEDS, 2) for _ in range(3)], strict=True
        )
    )
    return f"Repeat this text word for word:\n\n{text}", text


TASKS = {"words": (words_problem, "has_word"), "copy": (copy_problem, "likeness")}


def problems(task: str, number: int, seed: int) -> list[dict[str, str]]:
    make, rng, found = TASKS[task][0], random.Random(f"{task} {seed}"), {}
    while len(found) < number:
        question, answer = make(rng)
        found[question] = {"question": question, "answer": answer}
    return list(found.values())


def prepare(task: str, stage: str, folder: Path) -> list[str]:
    """Write the problems, train where the stage asks for it, and return what recipes.gradient_noise is to know."""
    folder.mkdir(parents=True, exist_ok=True)
    data = folder / f"{task}.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in problems(task, 500, seed=1)))
    flags = ["--config", str(CONFIG), "--dataset_name", str(data), "--instruction", ""]
    flags += ["--reward_funcs", f"recipes.studies.language:{TASKS[task][1]}", "--reward_weights", "0", "1"]
    if stage == "start":
        return flags
    trained = folder / f"{task}-policy"
    if not (trained / "result.json").is_file():
        command = [sys.executable, str(ROOT / "recipes" / "math.py"), *flags, *TRAIN.split()]
        subprocess.run([*command, "--max_steps", str(STEPS[task]), "--output_dir", str(trained)], check=True)
    return [*flags, "--model_name_or_path", str(trained)]


def main(argv: list[str]) -> None:
    parser = argparse.ArgumentParser(
        prog="language", description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("task", choices=TASKS)
    parser.add_argument("--stage", choices=["start", "trained"], default="start")
    args, others = parser.parse_known_args(argv)
    folder = Path("runs/studies/language")
    command = [sys.executable, "-m", "recipes.gradient_noise"]
    if "--plot_only" not in others:
        command += [*prepare(args.task, args.stage, folder), *MEASURE.split()]
    command += ["--output_dir", str(folder / f"{args.task}-{args.stage}"), *others]
    sys.exit(subprocess.run(command).returncode)


if __name__ == "__main__":
    tidy_output()
    main(sys.argv[1:])
