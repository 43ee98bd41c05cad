"""What learning curves say: a row per run, of which tables and pictures are made."""

import statistics
from collections.abc import Sequence
from typing import Any

import numpy
from scipy import stats


TUNING_SEEDS = (101, 102, 103, 104, 105)  # every learning rate is tried with the first two, the best two with all
DRAWS = 2000  # of the bootstrap


def summary(result: dict[str, Any]) -> dict[str, Any]:
    """What is published of a run: `curve`, the reward in each tenth of it, and `tokens`, all that it generated."""
    kept = ("task", "n", "baseline", "learning_rate", "seed", "policy", "held_out", "strata")
    rewards = numpy.array_split(result["reward"], 10)
    curve = [float(some.mean()) for some in rewards if len(some)]
    return {key: result[key] for key in kept if key in result} | {"tokens": result["tokens"][-1], "curve": curve}


def score(row: dict[str, Any]) -> float:
    """Of a run, by which learning rates are tuned too: its mean reward, at equal tokens per step."""
    return statistics.fmean(row["curve"])


def collapsed(row: dict[str, Any]) -> bool:
    """The last tenth of the run earns less than two thirds of the best one."""
    return row["curve"][-1] < 2 / 3 * max(row["curve"])


def by_rate(rows: list[dict[str, Any]], seeds: Sequence[int]) -> dict[float, list[dict[str, Any]]]:
    """Those of one arm with these seeds, by learning rate."""
    found: dict[float, list[dict[str, Any]]] = {}
    for row in rows:
        if row["seed"] in seeds:
            found.setdefault(row["learning_rate"], []).append(row)
    return found


def best_rates(rows: list[dict[str, Any]], seeds: Sequence[int]) -> list[float]:
    """The learning rates at which an arm ran with all of `seeds`, the best last."""
    scores = {rate: [score(row) for row in of] for rate, of in by_rate(rows, seeds).items() if len(of) == len(seeds)}
    return sorted(scores, key=lambda rate: statistics.fmean(scores[rate]))


def estimate(values: list[float]) -> list[float | None]:
    """`[mean, low, high]` with a 95 % interval by bootstrap over seeds, which a single seed does not have."""
    if len(values) < 2:
        return [*values, None, None]
    drawn = stats.bootstrap((values,), numpy.mean, n_resamples=DRAWS, method="percentile", rng=0)
    return [statistics.fmean(values), *map(float, drawn.confidence_interval)]


def arms(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """
    A row per arm of one task, at its tuned learning rate, by seeds that did not tune it; beside the group mean's run
    of the same seed and from the same policy. The last row is the group mean beside itself: seeds in pairs.
    """
    of_arm: dict[tuple[int, str], list[dict[str, Any]]] = {}
    for row in sorted(rows, key=lambda row: (row["n"], row["baseline"] != "group_mean")):
        of_arm.setdefault((row["n"], row["baseline"]), []).append(row)
    found, control = [], {}
    for (n, baseline), of in of_arm.items():
        untuned = {row["learning_rate"] for row in of if row["seed"] not in TUNING_SEEDS}
        best = (best_rates(of, TUNING_SEEDS) or ([*untuned] if len(untuned) == 1 else [None]))[-1]
        at_best = [row for row in of if row["learning_rate"] == best and row["seed"] not in TUNING_SEEDS]
        own = {(row["seed"], row["policy"]): row for row in at_best}
        tuning = {
            f"{rate:g}": {
                "score": statistics.fmean(map(score, tried)),
                "seeds": len(tried),
                "collapsed": sum(map(collapsed, tried)),
            }
            for rate, tried in sorted(by_rate(of, TUNING_SEEDS).items())
        }
        arm = {"n": n, "baseline": baseline, "learning_rate": best, "seeds": len(own), "rates": tuning}
        if baseline == "group_mean":
            control[n] = own
        beside = control.get(n, {})
        ahead = [score(row) - score(beside[key]) for key, row in own.items() if key in beside]
        if baseline == "group_mean":
            in_turn = [score(row) for row in own.values()]
            ahead = [second - first for first, second in zip(in_turn[::2], in_turn[1::2], strict=False)]
        if own:
            arm |= {
                "over_the_run": estimate([score(row) for row in own.values()]),
                "last_tenth": estimate([row["curve"][-1] for row in own.values()]),
                "held_out": estimate([100 * row["held_out"] for row in own.values()]),
                "collapsed": sum(map(collapsed, own.values())),
            }
            kinds = [row["strata"] for row in own.values() if "strata" in row]
            arm |= {"strata": {kind: estimate([of[kind] for of in kinds]) for kind in kinds[0]}} if kinds else {}
        if ahead:
            arm |= {"minus_group_mean": estimate(ahead), "won": f"{sum(x > 0 for x in ahead)} of {len(ahead)}"}
        found.append(arm)
    return found
