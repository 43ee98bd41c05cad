"""
Does N = 4 do the work of N = 32? Learning curves over generated tokens, by baseline and group size, over seeds.

    OMP_NUM_THREADS=1 python -m recipes.studies.learning_curves --task calculator   # again beside it, on another core
    python -m recipes.studies.learning_curves --task calculator --plot_only --publish

Every run trains the toy policy of a task with 16 problems per step. Learning rates are tuned per arm by the mean
reward over the run, on seeds of their own and the same grid, by halving: two seeds for every rate, three more for the
best two. The other seeds then run with the best one. A run that is saved is not run again. Everything lands in
runs/studies/learning_curves. Statistics over seeds are those of rliable (Agarwal et al., arXiv 2108.13264).
"""

import argparse
import itertools
import json
import re
import statistics
import sys
import warnings
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

import numpy
from filelock import FileLock, Timeout
from matplotlib.figure import Figure
from scipy import stats

from recipes.common.held_out import HeldOut
from recipes.studies import render
from recipes.studies.tasks import task_of, trainer_of
from trl_otb import GradientNoiseCallback
from trl_otb.baselines import BASELINES


@dataclass(frozen=True)
class Schedule:
    """Steps of a run by N: as many as its arm needs to come to its end."""

    steps: dict[int, int]
    learning_rates: tuple[float, ...]
    threshold: float
    held_out_samples: int = 4


TASKS = {
    "sums": Schedule({4: 400, 8: 400, 32: 300}, (2e-4, 4e-4, 8e-4, 1.6e-3), 0.55),
    "calculator": Schedule({4: 100, 8: 80, 32: 40}, (2e-4, 4e-4, 8e-4, 1.6e-3), 0.85),
    "long_calculator": Schedule({4: 60, 8: 50, 32: 40}, (1e-4, 2e-4, 4e-4, 8e-4), 0.55),
    "scratchpad_100": Schedule({4: 100}, (1e-4, 2e-4, 4e-4), 0.8, held_out_samples=16),
}
TUNING_SEEDS = ((101, 102), (101, 102, 103, 104, 105))  # of every learning rate; of the two that are best with these
PALETTE = ("tab:blue", "tab:red", "tab:orange", "tab:brown", "tab:green", "tab:purple", "tab:pink", "tab:olive")
COLORS = dict(zip(BASELINES, itertools.cycle(PALETTE), strict=False)) | {"none": "black", "group_mean": "0.4"}
DRAWS = 2000  # of the bootstrap


@dataclass(frozen=True)
class Run:
    task: str
    baseline: str
    n: int
    learning_rate: float
    seed: int

    @property
    def name(self) -> str:
        return f"{self.task}-{self.baseline}-n{self.n}-lr{self.learning_rate:g}-seed{self.seed}"


def train(run: Run) -> dict:
    schedule, task = TASKS[run.task], task_of(run.task, run.seed)
    measure = HeldOut()
    trainer = trainer_of(
        replace(task, reward=measure.counted(task.reward)),
        eval_dataset=measure.numbered(task.held_out),
        callbacks=[measure, GradientNoiseCallback()],
        baseline=run.baseline,
        num_generations=run.n,
        per_device_train_batch_size=4 * run.n,
        gradient_accumulation_steps=4,  # whose noise the meter measures
        keep_groups_together=True,
        learning_rate=run.learning_rate,
        seed=run.seed,
        max_steps=schedule.steps[run.n],
        lr_scheduler_type="constant_with_warmup",
        warmup_steps=10,
        per_device_eval_batch_size=400,
        num_generations_eval=schedule.held_out_samples,
        logging_steps=1,
    )
    seconds = trainer.train().metrics["train_runtime"]
    trainer.evaluate()
    log = [entry for entry in trainer.state.log_history if "loss" in entry]
    lengths = [float(entry["completions/mean_length"]) for entry in log]  # tool output left out
    return {
        **vars(run),
        **{key: [float(entry[key]) for entry in log] for key in ("reward", "grad_norm", "entropy")},
        "noise_scale": [entry.get("noise/scale") for entry in log],
        "grad_power": [entry["otb/grad_power"] for entry in log],
        "tokens": list(itertools.accumulate(16 * run.n * length for length in lengths)),
        "held_out": measure.evaluations[-1].mean,
        "seconds": seconds,
    }


def perform(runs: list[Run], folder: Path) -> None:
    """Train what is not saved yet. Runs that other workers are at are left to them, and waited for at the end."""
    for patience, run in itertools.product((0, -1), runs):
        path = folder / f"{run.name}.json"
        with suppress(Timeout), FileLock(path.with_suffix(".lock"), timeout=patience):
            if not path.exists():
                result = train(run)
                path.with_suffix(".unfinished").write_text(json.dumps(result))
                path.with_suffix(".unfinished").rename(path)
                print(f"{run.name}: held-out {result['held_out']:.3f}, {result['seconds']:.0f} s", flush=True)


def saved(runs: Iterable[Run], folder: Path) -> list[dict]:
    """The results of those runs that are saved."""
    paths = [folder / f"{run.name}.json" for run in runs]
    return [json.loads(path.read_text()) for path in paths if path.exists()]


def best_rates(folder: Path, task: str, n: int, baseline: str, rounds: int = 2) -> list[float] | None:
    """The learning rates that stay after these rounds of tuning, two and then one; `None` while runs are missing."""
    rates = TASKS[task].learning_rates
    for seeds, keep in zip(TUNING_SEEDS[:rounds], (2, 1), strict=False):
        scores = {}
        for rate in rates:
            results = saved((Run(task, baseline, n, rate, seed) for seed in seeds), folder)
            if len(results) < len(seeds):
                return None
            scores[rate] = statistics.fmean(map(over_the_run, results))
        rates = sorted(scores, key=scores.get)[-keep:]
    return rates


def tune(task: str, arms: list[tuple[int, str]], folder: Path) -> dict[tuple[int, str], float]:
    """The best learning rate of every arm, given as (N, baseline)."""
    rates = dict.fromkeys(arms, TASKS[task].learning_rates)
    for i, seeds in enumerate(TUNING_SEEDS, start=1):
        perform([Run(task, b, n, rate, seed) for n, b in arms for rate in rates[n, b] for seed in seeds], folder)
        rates = {arm: best_rates(folder, task, *arm, rounds=i) for arm in arms}
    return {arm: rate for arm, (rate,) in rates.items()}


def window(values: list[float]) -> int:
    """Steps to average over: a twentieth of the run, and at least five."""
    return max(5, len(values) // 20)


def smooth(values: list[float], width: int | None = None) -> list[float]:
    width = width or window(values)
    return [statistics.fmean(values[max(0, i - width + 1) : i + 1]) for i in range(len(values))]


def tokens_to(result: dict, threshold: float) -> float | None:
    """Generated tokens until the smoothed reward first reaches the threshold, over whole windows."""
    first = window(result["reward"]) - 1
    reached = zip(smooth(result["reward"])[first:], result["tokens"][first:], strict=True)
    return next((tokens for reward, tokens in reached if reward >= threshold), None)


def tenth(values: list[float]) -> int:
    return max(1, len(values) // 10)


def collapsed(result: dict) -> bool:
    """The last tenth of the run earns less than two thirds of the best tenth before it."""
    rewards = smooth(result["reward"], tenth(result["reward"]))
    return rewards[-1] < 2 / 3 * max(rewards)


def over_the_run(result: dict) -> float:
    """The score of a run, by which learning rates are tuned too: its mean reward, at equal tokens per step."""
    return statistics.fmean(result["reward"])


def estimate(statistic: Callable[..., float], *samples: list[float]) -> list[float | None]:
    """`[value, low, high]` with a 95 % interval by bootstrap over seeds, which a single seed does not have."""
    samples = [numpy.asarray(sample, dtype=float) for sample in samples]
    value, how = float(statistic(*samples)), {"vectorized": False, "method": "percentile"}
    if min(map(len, samples)) < 2:
        return [value, None, None]
    drawn = stats.bootstrap(samples, statistic, n_resamples=DRAWS, rng=numpy.random.default_rng(0), **how)
    return [value, *map(float, drawn.confidence_interval)]


def interquartile_mean(scores: numpy.ndarray) -> float:
    """The mean of the middle half, which outliers of a few seeds do not decide."""
    return stats.trim_mean(scores, 0.25)


def difference(ours: numpy.ndarray, theirs: numpy.ndarray) -> float:
    return interquartile_mean(ours) - interquartile_mean(theirs)


def probability_of_improvement(ours: numpy.ndarray, theirs: numpy.ndarray) -> float:
    """How often a run of ours beats one of theirs, ties counting half."""
    return numpy.mean((ours[:, None] > theirs) + (ours[:, None] == theirs) / 2)


def outcome(n: int, baseline: str, rows: list[dict], threshold: float) -> dict:
    """A row of the table of outcomes: an arm's runs at one learning rate."""
    reached = [t / 1000 for r in rows if (t := tokens_to(r, threshold)) is not None]
    scales = [scale for r in rows for scale in r["noise_scale"] if scale is not None]
    entropy = numpy.mean([r["entropy"] for r in rows], axis=0)
    ends = entropy[: tenth(entropy)], entropy[-tenth(entropy) :]
    return {
        "n": n,
        "baseline": baseline,
        "learning_rate": rows[0]["learning_rate"],
        "seeds": len(rows),
        "tokens": {"thousands": estimate(numpy.mean, reached) if reached else None, "never": len(rows) - len(reached)},
        "held_out": estimate(numpy.mean, [100 * r["held_out"] for r in rows]),
        "grad_norm": statistics.median(max(r["grad_norm"]) for r in rows),
        "entropy": [float(end.mean()) for end in ends],
        "noise_scale": statistics.median(scales) if scales else None,
        "collapsed": sum(map(collapsed, rows)),
    }


def scores(of: dict[tuple[int, str], list[dict]]) -> list[dict]:
    """
    The table of scores: each arm beside the group mean of the same N, and the group mean beside itself, the later half
    of its seeds beside the earlier, which is what no baseline at all looks like.
    """
    found = []
    for (n, b), rows in of.items():
        control, half = of.get((n, "group_mean"), []), len(rows) // 2
        if len(control) < 4 or len(rows) < 2:
            continue
        if b == "group_mean":
            b, rows, control = f"{b}, later half of the seeds beside the earlier", rows[half:], rows[:half]
        ours, theirs = list(map(over_the_run, rows)), list(map(over_the_run, control))
        last = [statistics.fmean(r["reward"][-tenth(r["reward"]) :]) for r in rows]
        compared = {
            "over_the_run": estimate(interquartile_mean, ours),
            "last_tenth": estimate(interquartile_mean, last),
            "minus_group_mean": estimate(difference, ours, theirs),
            "probability": estimate(probability_of_improvement, ours, theirs),
        }
        found.append({"n": n, "baseline": b, "seeds": len(rows), **compared})
    return found if len(found) > 1 else []


def tuning(task: str, n: int, baseline: str, folder: Path) -> dict:
    """A row of the table of tuning: mean reward over the runs that tune, by learning rate, and how many collapsed."""
    rates = {}
    for rate in TASKS[task].learning_rates:
        rows = saved((Run(task, baseline, n, rate, seed) for seed in TUNING_SEEDS[-1]), folder)
        score = statistics.fmean(map(over_the_run, rows))
        rates[f"{rate:g}"] = {"score": score, "seeds": len(rows), "collapsed": sum(map(collapsed, rows))}
    return {"n": n, "baseline": baseline, "rates": rates}


def report(folder: Path, learning_rate: float | None = None) -> render.Tables:
    """Tables of all arms, each at its tuned learning rate, or all at the given one; and the picture."""
    suffix, said = ("", "") if learning_rate is None else (f"-lr{learning_rate:g}", f" at {learning_rate:g}")
    tables, columns = {}, {}
    for task, schedule in TASKS.items():
        of = {}
        for n, b in itertools.product(sorted(schedule.steps), BASELINES):
            rates = [learning_rate] if learning_rate else best_rates(folder, task, n, b) or []
            seeds = range(1, TUNING_SEEDS[0][0])
            if rows := saved((Run(task, b, n, rate, seed) for rate in rates for seed in seeds), folder):
                of[n, b] = rows
                columns.setdefault(f"{task}, N = {n}", (task, {}))[1][b] = rows
        tables[f"outcomes, {task}{said}"] = [outcome(*arm, rows, schedule.threshold) for arm, rows in of.items()]
        tables[f"scores, {task}{said}"] = scores(of)
        tables[f"tuning, {task}"] = [tuning(task, *arm, folder) for arm in of if learning_rate is None]
    tables = {title: arms for title, arms in tables.items() if arms}
    text = "\n".join(f"{title}:\n\n{render.of_arms(arms)}" for title, arms in tables.items())
    (folder / f"tables{suffix}.md").write_text(text)
    print(text)
    if columns:
        plot(columns, folder / f"learning_curves{suffix}.png")
    return tables


PANELS = {"reward": "reward (share of right answers)", "grad_norm": "gradient norm"}


def plot(columns: dict[str, tuple[str, dict[str, list[dict]]]], path: Path, panels: dict[str, str] = PANELS) -> None:
    """A panel over generated tokens per row; each column has a title, a task and its runs by baseline."""
    height = 3.25 * len(panels)
    figure = Figure(figsize=(max(6, 4.2 * len(columns)), height), layout="constrained")
    axes = figure.subplots(len(panels), len(columns), squeeze=False, sharey="row", sharex="col")
    for of_column, (title, (task, of)) in zip(axes.T, columns.items(), strict=True):
        for axis, (key, label) in zip(of_column, panels.items(), strict=True):
            for baseline in (name for name in COLORS if name in of):
                color, rows = COLORS[baseline], of[baseline]
                curves = numpy.array([smooth(row[key]) for row in rows])
                thousands = numpy.mean([row["tokens"] for row in rows], axis=0) / 1000
                axis.plot(thousands, curves.mean(0), color=color, label=f"{baseline} ({len(rows)})")
                axis.fill_between(thousands, curves.min(0), curves.max(0), color=color, alpha=0.12, linewidth=0)
            axis.set(yscale="linear" if key == "reward" else "log", ylabel=label if axis in axes[:, 0] else "")
            axis.grid(alpha=0.3)
        of_column[0].axhline(TASKS[task].threshold, color="black", linewidth=0.8, linestyle=":")
        of_column[0].set_title(title, fontsize=10)
        of_column[0].legend(fontsize=8)
        of_column[-1].set(xlabel="generated tokens (thousands)")
    figure.suptitle("Learning by baseline (smoothed; mean and range of so many seeds)", fontsize=11)
    figure.savefig(path, dpi=120)


def main(argv):
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[1])
    parser.add_argument("--task", choices=TASKS, default="calculator")
    parser.add_argument("--baselines", nargs="+", choices=BASELINES, default=list(BASELINES))
    parser.add_argument("--sizes", nargs="+", type=int, choices=(4, 8, 32), default=[4, 8, 32])
    parser.add_argument("--seeds", type=int, default=5, help="Seeds per arm, beside those that tune it.")
    parser.add_argument("--learning_rate", type=float, help="of every arm, in the place of the tuned ones")
    parser.add_argument("--plot_only", action="store_true", help="make tables and pictures from what is saved")
    parser.add_argument("--publish", action="store_true", help="put the task's tables into the results and the page")
    parser.add_argument("--output_dir", type=Path, default=Path("runs/studies/learning_curves"))
    args = parser.parse_args(argv)
    folder, rate, largest = args.output_dir, args.learning_rate, TUNING_SEEDS[0][0] - 1
    missing = [n for n in args.sizes if n not in TASKS[args.task].steps]
    if missing and not args.plot_only:
        parser.error(f"--sizes: {args.task} has no runs of N = {missing[0]}, only of {list(TASKS[args.task].steps)}")
    if not 1 <= args.seeds <= largest:
        parser.error(f"--seeds is {args.seeds}: give 1 to {largest}")
    warnings.filterwarnings("ignore")
    folder.mkdir(parents=True, exist_ok=True)
    if not args.plot_only:
        arms = [(n, b) for n in args.sizes for b in args.baselines]
        best = dict.fromkeys(arms, rate) if rate else tune(args.task, arms, folder)
        # By seeds, so that what is there when it is stopped compares the arms
        perform([Run(args.task, b, n, best[n, b], seed) for seed in range(1, args.seeds + 1) for n, b in arms], folder)
    tables = report(folder, rate)
    if args.publish:
        of_task = re.compile(rf"\w+, {args.task}( at .*)?")
        try:
            render.publish("learning_curves", {title: tables[title] for title in tables if of_task.fullmatch(title)})
        except ValueError as error:
            parser.error(str(error))


if __name__ == "__main__":
    main(sys.argv[1:])
