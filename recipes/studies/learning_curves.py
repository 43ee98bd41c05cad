"""
Which baseline learns faster? Runs under each, from the same policy and with the same seeds, at equal tokens per step.

    OMP_NUM_THREADS=1 python -m recipes.studies.learning_curves --task calculator   # again beside it, on another core
    python -m recipes.studies.learning_curves --task calculator --plot_only --publish

Every run trains the policy of a task with 16 problems per step (SmolLM2: 4; blocks: mostly 8). Learning rates are
tuned per arm by the mean reward over the run, on seeds of their own and the same grid, by halving: two seeds for every
rate, three more for the best two (`--tune_by 1` or `2`: that many, and no more). The other seeds use the best one.
Where a task has one rate nothing is tuned. A saved run is not repeated; with an adapter, an unfinished one goes on
where it was. Several processes share the work (`--processes 16`), on a GPU if there is one.
"""

import argparse
import hashlib
import itertools
import json
import shutil
import subprocess
import sys
import time
import warnings
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean

import torch
from filelock import FileLock, Timeout

import trl_otb
from recipes.gradient_noise import NoiseScaleTrainer
from recipes.studies import blocks, language, render, tasks
from recipes.studies.render import PROGRESS
from recipes.studies.runs import TUNING_SEEDS, best_rates, summary
from recipes.toy.local_rollouts import on_cpu
from trl_otb.baselines import BASELINES
from trl_otb.stopping import latest_checkpoint


DR_GRPO = "dr_grpo"  # the arm of the group mean with this loss, and no scale
LEARNED = "value_learned"  # the arm of `value` that begins with what it learns of the untrained policy in such a run
ARMS = {
    LEARNED: {"baseline": "value"},
    PROGRESS: {"baseline": "value", "progress_funcs": ["rewards"]},
    DR_GRPO: {"baseline": "group_mean", "loss_type": "dr_grpo", "scale_rewards": "none"},
}
MAY_BE_THERE = {"noise_scale": "noise/scale", "explained": "otb/value/explained"}  # in a step's log


@dataclass(frozen=True)
class Schedule:
    """Steps of a run by N: as many as its arm needs to come to its end."""

    steps: dict[int, int]
    learning_rates: tuple[float, ...]
    held_out_samples: int = 4
    prompts: int = 16  # per step, in four micro-batches
    problems: str = ""  # the task that is sampled, where it has another name
    completions: int = 0  # per step, where they are the same for every N, and prompts are not
    staleness: int | None = None  # of asynchronous training: optimizer steps between sampling and training
    parts: int = 4  # micro-batches of a step

    def completions_per_step(self, n: int) -> int:
        return self.completions or self.prompts * n


TASKS = {
    "calculator": Schedule(dict.fromkeys((1, 4, 32), 100), (2e-4, 4e-4, 8e-4, 1.6e-3), completions=64),
    "lake_6": Schedule({4: 50}, (8e-4,)),
    "scratchpad_100": Schedule({4: 100}, (2e-4,), 16),
    "column_sums": Schedule({4: 20}, (3e-4,), 1, prompts=4),
    # Asynchronous, with samples that wait for four steps
    "sums_async_4": Schedule({4: 200}, (8e-4,), problems="sums", staleness=4),
    "calculator_async_4": Schedule({4: 80}, (4e-4,), problems="calculator", staleness=4),
    # SmolLM2's first blocks, or all, which learn in fewer steps; 32 completions per step
    **{
        f"{size}_{kind}": Schedule({1: steps, 4: steps}, grid, 1, completions=32, parts=2)
        for size, steps, grid in (("blocks", 60, (2e-4, 5e-4, 1.25e-3, 3e-3)), ("whole", 30, (5e-4, 1.25e-3)))
        for kind in blocks.KINDS
    },
    # Twice the prompts per step, in as many tokens
    "blocks_sorting_16": Schedule({4: 30}, (1.25e-3,), 1, 16, problems="blocks_sorting", parts=4),
    # With a quarter of the completions per step, of which noise is a larger part
    "whole_columns_8": Schedule({1: 60, 4: 60}, (5e-4,), 1, problems="whole_columns", completions=8, parts=2),
    # As short, and with as few prompts, as language models were trained
    "blocks_columns_short": Schedule({4: 30}, (5e-4,), 1, 4, problems="blocks_columns", parts=2),
}


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


def train(run: Run, folder: Path | None = None) -> dict:
    """Train, keeping the last step in `folder`, from which an unfinished run goes on."""
    schedule = TASKS[run.task]
    problems = schedule.problems or run.task
    task = language.any_task(problems, run.seed)
    options = {
        "baseline": run.baseline,
        "num_generations": run.n,
        "learning_rate": run.learning_rate,
        "seed": run.seed,
        "max_steps": schedule.steps[run.n],
        "lr_scheduler_type": "constant_with_warmup",
        "warmup_steps": 10,
        "logging_steps": 1,
    }
    scale = "running" if schedule.staleness is None else "none"  # asynchronous training has no running scale
    options["scale_rewards"] = "group" if run.baseline == "group_mean" else scale
    options |= ARMS.get(run.baseline, {})
    if problems in blocks.NAMES:  # a sixth faster in steps of one token
        options["model_init_kwargs"] = tasks.MACHINE["model_init_kwargs"] | {"attn_implementation": "eager"}
    state = None
    if run.baseline == LEARNED:
        state = Path(folder).parent / f"{run.task}-n{run.n}.pt"
        if not state.exists():
            train_with(task, schedule, options | {"learning_rate": 0.0, "seed": 201}, state)
    if folder is not None and task.peft_config:  # an adapter is small
        options |= {"output_dir": str(folder), "save_strategy": "steps", "save_steps": 1, "save_total_limit": 1}
    found = (
        train_with(task, schedule, options, state)
        if schedule.staleness is None
        else asynchronously(task, schedule, options)
    )
    return {
        **vars(run),
        **found,
        "policy": hashlib.sha256((task.policy / "model.safetensors").read_bytes()).hexdigest()[:8],
        "release": trl_otb.__version__,
    }


def train_with(task: tasks.Task, schedule: Schedule, options: dict, state: Path | None = None) -> dict:
    """`state` is a file of what the baseline has learned, with which it begins; or it is written at the end."""
    step, samples = schedule.completions_per_step(options["num_generations"]), schedule.held_out_samples
    # Groups together; the meter measures the noise of these
    micro_batch = max(step // schedule.parts, options["num_generations"])
    most, problems = (40 if task.peft_config and not tasks.ON_GPU else 400) // samples, len(task.held_out)
    at_once = max(n for n in range(1, most + 1) if problems % n == 0)  # batches of equal size, over which TRL averages
    trainer = tasks.trainer_of(
        task,
        cls=NoiseScaleTrainer,
        eval_dataset=task.held_out,
        per_device_eval_batch_size=at_once * samples,
        num_generations_eval=samples,
        per_device_train_batch_size=micro_batch,
        gradient_accumulation_steps=step // micro_batch,
        **options,
    )
    begins = state is not None and state.exists()
    if begins:
        trainer.baseline.load_state_dict(torch.load(state))
    saved_step = latest_checkpoint(trainer.args.output_dir) if trainer.args.save_strategy == "steps" else None
    began = time.monotonic()
    trainer.train(resume_from_checkpoint=saved_step)
    seconds = time.monotonic() - began
    if state is not None and not begins:
        torch.save(trainer.baseline.state_dict(), state)
    log = [entry for entry in trainer.state.log_history if "loss" in entry]
    lengths = [float(entry["completions/mean_length"]) for entry in log]  # tool output left out
    return {
        **{key: [float(entry[key]) for entry in log] for key in ("reward", "grad_norm", "entropy")},
        **{name: [entry.get(key) for entry in log] for name, key in MAY_BE_THERE.items()},
        "tokens": list(itertools.accumulate(step * length for length in lengths)),
        "seconds": seconds,
        "held_out": trainer.evaluate()["eval_reward"],
    }


def asynchronously(task: tasks.Task, schedule: Schedule, options: dict) -> dict:
    step = {"per_device_train_batch_size": schedule.completions_per_step(options["num_generations"])}
    with on_cpu():
        trainer = tasks.asynchronous_trainer_of(task, schedule.staleness, **step, **options)
        seconds = trainer.train().metrics["train_runtime"]
    log = [entry for entry in trainer.state.log_history if "loss" in entry]
    trainer.rollout_worker.loop.num_generations = schedule.held_out_samples
    groups = trainer.rollout_worker.groups_of([*task.held_out])
    return {
        "reward": [float(entry["reward"]) for entry in log],
        "tokens": [*itertools.accumulate(float(entry["batch/trained_tokens_per_step"]) for entry in log)],
        "seconds": seconds,
        "held_out": fmean(sample.metrics["reward"] for group in groups for sample in group),
    }


def perform(runs: list[Run], folder: Path) -> None:
    """Train what is not saved yet. Runs that other workers are at are left to them, and waited for at the end."""
    for patience, run in itertools.product((0, -1), runs):
        path = folder / f"{run.name}.json"
        with suppress(Timeout), FileLock(path.with_suffix(".lock"), timeout=patience):
            if not path.exists():
                result = train(run, path.with_suffix(""))
                path.with_suffix(".unfinished").write_text(json.dumps(result))
                path.with_suffix(".unfinished").rename(path)
                shutil.rmtree(path.with_suffix(""), ignore_errors=True)
                print(f"{run.name}: held-out {result['held_out']:.3f}, {result['seconds']:.0f} s", flush=True)


def saved(folder: Path, task: str) -> list[dict]:
    """The summaries of the runs of a task that are saved."""
    return [summary(json.loads(path.read_text())) for path in sorted(folder.glob(f"{task}-*.json"))]


def tune(
    task: str, arms: list[tuple[int, str]], folder: Path, by: int = len(TUNING_SEEDS), among: tuple[float, ...] = ()
) -> dict[tuple[int, str], float]:
    """The best learning rate of every arm, given as (N, baseline): `by` one or two seeds for every rate, or halving."""
    among = among or TASKS[task].learning_rates
    rates = dict.fromkeys(arms, among)
    if len(among) == 1:
        return dict.fromkeys(arms, *among)
    rounds = ((TUNING_SEEDS[:2], 2), (TUNING_SEEDS, 1)) if by > 2 else ((TUNING_SEEDS[:by], 1),)
    for seeds, keep in rounds:
        perform([Run(task, b, n, rate, seed) for n, b in arms for rate in rates[n, b] for seed in seeds], folder)
        rows = saved(folder, task)
        of_arm = {arm: [row for row in rows if (row["n"], row["baseline"]) == arm] for arm in arms}
        rates = {arm: tuple(best_rates(of_arm[arm], seeds)[-keep:]) for arm in arms}
    return {arm: rate for arm, (rate,) in rates.items()}


def main(argv: list[str]) -> None:
    import recipes.studies.value  # noqa: F401 - registers the parts of `value` as baselines

    parser = argparse.ArgumentParser(prog="learning_curves", description=__doc__.splitlines()[1])
    parser.add_argument("--task", choices=TASKS, default="calculator")
    names, default = [*BASELINES, *ARMS], ["group_mean", "otb", "value"]
    parser.add_argument("--baselines", nargs="+", choices=names, default=default)
    parser.add_argument("--sizes", nargs="+", type=int, choices=(1, 4, 32), default=[4])
    parser.add_argument("--seeds", type=int, default=5, help="Seeds per arm, beside those that tune it.")
    rates = sorted({rate for schedule in TASKS.values() for rate in schedule.learning_rates})
    parser.add_argument("--learning_rate", type=float, nargs="+", choices=rates, default=[], help="one, or a grid")
    every = len(TUNING_SEEDS)
    parser.add_argument("--tune_by", type=int, choices=(1, 2, every), default=every, help="seeds; more than 2: halving")
    parser.add_argument("--processes", type=int, default=1, help="that share the runs, on one GPU or several cores")
    parser.add_argument("--plot_only", action="store_true", help="make the table and the picture from what is saved")
    parser.add_argument("--publish", action="store_true", help="put the task's runs into the results and the pages")
    parser.add_argument("--output_dir", type=Path, default=Path("runs/studies/learning_curves"))
    args = parser.parse_args(argv)
    folder, task, steps = args.output_dir, args.task, TASKS[args.task].steps
    if missing := [n for n in args.sizes if n not in steps]:
        parser.error(f"--sizes: {task} has no runs of N = {missing[0]}, only of {list(steps)}")
    if not 1 <= args.seeds < TUNING_SEEDS[0]:
        parser.error(f"--seeds is {args.seeds}: give 1 to {TUNING_SEEDS[0] - 1}")
    warnings.filterwarnings("ignore")
    folder.mkdir(parents=True, exist_ok=True)
    if not args.plot_only:
        alike = [
            sys.executable,
            "-m",
            __spec__.name,
            *(flag for flag in argv if flag != "--publish"),
            "--processes",
            "1",
        ]
        others = [subprocess.Popen(alike) for _ in range(args.processes - 1)]
        arms = [(n, b) for n in args.sizes for b in args.baselines]
        best = tune(task, arms, folder, args.tune_by, tuple(args.learning_rate))
        # By seeds, so that what is there when it is stopped compares the arms
        perform([Run(task, b, n, best[n, b], seed) for seed in range(1, args.seeds + 1) for n, b in arms], folder)
        if sum(abs(other.wait()) for other in others):
            sys.exit("learning_curves: one of the processes failed; what is saved is kept.")
    if not (rows := saved(folder, task)):
        parser.error(f"Nothing of {task} is saved under {folder}.")
    print(text := render.of_runs(rows, tuning=True))
    (folder / "tables.md").write_text(text)
    render.learning({task: rows}, folder / "learning.png")
    if args.publish:
        render.publish_runs(rows)


if __name__ == "__main__":
    main(sys.argv[1:])
