"""
The paper's figures 1 to 5, on toy policies with a calculator.

    OMP_NUM_THREADS=1 python -m recipes.studies.figures   # about 20 minutes on one core; a saved run is not run again
    python -m recipes.studies.figures --plot_only         # from the runs that are saved, in a minute

1 and 2: reward, gradient norm and the gradient's power over training, by baseline, in sums of ten turns at a learning
rate that the group mean does not bear. 3: completions of a group differ in total energy. 4: realized energy, token by
token, with changing ranks. 5: the probability of a token against the norm of its logit gradient. Everything lands in
runs/studies/figures; training runs are those of learning_curves.py, and lie with them.
"""

import argparse
import sys
import warnings
from pathlib import Path

import torch
from datasets import Dataset
from matplotlib.figure import Figure

from recipes.studies.learning_curves import PANELS, Run, perform, plot, saved
from recipes.studies.tasks import Task, trainer_of, with_prompts
from recipes.tool_math import calculator_tool
from recipes.toy import calculator
from trl_otb.rollout import Rollout


BASELINES = ("none", "group_mean", "otb", "otb_shrunk")
TASK, RATE, N, SEEDS = "long_calculator", 4e-4, 4, 3
PROBLEM, ANSWER, GROUP = "12+71-35", 48, 8


def sample(size: int) -> Rollout:
    """`size` completions of one problem; `make picture` plots eight of them for the project's README."""

    def right(completions, **kwargs):
        return [float(c[-1].get("content") == f"={ANSWER}") for c in completions]

    data = with_prompts(Dataset.from_dict({"question": [PROBLEM]}))
    task = Task(calculator(), data, data, right, 72, [calculator_tool(max_operations=1)], max_calls=6)
    sizes = dict.fromkeys(("num_generations", "per_device_train_batch_size", "per_device_eval_batch_size"), size)
    trainer = trainer_of(task, eval_dataset=data, seed=3, **sizes)
    trainer.evaluate()
    return trainer.rollouts["eval"]


def plot_group(rollout: Rollout, path: Path) -> None:
    """Figures 3 and 4."""
    tokens = rollout.to_pandas()
    completions = [of for _, of in tokens[tokens["completion"] < GROUP].groupby("completion")]
    figure = Figure(figsize=(11, 4), layout="constrained")
    left, right = figure.subplots(1, 2)
    for place, completion in enumerate(sorted(completions, key=lambda of: of["energy"].sum())):
        energy = completion["energy"].cumsum().to_list()
        color = "tab:green" if completion["reward"].all() else "tab:red"
        left.bar(place, energy[-1], color=color)
        left.text(place, energy[-1], f"{len(energy)}", ha="center", va="bottom", fontsize=9)
        right.plot(range(1, len(energy) + 1), energy, color=color, marker=".", alpha=0.8)
    left.set(xlabel="completion, by energy (above: generated tokens)", ylabel="total energy $W_T$", xticks=[])
    right.set(xlabel="generated token t", ylabel="realized energy $W_t$")
    right.grid(alpha=0.3)
    figure.suptitle(f"{GROUP} completions of {PROBLEM} with a calculator (green: right, red: wrong)", fontsize=11)
    figure.savefig(path, dpi=120)


def plot_tokens(rollout: Rollout, path: Path) -> None:
    """Figure 5."""
    generated = rollout.mask.bool()
    probability, energy = rollout.logps[generated].exp(), rollout.energy[generated]
    figure = Figure(figsize=(6, 4), layout="constrained")
    axis = figure.subplots()
    axis.scatter(probability, energy.sqrt(), s=8, alpha=0.4, label="a generated token")
    p = torch.linspace(0, 1, 100)
    axis.plot(p, 2**0.5 * (1 - p), "k--", linewidth=1, label="all else on one other token: √2 (1 − π)")
    axis.plot(p, 1 - p, "k:", linewidth=1, label="all else spread thin: 1 − π")
    axis.set(xlabel="probability of the token, π(y)", ylabel="norm of its logit gradient, √w")
    axis.legend(fontsize=8)
    axis.grid(alpha=0.3)
    axis.set_title(f"{len(probability):,} tokens of {len(rollout)} completions of {PROBLEM}", fontsize=10)
    figure.savefig(path, dpi=120)


def main(argv):
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[1])
    parser.add_argument("--plot_only", action="store_true", help="train nothing")
    parser.add_argument("--output_dir", type=Path, default=Path("runs/studies/figures"))
    runs_dir = Path("runs/studies/learning_curves")
    parser.add_argument("--runs_dir", type=Path, default=runs_dir, help="where training runs are saved")
    args = parser.parse_args(argv)
    warnings.filterwarnings("ignore")
    folder, seeds = args.output_dir, range(1, SEEDS + 1)
    runs = {baseline: [Run(TASK, baseline, N, RATE, seed) for seed in seeds] for baseline in BASELINES}
    if not args.plot_only:
        args.runs_dir.mkdir(parents=True, exist_ok=True)
        perform([run for of in runs.values() for run in of], args.runs_dir)
    results = {baseline: saved(of, args.runs_dir) for baseline, of in runs.items()}
    if any(len(of) < SEEDS for of in results.values()):
        parser.error(f"nothing or not all is saved under {args.runs_dir} yet: run without --plot_only first")
    folder.mkdir(parents=True, exist_ok=True)
    title = f"{TASK}, N = {N}, learning rate {RATE:g}"
    plot({title: (TASK, results)}, folder / "figure1_2.png", PANELS | {"grad_power": "power of the gradient, Σ w A²"})
    rollout = sample(256)
    plot_group(rollout, folder / "figure3_4.png")
    plot_tokens(rollout, folder / "figure5.png")
    print(f"{folder}: figure1_2.png, figure3_4.png and figure5.png.")


if __name__ == "__main__":
    main(sys.argv[1:])
