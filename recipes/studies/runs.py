"""What learning curves say: a row per run, of which tables and pictures are made."""

import math
import statistics
from collections.abc import Sequence
from typing import Any

import numpy
import pandas
from scipy import stats

from recipes import compare


TUNING_SEEDS = (101, 102, 103, 104, 105)  # every learning rate is tried with the first two, the best two with all
DRAWS = 2000  # of the bootstrap
STEP = ("reward", "tokens", "grad_norm", "noise_scale", "explained")  # what is kept of a step; tokens are summed up


def summary(result: dict[str, Any]) -> dict[str, Any]:
    """
    What is published of a run: `curve`, the reward in each tenth of it, and `tokens`, all that it generated; and in
    `steps` what each step logged, which older rows lack.
    """
    kept = ("task", "n", "baseline", "learning_rate", "seed", "policy", "held_out", "release")
    rewards = numpy.array_split(result["reward"], 10)
    curve = [float(some.mean()) for some in rewards if len(some)]
    row = {key: result[key] for key in kept if key in result} | {"tokens": result["tokens"][-1], "curve": curve}
    steps = {key: result[key] for key in STEP if any(value is not None for value in result.get(key, []))}
    return row | {"steps": steps}


def score(row: dict[str, Any]) -> float:
    """Of a run, by which learning rates are tuned too: its mean reward, at equal tokens per step."""
    return statistics.fmean(row["curve"])


def collapsed(row: dict[str, Any]) -> bool:
    """The last tenth of the run earns less than two thirds of the best one."""
    return row["curve"][-1] < 2 / 3 * max(row["curve"])


def points(row: dict[str, Any]) -> compare.Curve:
    """A run's reward over the tokens that it generated, as moving means over a tenth of it, or in its tenths."""
    if "steps" in row:
        return compare.smoothed(row["steps"]["tokens"], row["steps"]["reward"])
    tenths = (numpy.arange(len(row["curve"])) + 0.5) / len(row["curve"])
    return row["tokens"] * tenths, numpy.asarray(row["curve"])


def tokens_saved(rows: list[dict[str, Any]], reference: str = "group_mean") -> list[dict[str, Any]]:
    """
    Of one task's runs, an arm per row, each beside `reference` with N = 4, at their tuned rates: how many tokens fewer
    it needs to the levels of [`recipes.compare.LEVELS`], by pairs of seeds from the same policy.
    """
    of = {(arm["baseline"], arm["n"]): arm for arm in arms(rows)}
    control = {(run["seed"], run["policy"]): run for run in of.get((reference, 4), {"runs": []})["runs"]}
    found = []
    for (baseline, n), arm in of.items():
        own = {(run["seed"], run["policy"]): run for run in arm["runs"]}
        pairs = [key for key in own if key in control]
        if (baseline, n) != (reference, 4) and pairs:
            first, second = ([points(some[key]) for key in pairs] for some in (control, own))
            changes, sooner = compare.tokens_saved(first, second)
            mean = compare.stacked(first).mean(axis=0)
            row = {"baseline": baseline, "n": n, "pairs": len(pairs), "changes": changes, "sooner": sooner}
            found.append(row | {"gain": [mean[1][0], mean[1].max()]})
    return found


def tried(rows: list[dict[str, Any]], seeds: Sequence[int]) -> pandas.DataFrame:
    """By learning rate, of one arm's runs with these seeds: their mean score, their number, and how many collapsed."""
    runs = [(row["learning_rate"], score(row), collapsed(row)) for row in rows if row["seed"] in seeds]
    by_rate = pandas.DataFrame(runs, columns=["rate", "score", "collapsed"]).groupby("rate")
    return by_rate.agg(score=("score", "mean"), seeds=("score", "size"), collapsed=("collapsed", "sum"))


def best_rates(rows: list[dict[str, Any]], seeds: Sequence[int]) -> list[float]:
    """The learning rates at which an arm ran with all of `seeds`, the best last."""
    found = tried(rows, seeds)
    return [*found[found["seeds"] == len(seeds)].sort_values("score", kind="stable").index]


def estimate(values: list[float]) -> list[float | None] | None:
    """`[mean, low, high]` with a 95 % interval by bootstrap over seeds, which a single seed does not have."""
    if len(values) < 2:
        return [*values, None, None] if values else None
    drawn = stats.bootstrap((values,), numpy.mean, n_resamples=DRAWS, method="percentile", rng=0)
    return [statistics.fmean(values), *map(float, drawn.confidence_interval)]


def arms(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """
    A row per arm of one task, at its tuned learning rate, by seeds that did not tune it; beside the group mean's run
    of the same seed and from the same policy. The group mean is beside itself: seeds in pairs. None: unknown.
    """
    of_arm: dict[tuple[int, str], list[dict[str, Any]]] = {}
    for row in sorted(rows, key=lambda row: (row["n"], row["baseline"] != "group_mean")):
        of_arm.setdefault((row["n"], row["baseline"]), []).append(row)
    found, control = [], {}
    for (n, baseline), of in of_arm.items():
        chose = tried(of, TUNING_SEEDS).to_dict("index")
        untuned = sorted({row["learning_rate"] for row in of if row["seed"] not in TUNING_SEEDS})
        best = max(untuned, key=lambda rate: chose[rate]["score"] if rate in chose else -math.inf, default=None)
        at_best = [row for row in of if row["learning_rate"] == best and row["seed"] not in TUNING_SEEDS]
        scores = {(row["seed"], row["policy"]): score(row) for row in at_best}
        if baseline == "group_mean":
            control, in_turn = control | {n: scores}, [*scores.values()]
            ahead = [second - first for first, second in zip(in_turn[::2], in_turn[1::2], strict=False)]
        else:
            beside = control.get(n, {})
            ahead = [own - beside[key] for key, own in scores.items() if key in beside]
        arm: dict[str, Any] = {
            "n": n,
            "baseline": baseline,
            "learning_rate": best,
            "runs": at_best,
            "seeds": len(at_best),
            "over_the_run": estimate([*scores.values()]),
            "minus_group_mean": estimate(ahead),
            "held_out": estimate([100 * row["held_out"] for row in at_best]),
            "collapsed": sum(map(collapsed, at_best)) if at_best else None,
            "won": f"{sum(x > 0 for x in ahead)} of {sum(x != 0 for x in ahead)}" if ahead else None,
            "rates": {f"{rate:g}": at for rate, at in chose.items()},
        }
        found.append(arm)
    return found
