"""
Train a policy on verifiable problems with the Optimal Token Baseline.

    accelerate launch recipes/math.py                                       # no hub, no GPU: recipes/math_cpu.yaml
    accelerate launch recipes/math.py --baseline group_mean                 # the same run with GRPO's own baseline
    accelerate launch recipes/math.py --config recipes/math_smollm2.yaml    # a real pretrained model, with LoRA
    accelerate launch recipes/math.py --model_name_or_path FOLDER --dataset_name problems.jsonl
    accelerate launch recipes/math.py --resume_from_checkpoint latest

Two x86-64 cores, 2026-11-21, seed 1: 1 min 41 s, plus 40 s of warm start on first use; held-out accuracy
37.6 % ± 2.5 before and 71.6 % ± 2.6 after (avg@4, 176 problems). More runs: recipes/README.md.

To adapt it, copy the file under any name to any folder of the checkout, and change `load_data` and `accuracy_reward`.
"""

import sys


if __name__ == "__main__":
    sys.path.append(sys.path.pop(0))  # this folder: while it comes first, `import math` finds this file
    from pathlib import Path

    checkout = (folder for folder in Path(__file__).resolve().parents if (folder / "recipes" / "common").is_dir())
    sys.path.insert(0, str(next(checkout, ".")))

from recipes.common.launching import tidy_output


tidy_output()

from collections.abc import Callable

from recipes.common.arguments import RecipeArguments
from recipes.common.errors import constructing, launch
from recipes.common.experiment import Experiment
from recipes.common.grading import final_text, find_answer
from recipes.common.problems import Problems, load_problems
from trl_otb import OTBGRPOTrainer


CONFIG = "math_cpu.yaml"  # defaults for options that are not on the command line; `--config` replaces it


def load_data(settings: RecipeArguments, seed: int) -> Problems:
    """
    The data: two datasets with the columns `question` and `answer`, and a name for messages.

    Replace it with your own, for instance

        data = load_dataset("openai/gsm8k", "main", split="train")
        data = data.map(lambda row: {"answer": row["answer"].split("####")[-1].strip()})
        return Problems(train=data.select(range(200, len(data))), held_out=data.select(range(200)), name="GSM8K")
    """
    return load_problems(settings, seed)


def accuracy_reward(problems: Problems) -> Callable[..., list[float]]:
    """
    The reward: 1 for a correct final answer, 0 for a wrong one. Its mean on held-out problems is the accuracy.

    Replace the inner function with your own. Each list has one entry per completion; the other columns of the data are
    further lists in `kwargs`. To reward turns, return a list with one number per turn for each completion.
    """

    def accuracy(completions, answer, entry=None, **kwargs) -> list[float]:
        entries = entry or [None] * len(answer)
        found = [find_answer(final_text(completion)) for completion in completions]
        return [problems.grade(f, a, e) for f, a, e in zip(found, answer, entries, strict=True)]

    return accuracy


def main(argv: list[str]) -> None:
    experiment = Experiment(__file__, RecipeArguments, CONFIG, argv)  # options, and the folder of the run
    if experiment.finished:
        return
    problems = load_data(experiment.settings, experiment.args.seed)
    with constructing(experiment.model_name):
        trainer = OTBGRPOTrainer(
            **experiment.model_and_prompts(problems),  # from --model_name_or_path, --use_peft, --instruction, …
            reward_funcs=experiment.rewards(accuracy_reward(problems)),
            args=experiment.args,
            callbacks=experiment.callbacks,  # held-out accuracy, and a checkpoint on Ctrl-C
        )
    experiment.train(trainer, problems)  # evaluates before and after


if __name__ == "__main__":
    launch(__file__, main, sys.argv[1:])
