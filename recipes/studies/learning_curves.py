"""
Does N = 4 do the work of N = 32? Learning curves over generated tokens, by baseline and group size, over seeds.

    OMP_NUM_THREADS=1 python -m recipes.studies.learning_curves --task calculator   # again beside it, on another core
    python -m recipes.studies.learning_curves --plot_only

Every run trains the toy policy of a task with 16 problems per step. Learning rates are tuned per arm by the mean
reward over the run, on seeds of their own and the same grid, by halving: two seeds for every rate, three more for the
best two. The other seeds then run with the best one. A run that is saved is not run again. Everything lands in
runs/studies/learning_curves; the results are in recipes/studies/README.md.
"""

import argparse
import itertools
import json
import statistics
import sys
import time
import warnings
from dataclasses import dataclass
from pathlib import Path

import torch
from filelock import FileLock, Timeout
from matplotlib.figure import Figure
from transformers import AutoTokenizer, PrinterCallback

from recipes import toy
from recipes.common.held_out import HeldOut
from recipes.studies import candidates
from recipes.studies.aggregate import difference, interquartile_mean, probability_of_improvement
from recipes.studies.laboratory import BARE, task_of
from trl_otb import GradientNoiseCallback, OTBGRPOConfig, OTBGRPOTrainer, register_baseline
from trl_otb.baselines import BASELINES


@dataclass(frozen=True)
class Task:
    """Steps of a run by N: as many as its arm needs to come to its end."""

    steps: dict[int, int]
    learning_rates: tuple[float, ...]
    threshold: float
    max_completion_length: int
    max_calls: int = 6
    held_out_samples: int = 4


TASKS = {
    "sums": Task({4: 400, 8: 400, 32: 300}, (2e-4, 4e-4, 8e-4, 1.6e-3), 0.55, 24),
    "calculator": Task({4: 100, 8: 80, 32: 40}, (2e-4, 4e-4, 8e-4, 1.6e-3), 0.85, 72),
    "long_calculator": Task({4: 60, 8: 50, 32: 40}, (1e-4, 2e-4, 4e-4, 8e-4), 0.55, 180, max_calls=14),
    "scratchpad_100": Task({4: 100}, (1e-4, 2e-4, 4e-4), 0.8, 200, held_out_samples=16),
}
TUNING_SEEDS = ((101, 102), (103, 104, 105))  # every learning rate; the two that are best with these
ARMS = ("none", *BASELINES, *candidates.names())


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
    task = TASKS[run.task]
    path = str(getattr(toy, run.task)())
    tokenizer = AutoTokenizer.from_pretrained(path, padding_side="left")
    studied = task_of(run.task, tokenizer, 20_000, num_held_out=200, seed=run.seed)
    measure = HeldOut(studied.held_out)
    trainer = OTBGRPOTrainer(
        path,
        measure.watch(studied.reward),
        args=OTBGRPOConfig(
            output_dir="runs/studies/learning_curves/work",
            baseline=run.baseline,
            num_generations=run.n,
            per_device_train_batch_size=4 * run.n,
            gradient_accumulation_steps=4,  # whose noise the meter measures
            learning_rate=run.learning_rate,
            seed=run.seed,
            max_steps=task.steps[run.n],
            max_completion_length=task.max_completion_length,
            max_tool_calling_iterations=task.max_calls,
            lr_scheduler_type="constant_with_warmup",
            warmup_steps=10,
            per_device_eval_batch_size=400,
            num_generations_eval=task.held_out_samples,
            logging_steps=1,
            **BARE,
        ),
        train_dataset=studied.train,
        eval_dataset=measure.dataset,
        processing_class=tokenizer,
        callbacks=[measure, GradientNoiseCallback()],
        tools=studied.tools,
    )
    trainer.remove_callback(PrinterCallback)
    began = time.perf_counter()
    trainer.train()
    seconds = time.perf_counter() - began
    trainer.evaluate()
    log = [entry for entry in trainer.state.log_history if "loss" in entry]
    lengths = [float(entry["completions/mean_length"]) for entry in log]
    return {
        **vars(run),
        "reward": [float(entry["reward"]) for entry in log],
        "grad_norm": [float(entry["grad_norm"]) for entry in log],
        "entropy": [float(entry["entropy"]) for entry in log],
        "noise_scale": [entry.get("noise/scale") for entry in log],
        "grad_power": [entry["otb/grad_power"] for entry in log],
        "tokens": [16 * run.n * sum(lengths[: i + 1]) for i in range(len(log))],  # generated, tool output left out
        "held_out": measure.evaluations[-1].mean,
        "seconds": seconds,
    }


def finalists(folder: Path, task: str, baseline: str, n: int) -> list[float] | None:
    """The two learning rates that are best in the first round of tuning, once all of its runs are there."""
    first = _tuned(folder, task, baseline, n, TASKS[task].learning_rates, TUNING_SEEDS[0])
    return first and sorted(first, key=first.get)[-2:]


def best_learning_rate(folder: Path, task: str, baseline: str, n: int) -> float | None:
    """Of the finalists, over the seeds of both rounds, once all of these runs are there."""
    rates = finalists(folder, task, baseline, n)
    scores = rates and _tuned(folder, task, baseline, n, rates, itertools.chain(*TUNING_SEEDS))
    return scores and max(scores, key=scores.get)


def _tuned(folder, task, baseline, n, rates, seeds) -> dict[float, float] | None:
    """The mean reward over the runs with these seeds, by learning rate."""
    paths = {rate: [] for rate in rates}
    for rate, seed in itertools.product(rates, seeds):
        paths[rate].append(folder / f"{Run(task, baseline, n, rate, seed).name}.json")
    if not all(path.exists() for of_rate in paths.values() for path in of_rate):
        return None
    return {rate: statistics.fmean(over_the_run(json.loads(p.read_text())) for p in paths[rate]) for rate in rates}


def tune(task: str, arms: list[tuple[int, str]], folder: Path) -> dict[tuple[int, str], float]:
    """The best learning rate of every arm, given as (N, baseline)."""
    rates = dict.fromkeys(arms, TASKS[task].learning_rates)
    for seeds, decide in zip(TUNING_SEEDS, (finalists, best_learning_rate), strict=True):
        runs = [Run(task, b, n, rate, seed) for n, b in arms for rate in rates[n, b] for seed in seeds]
        perform(runs, folder)
        for n, b in arms:
            while (decided := decide(folder, task, b, n)) is None:
                time.sleep(5)  # another process is at it
            rates[n, b] = decided
    return rates


def perform(runs: list[Run], folder: Path) -> None:
    """Train what is not saved yet; a run that another worker is at is left to it."""
    register()
    for i, run in enumerate(runs):
        path = folder / f"{run.name}.json"
        if path.exists():
            continue
        try:
            with FileLock(folder / f"{run.name}.lock", timeout=0):
                if path.exists():
                    continue
                result = train(run)
                path.with_suffix(".unfinished").write_text(json.dumps(result))
                path.with_suffix(".unfinished").rename(path)
                print(
                    f"[{i + 1}/{len(runs)}] {run.name}: held-out {result['held_out']:.3f}, worst gradient norm "
                    f"{max(result['grad_norm']):.2f}, {result['seconds']:.0f} s",
                    flush=True,
                )
        except Timeout:
            continue


def window(values: list[float]) -> int:
    """Steps to average over: a twentieth of the run, and at least five."""
    return max(5, len(values) // 20)


def smooth(values: list[float], width: int | None = None) -> list[float]:
    width = width or window(values)
    return [statistics.fmean(values[max(0, i - width + 1) : i + 1]) for i in range(len(values))]


def tokens_to(result: dict, threshold: float) -> float | None:
    """Generated tokens until the smoothed reward first reaches the threshold."""
    whole_windows = slice(window(result["reward"]) - 1, None)
    for reward, tokens in zip(smooth(result["reward"])[whole_windows], result["tokens"][whole_windows], strict=True):
        if reward >= threshold:
            return tokens
    return None


def collapsed(result: dict) -> bool:
    """The last tenth of the run earns less than two thirds of the best tenth before it."""
    width = max(1, len(result["reward"]) // 10)
    rewards = smooth(result["reward"], width)
    return rewards[-1] < 2 / 3 * max(rewards)


def mean_and_interval(values: list[float], draws: int = 2000) -> str:
    """Mean with a 95 % interval by bootstrap over seeds."""
    rng = torch.Generator().manual_seed(0)
    x = torch.tensor(values, dtype=torch.float64)
    means = x[torch.randint(len(x), (draws, len(x)), generator=rng)].mean(1)
    low, high = means.quantile(torch.tensor([0.025, 0.975], dtype=torch.float64)).tolist()
    return f"{x.mean():.3g} ({low:.3g}–{high:.3g})"


def over_the_run(result: dict) -> float:
    """The score of a run, by which learning rates are tuned too: its mean reward, at equal tokens per step."""
    return statistics.fmean(result["reward"])


def at_the_end(result: dict) -> float:
    """The mean reward of the last tenth."""
    return statistics.fmean(result["reward"][-max(1, len(result["reward"]) // 10) :])


def report(folder: Path, learning_rate: float | None = None) -> None:
    """Of all arms, each at its tuned learning rate, or all at the given one."""
    results = [json.loads(p.read_text()) for p in sorted(folder.glob("*.json"))]
    suffix = "" if learning_rate is None else f"-lr{learning_rate:g}"
    text, beside = "", {}
    for task in TASKS:
        of_task = [r for r in results if r["task"] == task]
        of = _arms(task, of_task, folder, learning_rate)
        if not of:
            continue
        of_size = {}
        for (n, b), rows in of.items():
            of_size.setdefault(n, {})[b] = rows
        plot({f"{task}, N = {n}": (task, arms) for n, arms in of_size.items()}, folder / f"{task}{suffix}.png")
        if 4 in of_size:
            beside[f"{task}, N = 4"] = task, of_size[4]
        text += f"\n### {task}: 16 problems per step, threshold {TASKS[task].threshold:.0%} of training reward\n\n"
        tables = [*_outcomes(of, TASKS[task].threshold), *_beside_group_mean(of)]
        text += "\n".join(tables + (_tuning(task, of, of_task) if learning_rate is None else [])) + "\n"
    if len(beside) > 1:
        plot(beside, folder / f"tasks{suffix}.png")
    (folder / f"tables{suffix}.md").write_text(text)
    print(text)


def _arms(
    task: str, results: list[dict], folder: Path, learning_rate: float | None
) -> dict[tuple[int, str], list[dict]]:
    """By (N, baseline): the runs at its learning rate, by seed, where there are any and it is tuned."""
    arms = [(n, b) for n in sorted(TASKS[task].steps) for b in ARMS]
    rates = {(n, b): learning_rate or best_learning_rate(folder, task, b, n) for n, b in arms}
    of = {
        (n, b): sorted(
            (
                r
                for r in results
                if (r["baseline"], r["n"], r["learning_rate"]) == (b, n, rate) and r["seed"] < TUNING_SEEDS[0][0]
            ),
            key=lambda r: r["seed"],
        )
        for (n, b), rate in rates.items()
    }
    return {arm: rows for arm, rows in of.items() if rows}


def _outcomes(of: dict, threshold: float) -> list[str]:
    lines = [
        "| N | baseline | learning rate | seeds | tokens to threshold (thousands) | held-out at the end (%) | "
        "worst gradient norm | entropy, first and last tenth | noise scale (prompts) | collapsed |",
        "|---" * 10 + "|",
    ]
    for (n, b), rows in of.items():
        reached = [t / 1000 for r in rows if (t := tokens_to(r, threshold)) is not None]
        missed = f", {len(rows) - len(reached)} never" if len(reached) < len(rows) else ""
        tokens = mean_and_interval(reached) + missed if reached else "never"
        tenth = max(1, len(rows[0]["entropy"]) // 10)
        entropy = [
            statistics.fmean(e for r in rows for e in r["entropy"][part])
            for part in (slice(tenth), slice(-tenth, None))
        ]
        scales = [scale for r in rows for scale in r["noise_scale"] if scale is not None]
        lines.append(
            f"| {n} | {b} | {rows[0]['learning_rate']:g} | {len(rows)} | {tokens} | "
            f"{mean_and_interval([100 * r['held_out'] for r in rows])} | "
            f"{statistics.median(max(r['grad_norm']) for r in rows):.2f} | {entropy[0]:.3f}, {entropy[1]:.3f} | "
            f"{f'{statistics.median(scales):.0f}' if scales else '?'} | {sum(map(collapsed, rows))} |"
        )
    return lines


def _beside_group_mean(of: dict) -> list[str]:
    """
    The score of each arm beside the group mean's of the same N. The last row has the group mean beside itself, the
    later half of its seeds beside the earlier: what no baseline at all looks like.
    """
    lines = [
        "\nReward over the run (interquartile mean over seeds), the same at its end, and over the group mean's:\n",
        "| N | baseline | seeds | over the run | in the last tenth | minus the group mean's, over the run | "
        "probability that a run beats one of the group mean's |",
        "|---" * 7 + "|",
    ]

    def line(n, name, rows, beside):
        ours, theirs = [list(map(over_the_run, rows))], [list(map(over_the_run, beside))]
        final = interquartile_mean([list(map(at_the_end, rows))])
        return (
            f"| {n} | {name} | {len(rows)} | {interquartile_mean(ours).text()} | {final.text()} | "
            f"{difference(ours, theirs).text()} | {probability_of_improvement(ours, theirs).text(2)} |"
        )

    for (n, b), rows in of.items():
        control = of.get((n, "group_mean"), [])
        if len(control) < 4 or len(rows) < 2:
            continue
        if b != "group_mean":
            lines.append(line(n, b, rows, control))
        else:
            half = len(rows) // 2
            lines.append(line(n, "group_mean, later half of the seeds beside the earlier", rows[half:], rows[:half]))
    return lines if len(lines) > 3 else []


def _tuning(task: str, of: dict, results: list[dict]) -> list[str]:
    rates = TASKS[task].learning_rates
    lines = [
        "\nTuning, mean reward over the run by learning rate (seeds):\n",
        "| N | baseline | " + " | ".join(f"{rate:g}" for rate in rates) + " |",
        "|---" * (2 + len(rates)) + "|",
    ]
    for n, b in of:
        cells = []
        for rate in rates:
            rows = [
                r
                for r in results
                if (r["baseline"], r["n"], r["learning_rate"]) == (b, n, rate) and r["seed"] >= TUNING_SEEDS[0][0]
            ]
            broken = sum(map(collapsed, rows))
            score = statistics.fmean(map(over_the_run, rows))
            cells.append(f"{score:.3f} ({len(rows)})" + (f", {broken} collapsed" if broken else ""))
        lines.append(f"| {n} | {b} | " + " | ".join(cells) + " |")
    return lines


PALETTE = ("tab:blue", "tab:red", "tab:orange", "tab:brown", "tab:green", "tab:purple", "tab:pink", "tab:olive")
COLORS = dict(zip(ARMS, itertools.cycle(PALETTE), strict=False)) | {"none": "black", "group_mean": "0.4"}


def plot(columns: dict[str, tuple[str, dict[str, list[dict]]]], path: Path) -> None:
    """Reward and gradient norm over generated tokens; each column has a title, and a task's runs by baseline."""
    figure = Figure(figsize=(max(6, 4.2 * len(columns)), 6.5), layout="constrained")
    axes = figure.subplots(2, len(columns), squeeze=False, sharey="row", sharex="col")
    for (top, bottom), (title, (task, of)) in zip(axes.T, columns.items(), strict=True):
        for axis, key in ((top, "reward"), (bottom, "grad_norm")):
            for baseline, color in COLORS.items():
                if rows := of.get(baseline):
                    curves = torch.tensor([smooth(row[key]) for row in rows])
                    thousands = torch.tensor([row["tokens"] for row in rows]).mean(0) / 1000
                    axis.plot(thousands, curves.mean(0), color=color, label=f"{baseline} ({len(rows)})")
                    axis.fill_between(thousands, curves.amin(0), curves.amax(0), color=color, alpha=0.12, linewidth=0)
            axis.grid(alpha=0.3)
        top.axhline(TASKS[task].threshold, color="black", linewidth=0.8, linestyle=":")
        top.set_title(title, fontsize=10)
        top.legend(fontsize=8)
        bottom.set(xlabel="generated tokens (thousands)", yscale="log")
    axes[0, 0].set_ylabel("reward (share of right answers)")
    axes[1, 0].set_ylabel("gradient norm")
    figure.suptitle("Learning by baseline (smoothed; mean and range of so many seeds)", fontsize=11)
    figure.savefig(path, dpi=120)


def register() -> None:
    """All of `ARMS` as baselines, `none` too."""
    register_baseline("none", per_token=False, uses_energy=False, leaves_one_out=True)(
        lambda group: torch.zeros_like(group.returns)
    )
    candidates.register()


def main(argv):
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[1])
    parser.add_argument("--task", choices=TASKS, default="calculator")
    parser.add_argument("--baselines", nargs="+", choices=ARMS, default=list(BASELINES))
    parser.add_argument("--sizes", nargs="+", type=int, choices=(4, 8, 32), default=[4, 8, 32])
    parser.add_argument("--seeds", type=int, default=5, help="Seeds per arm, beside those that tune it.")
    parser.add_argument("--learning_rate", type=float, help="of every arm, in the place of the tuned ones")
    parser.add_argument("--plot_only", action="store_true", help="make tables and pictures from what is saved")
    parser.add_argument("--output_dir", default="runs/studies/learning_curves")
    args = parser.parse_args(argv)
    missing = [n for n in args.sizes if n not in TASKS[args.task].steps]
    if missing and not args.plot_only:
        parser.error(f"--sizes: {args.task} has no runs of N = {missing[0]}, only of {list(TASKS[args.task].steps)}")
    largest = TUNING_SEEDS[0][0] - 1
    if not 1 <= args.seeds <= largest:
        parser.error(f"--seeds is {args.seeds}: give 1 to {largest}")
    warnings.filterwarnings("ignore")
    folder = Path(args.output_dir)
    folder.mkdir(parents=True, exist_ok=True)
    if not args.plot_only:
        arms = [(n, b) for n in args.sizes for b in args.baselines]
        best = dict.fromkeys(arms, args.learning_rate) if args.learning_rate else tune(args.task, arms, folder)
        # By seeds, so that what is there when it is stopped compares the arms
        perform([Run(args.task, b, n, best[n, b], seed) for seed in range(1, args.seeds + 1) for n, b in arms], folder)
    report(folder, args.learning_rate)


if __name__ == "__main__":
    main(sys.argv[1:])
