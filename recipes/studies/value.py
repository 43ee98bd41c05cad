"""
What do baselines gain as completions grow longer and groups larger, what `value`, and each of its parts?

    OMP_NUM_THREADS=1 python -m recipes.studies.value --tasks sums   # minutes on one core; all: two hours
    python -m recipes.studies.value --num_prompts 16 --tasks words   # a language model: half an hour to two hours
    python -m recipes.studies.value --plot_only --publish            # the columns of value.md, and pictures
    python -m recipes.studies.value --steps --num_prompts 64 --tasks sums   # few baselines, at N = 4, on many prompts
    python -m recipes.studies.value --progress --num_prompts 16 --tasks words   # with the reward of the text so far

Each task is measured by trl_otb.compare_baselines, with pools of 128 completions (SmolLM2: 16); θ has seen 8 batches
of other prompts, four completions each. The policies of the scratchpad (recipes/toy/scratchpad.py) make as many
mistakes at every length; what grows is the number of free choices that do no harm. The mistakes on sums and the
calculator are improbable tokens. A lake has one reward at the end, or (`lake_6_turns` and the like) one per turn.
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
from recipes.studies.tasks import PROMPTS_PER_BATCH, task_of, trainer_of
from recipes.toy import lake, scratchpad, warm_start
from trl_otb.baselines import BASELINES, Value


# By the task, and prompts per step where they are not 16; and the column's title
TASKS = {
    **{f"scratchpad_{tokens}": f"T = {tokens}" for tokens in scratchpad.STEPS},
    "sums": "sums",
    "calculator": "calculator",
    **{f"lake_{turns}": f"{turns} turns" for turns in lake.SIDES},
    **{f"lake_{turns}_turns": f"{turns} turns, rewards per turn" for turns in lake.SIDES},
    "scratchpad_mixed": "mixed lengths, 16 prompts",
    "scratchpad_mixed/4": "mixed lengths, 4 prompts",
    "lucky_even": "even rates, 16 prompts",
    "lucky_even/4": "even rates, 4 prompts",
    "lucky_unequal": "U-shaped rates, 16 prompts",
    "lucky_unequal/4": "U-shaped rates, 4 prompts",
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
    "gemma_copy": "Gemma3 copying",
    "gemma_words": "Gemma3 stories",
    "gemma_word_sequence_reversal": "Gemma3 reversing words",
    "gemma_word_sorting": "Gemma3 sorting words",
}
TITLES = {"otb_loo": "otb, one left out"}  # of estimators, as they are published
TOY = [task for task, title in TASKS.items() if not title.startswith(("SmolLM2", "Gemma3"))]
BESIDE = ("otb", "otb_loo", "rloo", "rloo_pooled", "ogb_pooled")
STEPS = ("ogb_pooled", "rloo", "rloo_pooled", "value")
FEWER = {"completions_per_prompt": 64, "group_sizes": [4], "projection": 4096}
MEASURED = {"completions_per_prompt": 128, "group_sizes": [4, 8, 32], "projection": 4096}


class Part(Value):
    """Per token: `value` without one of its parts."""

    states = luck = energy = progress = True
    without = ()  # of what it is made of
    batches = math.inf  # that it learns from

    def __init__(self):
        super().__init__(self.without)
        self.left = self.batches

    def _seen(self, local):
        states = local.states if self.states else local.states[..., :0]
        left_out = {} if self.luck else {"draw_ratio": torch.zeros_like(local.mask)}
        left_out |= {} if self.energy else {"loss_energy": local.mask}
        left_out |= {} if self.progress else {"progress": None}
        return replace(local, states=states, **left_out)

    def adjust(self, local, b0):
        return super().adjust(self._seen(local), b0)

    def update(self, local, *given):
        self.left -= 1
        return super().update(self._seen(local), *given) if self.left >= 0 else None


ABLATIONS = {
    "value_weights_one": {"energy": False},  # an ordinary value function: every token counts alike
    "value_no_states": {"states": False},
    "value_no_luck": {"luck": False},  # later luck is left out
    "value_no_v": {"without": ("V", "V²", "V m", "V √n")},
    "value_two_batches": {"batches": 2},
}
NO_PROGRESS = {"value_no_progress": {"progress": False}}
FLAGS = {name: getattr(BASELINES["value"], name) for name in ("needs", "per_token", "scope", "unbiased")}
for _name, _options in (ABLATIONS | NO_PROGRESS).items():
    trl_otb.register_baseline(_name, **FLAGS)(type(_name, (Part,), _options))


def measured(task: str, folder: Path, args: argparse.Namespace) -> dict:
    """The report of [`~trl_otb.compare_baselines`], kept in `folder`: a task that is there is not measured again."""
    name, _, prompts = task.partition("/")
    here = folder / f"{task.replace('/', '-')}-seed{args.seed}{f'-policy{args.policy}' if args.policy else ''}"
    parts = [str(args.num_prompts), "prompts", *(args.baselines or ()), *(["progress"] if args.progress else [])]
    saved = here / f"{'-'.join(parts)}.json"
    if not args.plot_only and not saved.exists():
        progress = {"progress_funcs": ["rewards"]} if args.progress else {}
        if task in TOY:
            given = {"seed": args.seed, "disable_tqdm": False}
            of = task_of(name, args.seed)
            if args.policy:
                of = replace(of, policy=warm_start.policy(of.policy.name.rpartition("-")[0], seed=args.policy))
            trainer, options = trainer_of(of, **given, **progress), MEASURED
        else:
            trainer, options = language.trainer_at(name, args.seed, **progress), language.measured(name)
        options = options | {"prompts_per_batch": int(prompts or PROMPTS_PER_BATCH), "seed": args.seed}
        names = args.baselines or (["value", *NO_PROGRESS] if args.progress else [*BESIDE, "value", *ABLATIONS])
        if args.steps:
            names, options = [*STEPS[task not in TOY :]], options | (FEWER if task in TOY else {"projection": 4096})
        report = trl_otb.compare_baselines(trainer, names, args.num_prompts, **options)
        here.mkdir(parents=True, exist_ok=True)
        report.save(here)
        saved.write_text(json.dumps(report.to_json() | {"release": trl_otb.__version__}))
    return json.loads(saved.read_text())


def cells_of(report: dict) -> list[dict]:
    """
    Of a report as plain data, over the group mean's: efficiency and noise to signal on the same prompts, and the
    variance of a step whose prompts are drawn (`step`); the latter at as many completions per step, over that of the
    control at the run's own N; the cosine, and what was explained while it learned.
    """
    rows = report["comparisons"]
    mean = {row["n"]: 1 + row["more_completions"]["value"] for row in rows if row["name"] == "group_mean"}

    def cell(row: dict) -> dict:
        more = [row["more_completions"][end] for end in ("value", "high", "low")]
        noise = [row["noise_over_group_mean"][end] for end in ("value", "low", "high")]
        if None not in more:
            equal = [1 / (1 + x) for x in more]
        elif row["n"] == report["group_size"]:  # biased, so that no N but its own has an interval
            equal = noise
        else:
            known = noise[0] is not None and row["n"] in mean
            equal = [noise[0] / mean[row["n"]] if known else None, None, None]
        gain = [row["more_prompts"][end] for end in ("value", "high", "low")]
        explained = report["learned"].get(f"{row['name']}/explained")
        return {
            "prompts": report["num_prompts"],
            "n": row["n"],
            "estimator": TITLES.get(row["name"], row["name"]),
            "efficiency": [row["over_group_mean"][end] for end in ("value", "low", "high")],
            "noise": noise,
            "step": [None if x is None else 1 / (1 + x) for x in gain],
            "equal_completions": equal,
            "cosine": row["cosine"]["value"],
            **({} if explained is None else {"explained": explained}),
            **({"release": report["release"]} if "release" in report else {}),
        }

    return [cell(row) for row in rows]


def with_progress_over_without(report: dict) -> list[dict]:
    """
    [`cells_of`], and the variance of a step of `value` over that without progress; its interval holds for all pairs of
    baselines at once.
    """
    more = next(row["more_than"]["value_no_progress"] for row in report["comparisons"] if row["name"] == "value")
    kept = {"prompts": report["num_prompts"], "n": report["group_size"], "estimator": "value over value_no_progress"}
    return [*cells_of(report), kept | {"step": [1 / (1 + more[end]) for end in ("value", "high", "low")]}]


def main(argv: list[str]) -> None:
    parser = argparse.ArgumentParser(prog="value", description=__doc__.splitlines()[1])
    parser.add_argument("--tasks", nargs="+", choices=TASKS, default=TOY, help="by default all but SmolLM2's")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--policy", type=int, default=0, help="the seed of a toy policy's warm start")
    parser.add_argument("--num_prompts", type=int, default=24)
    parser.add_argument("--baselines", nargs="+", choices=BASELINES, help="by default those of the page")
    parser.add_argument("--progress", action="store_true", help="`value` with the text's reward so far, and without")
    parser.add_argument("--steps", action="store_true", help="few baselines at N = 4, for many prompts")
    parser.add_argument("--plot_only", action="store_true", help="tables and pictures from what is saved")
    parser.add_argument("--publish", action="store_true", help="put the columns into the results and the pages")
    parser.add_argument("--output_dir", type=Path, help="by default runs/studies/value, or …/steps")
    args = parser.parse_args(argv)
    if args.baselines and (args.steps or args.publish):
        parser.error("--baselines is for no other of these options, whose tables have baselines of their own")
    if args.policy and (models := [task for task in args.tasks if task not in TOY]):
        parser.error(f"--policy is for toys, whose policies are trained from a seed, and not for {models[0]}")
    kinds = [kind for kind in ("steps", "progress") if getattr(args, kind)]
    if len(kinds) > 1:
        parser.error(f"{' and '.join(f'--{kind}' for kind in kinds)} are studies of their own: choose one")
    name = kinds[0] if kinds else "later_luck"
    args.output_dir = args.output_dir or Path("runs/studies", kinds[0] if kinds else "value")
    if args.publish and args.seed != render.load(name)["seed"]:
        parser.error(f"--publish is for the seed of the page, {render.load(name)['seed']}")
    reports = {}
    try:
        for task in args.tasks:
            title = f"{TASKS[task]}{f', policy {args.policy}' if args.policy else ''}"
            reports[title] = measured(task, args.output_dir, args)
        columns = {title: cells_of(report) for title, report in reports.items()}
        render.report(columns, args.output_dir)
        if args.publish and args.progress:
            columns = {f"{title}, compared": with_progress_over_without(report) for title, report in reports.items()}
        if args.publish:
            render.publish(name, columns)
    except (FileNotFoundError, ValueError) as error:
        parser.error(str(error))


if __name__ == "__main__":
    warnings.filterwarnings("ignore")
    main(sys.argv[1:])
