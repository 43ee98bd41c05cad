"""
Do the intervals of a comparison hold with few prompts, and is its advice right? Many prompts are measured, then few are
drawn from them, again and again.

    OMP_NUM_THREADS=1 python -m recipes.studies.few_prompts --publish   # six minutes on one core

What all prompts say is taken for the truth. So few prompts are drawn without a repetition, at most a sixth of all.
"""

import argparse
import math
import sys
import warnings
from collections import Counter
from dataclasses import asdict
from pathlib import Path
from statistics import median
from typing import Any
from unittest.mock import patch

import torch

import trl_otb
from recipes.studies import render
from recipes.studies.tasks import PROMPTS_PER_BATCH, task_of, trainer_of
from trl_otb.comparison import efficiency
from trl_otb.comparison.efficiency import Comparison, Moments, compare, moments_of
from trl_otb.comparison.report import BaselineReport


BASELINES = ("ogb_pooled", "otb", "rloo", "rloo_pooled", "value")
FEW = (8, 16, 32)
N = 4
Found = dict[tuple[str, int], Moments]  # by baseline and N


def moments_by_prompt(trainer: Any, names: list[str], num_prompts: int, **options: Any) -> Found:
    """What a comparison measures, before it is summed over prompts."""
    kept: list[Found] = []
    report_of = BaselineReport.of

    def keep(prompts: list[dict], unbiased: dict[str, bool], scores_have_mean_zero: bool, **settings: Any) -> Any:
        certain = {name for name, of in unbiased.items() if of}
        kept.append(moments_of(prompts, certain, scores_have_mean_zero))
        return report_of(prompts, unbiased, scores_have_mean_zero, **settings)

    with patch.object(BaselineReport, "of", keep):
        trl_otb.compare_baselines(trainer, names, num_prompts, **options)
    return kept[0]


def of_prompts(moments: Found, prompts: torch.Tensor) -> Found:
    """Of some prompts alone."""

    def some(of: Moments) -> Moments:
        products = (matrix[prompts][:, prompts] for matrix in (of.signal, of.with_truth, of.truth))
        return Moments(of.square[prompts], *products, of.scale)

    return {key: some(of) for key, of in moments.items()}


def advice(rows: list[Comparison], prompts: int, own: str) -> str:
    """What a report of a run with the baseline `own` says to set, or keep."""
    report = BaselineReport(rows, N, [N], prompts, 64, PROMPTS_PER_BATCH, prompts, 0.5, 4.0, "", baseline=own)
    return report.best.name if report.best else "none is surely better"


def checked(moments: Found, few: int, times: int) -> tuple[list[dict], Counter]:
    """By baseline: how often the interval holds what all prompts say, and how wide it is; and what is advised."""
    number = len(next(iter(moments.values())).square)
    truth = {row.name: row.more_prompts for row in compare(moments, PROMPTS_PER_BATCH, N)}
    rng = torch.Generator().manual_seed(few)
    found: dict[str, list] = {name: [] for name in truth}
    advised: Counter = Counter()
    for _ in range(times):
        drawn = torch.randperm(number, generator=rng)[:few]
        rows = compare(of_prompts(moments, drawn), PROMPTS_PER_BATCH, N)
        advised[advice(rows, few, "otb")] += 1
        for row in rows:
            found[row.name].append(row.more_prompts)
    cells = []
    for name in sorted({*BASELINES} - {"rloo"}):  # which is the group mean, up to rounding
        of, right = found[name], truth[name].value
        cells.append(
            {
                "estimator": name,
                "drawn": few,
                "truth": [right, truth[name].low, truth[name].high],
                "held": sum(x.low <= right <= x.high for x in of) / times,
                "too_high": sum(x.low > right for x in of) / times,
                "width": wide if math.isfinite(wide := median(x.high - x.low for x in of)) else None,
            }
        )
    return cells, advised


def main(argv: list[str]) -> None:
    parser = argparse.ArgumentParser(prog="few_prompts", description=__doc__.splitlines()[1])
    parser.add_argument("--task", default="sums")
    parser.add_argument("--num_prompts", type=int, default=192)
    parser.add_argument("--times", type=int, default=300, help="that few prompts are drawn")
    parser.add_argument("--publish", action="store_true", help="put the numbers into the results and the pages")
    parser.add_argument("--output_dir", type=Path, default=Path("runs/studies/few_prompts"))
    args = parser.parse_args(argv)
    saved = args.output_dir / f"{args.task}-{args.num_prompts}.pt"
    if not saved.exists():
        options = {"completions_per_prompt": 64, "group_sizes": [N], "projection": 4096, "seed": 0}
        trainer = trainer_of(task_of(args.task), seed=0, disable_tqdm=False)
        moments = moments_by_prompt(trainer, [*BASELINES], args.num_prompts, **options)
        saved.parent.mkdir(parents=True, exist_ok=True)
        torch.save({key: asdict(of) for key, of in moments.items()}, saved)
    moments = {key: Moments(**of) for key, of in torch.load(saved, weights_only=True).items()}
    cells, advised = [], {}
    with patch.object(efficiency, "DRAWS", 1000):  # for speed
        for few in FEW:
            if 6 * few <= args.num_prompts:
                some, counted = checked(moments, few, args.times)
                cells, advised[str(few)] = cells + some, dict(counted.most_common())
    results = {"command": "python -m recipes.studies.few_prompts", "task": args.task, "prompts": args.num_prompts}
    results |= {"times": args.times, "cells": cells, "advised": [{"drawn": few} | of for few, of in advised.items()]}
    print(render.of_few_prompts(results))
    print(results["advised"])
    if args.publish:
        render.save("few_prompts", results)
        render.render()


if __name__ == "__main__":
    warnings.filterwarnings("ignore")
    main(sys.argv[1:])
