"""
Does the gain of a baseline by energy grow with the horizon? On a scratchpad of 10 to 300 tokens, and in 6 to 46 turns.

    OMP_NUM_THREADS=1 python -m recipes.studies.horizon              # an hour on one core; can be stopped and go on
    OMP_NUM_THREADS=1 python -m recipes.studies.horizon --tasks 10 30 100 sums --num_prompts 32
    OMP_NUM_THREADS=1 python -m recipes.studies.horizon --tasks 10 --seed 1 --output_dir runs/studies/horizon-1
    OMP_NUM_THREADS=1 python -m recipes.studies.horizon --family turns --num_prompts 64
    python -m recipes.studies.horizon --plot_only
    python -m recipes.studies.horizon --tasks 100 300 --plot_only --publish   # two columns of horizon.md, horizon.png

The policies of the scratchpad (recipes/toy/scratchpad.py) make as many mistakes at every length; what grows is the
number of free choices that do no harm. Sums and the calculator, whose mistakes are improbable tokens, are the
contrast. Each task is measured by trl_otb.compare_baselines.
"""

import argparse
import sys
from pathlib import Path

from recipes.common.launching import tidy_output
from recipes.studies import render
from recipes.studies.tasks import cells_of, compared, noise_flags, task_of, trainer_of
from recipes.toy import lake


# Completions per prompt
TASKS = {
    "tokens": {"10": 256, "30": 256, "100": 256, "300": 128, "sums": 256, "calculator": 128},
    "turns": {f"lake_{turns}{kind}": 128 for kind in ("", "_turns") for turns in lake.SIDES},
}
GROUP_SIZES = {"tokens": [4, 8, 32], "turns": [4, 8]}
RESULTS = {"tokens": "horizon", "turns": "turns"}


def main(argv: list[str]) -> None:
    parser = argparse.ArgumentParser(prog="horizon", description=__doc__.splitlines()[1])
    parser.add_argument("--family", choices=TASKS, default="tokens", help="what the dial counts")
    every = [task for tasks in TASKS.values() for task in tasks]
    parser.add_argument("--tasks", nargs="+", choices=every, help="some of the family's tasks; by default all")
    noise_flags(parser, seed=0, num_prompts=16)
    args = parser.parse_args(argv)
    of_family, name = TASKS[args.family], RESULTS[args.family]
    if args.publish and args.seed != render.load(name)["seed"]:
        parser.error(f"--publish is for the seed of the page, {render.load(name)['seed']}")
    if others := [task for task in args.tasks or [] if task not in of_family]:
        known = ", ".join(of_family)
        parser.error(f"--tasks: {', '.join(others)} is not in the family {args.family}, which has {known}")
    folder = args.output_dir or Path("runs/studies") / name
    columns = {}
    try:
        for task in (task for task in of_family if task in (args.tasks or of_family)):
            of = f"scratchpad_{task}" if task.isdigit() else task
            report = compared(
                folder / task,
                lambda of=of: trainer_of(task_of(of, args.seed), seed=args.seed, disable_tqdm=False),
                args,
                completions_per_prompt=of_family[task],
                group_sizes=GROUP_SIZES[args.family],
            )
            columns[f"T = {task}" if task.isdigit() else task] = cells_of(report)
        render.report(columns, folder)
        render.draw(name, columns, folder / "horizon.png")
        if args.publish:
            render.publish(name, columns)
    except ValueError as error:
        parser.error(str(error))


if __name__ == "__main__":
    tidy_output()
    main(sys.argv[1:])
