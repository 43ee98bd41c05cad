"""
How noisy is a step under each baseline, and with each part of `value` left out? Of all tasks, at N = 4.

    OMP_NUM_THREADS=1 python -m recipes.studies.value --tasks sums                          # 5 minutes on one core
    OMP_NUM_THREADS=1 python -m recipes.studies.value --num_prompts 16 --tasks words --progress  # SmolLM2: longer
    python -m recipes.studies.value --tasks sums --plot_only --publish                      # into value.md

Each task is measured by trl_otb.compare_baselines, with pools of 64 completions (language models: 16); θ has seen 8
batches of other prompts. With `--progress` there is also `value` that reads the reward of the text so far, on the same
completions. The policies of the scratchpad (recipes/toy/scratchpad.py) make as many mistakes at every length; what
grows is the number of free choices that do no harm. The mistakes on sums and the calculator are improbable tokens. A
lake has one reward at the end, or (`lake_6_turns` and the like) one per turn.
"""

import argparse
import json
import math
import sys
import warnings
from dataclasses import replace
from pathlib import Path

import torch

import trl_otb
from recipes.studies import language, render
from recipes.studies.render import PROGRESS
from recipes.studies.tasks import PROMPTS_PER_BATCH, task_of, trainer_of
from recipes.toy import lake, scratchpad, warm_start
from trl_otb.baselines import BASELINES, Value


TOY = {
    **{f"scratchpad_{tokens}": f"T = {tokens}" for tokens in scratchpad.STEPS},
    "scratchpad_mixed": "mixed lengths",
    "sums": "sums",
    "calculator": "calculator",
    **{f"lake_{turns}": f"{turns} turns" for turns in lake.SIDES},
    **{f"lake_{turns}_turns": f"{turns} turns, rewards per turn" for turns in lake.SIDES},
    "lucky": "success by luck",
}
TASKS = TOY | {
    "copy": "SmolLM2 copying",
    "words": "SmolLM2 stories",
    "chain_sum": "SmolLM2 sums",
    "word_sequence_reversal": "SmolLM2 reversing words",
    "word_sorting": "SmolLM2 sorting words",
    "column_sums": "SmolLM2 sums by column",
    "blocks_columns": "SmolLM2's blocks, column sums",
    "blocks_counting": "SmolLM2's blocks, counting",
    "blocks_sorting": "SmolLM2's blocks, sorting digits",
    "whole_columns": "SmolLM2's 30 blocks, column sums",
    "whole_counting": "SmolLM2's 30 blocks, counting",
    "gemma_copy": "Gemma3 copying",
    "gemma_words": "Gemma3 stories",
    "gemma_word_sequence_reversal": "Gemma3 reversing words",
    "gemma_word_sorting": "Gemma3 sorting words",
}


class Part(Value):
    """`value` without progress, or without more of its parts."""

    states = luck = energy = True
    batches = math.inf  # that it learns from

    def __init__(self):
        super().__init__()
        self.left = self.batches

    def _seen(self, local):
        states = local.states if self.states else local.states[..., :0]
        weights = local.loss_energy if self.energy else local.mask
        # Without a ratio of draws the mask, beside energies, would read as ratios of the loss, and luck be left out
        ratio = torch.ones_like(local.mask) if local.draw_ratio is None else local.draw_ratio
        return replace(local, states=states, progress=None, loss_energy=weights, draw_ratio=ratio * self.luck)

    def adjust(self, local, b0):
        return super().adjust(self._seen(local), b0)

    def update(self, local, *given):
        self.left -= 1
        return super().update(self._seen(local), *given) if self.left >= 0 else None


NO_PROGRESS = "value_no_progress"
PARTS = {
    "value_weights_one": {"energy": False},  # an ordinary value function: every token counts alike
    "value_no_luck": {"luck": False},  # later luck is left out
    "value_no_states": {"states": False},
    "value_two_batches": {"batches": 2},
}
FLAGS = {name: getattr(BASELINES["value"], name) for name in ("needs", "per_token", "scope", "unbiased")}
for _name, _options in ({NO_PROGRESS: {}} | PARTS).items():
    trl_otb.register_baseline(_name, **FLAGS)(type(_name, (Part,), _options))
NAMES = ["rloo_pooled", "ogb_pooled", "value", *PARTS]
OF_TOYS = {"completions_per_prompt": 64, "group_sizes": [4]}


def measured(task: str, folder: Path, args: argparse.Namespace) -> dict:
    """The report of [`~trl_otb.compare_baselines`], kept in `folder`: a task that is there is not measured again."""
    name = f"{task}-policy{args.policy}" if args.policy else task
    saved = folder / f"{name}-seed{args.seed}{'-progress' if args.progress else ''}-{args.num_prompts}-prompts.json"
    if not args.plot_only and not saved.exists():
        progress = {"progress_funcs": ["rewards"]} if args.progress else {}
        if task in TOY:
            of = task_of(task, args.seed)
            if args.policy:
                of = replace(of, policy=warm_start.policy(of.policy.name.rpartition("-")[0], seed=args.policy))
            trainer, options = trainer_of(of, seed=args.seed, disable_tqdm=False, **progress), OF_TOYS
        else:
            trainer, options = language.trainer_at(task, args.seed, **progress), language.measured(task)
        names = [*NAMES, NO_PROGRESS] if args.progress else NAMES
        options = options | {"prompts_per_batch": PROMPTS_PER_BATCH, "projection": 4096, "seed": args.seed}
        report = trl_otb.compare_baselines(trainer, names, args.num_prompts, **options)
        folder.mkdir(parents=True, exist_ok=True)
        saved.write_text(json.dumps(report.to_json() | {"release": trl_otb.__version__}))
    return json.loads(saved.read_text())


def cells_of(report: dict) -> list[dict]:
    """
    Of a report as plain data, over the group mean's: efficiency and noise to signal on the same prompts, and the
    variance of a step whose prompts are drawn (`step`); the cosine, and what `value` logged while it learned. Where it
    read progress, the one without it is `value`, and there is the ratio of the two, whose interval holds for
    all pairs of baselines at once.
    """
    rows = {row["name"]: row for row in report["comparisons"]}
    titles = {"value": PROGRESS, NO_PROGRESS: "value"} if NO_PROGRESS in rows else {}
    same = {"prompts": report["num_prompts"], "release": report["release"]}

    def over(gain: dict) -> list[float | None]:
        ends = (gain[end] for end in ("value", "high", "low"))
        return [None if x is None else 1 / (1 + x) for x in ends]

    def cell(name: str, row: dict) -> dict:
        learned = {key: report["learned"].get(f"{name}/{key}") for key in ("explained", "r2_at_end")}
        return same | {
            "estimator": titles.get(name, name),
            "efficiency": [row["over_group_mean"][end] for end in ("value", "low", "high")],
            "noise": [row["noise_over_group_mean"][end] for end in ("value", "low", "high")],
            "step": over(row["more_prompts"]),
            "cosine": row["cosine"]["value"],
            **{key: value for key, value in learned.items() if value is not None},
        }

    cells = [cell(name, row) for name, row in rows.items()]
    if titles:
        more = rows["value"]["more_than"][NO_PROGRESS]
        cells.append(same | {"estimator": f"{PROGRESS} over value", "step": over(more)})
    return cells


def main(argv: list[str]) -> None:
    parser = argparse.ArgumentParser(prog="value", description=__doc__.splitlines()[1])
    parser.add_argument("--tasks", nargs="+", choices=TASKS, required=True)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--policy", type=int, default=0, help="the seed of a toy policy's warm start")
    parser.add_argument("--num_prompts", type=int, default=64)
    parser.add_argument("--progress", action="store_true", help="with `value` that reads the reward of the text so far")
    parser.add_argument("--plot_only", action="store_true", help="only what is saved")
    parser.add_argument("--publish", action="store_true", help="put it into the results and the pages")
    parser.add_argument("--output_dir", type=Path, default=Path("runs/studies/value"))
    args = parser.parse_args(argv)
    if args.policy and (models := [task for task in args.tasks if task not in TOY]):
        parser.error(f"--policy is for toys, whose policies are trained from a seed, and not for {models[0]}")
    if args.publish and args.seed != render.load("noise")["seed"]:
        parser.error(f"--publish is for the seed of the page, {render.load('noise')['seed']}")
    columns = {}
    try:
        for task in args.tasks:
            title = f"{TASKS[task]}{f', policy {args.policy}' if args.policy else ''}"
            columns[title] = cells_of(measured(task, args.output_dir, args))
            print(render.both_units({title: columns[title]}), flush=True)
        if args.publish:
            render.publish("noise", columns)
    except (FileNotFoundError, ValueError) as error:
        parser.error(str(error))


if __name__ == "__main__":
    warnings.filterwarnings("ignore")
    main(sys.argv[1:])
