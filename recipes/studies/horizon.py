"""
Does the gain of a baseline by energy grow with the horizon? Efficiency on a scratchpad of 10 to 300 tokens.

    OMP_NUM_THREADS=1 python -m recipes.studies.horizon              # two hours on one core; can be stopped and go on
    OMP_NUM_THREADS=1 python -m recipes.studies.horizon --tasks 10   # minutes
    OMP_NUM_THREADS=1 python -m recipes.studies.horizon --tasks 10 --seed 1 --output_dir runs/studies/horizon-1
    python -m recipes.studies.horizon --plot_only

The policies of the scratchpad (recipes/toy/scratchpad.py) make as many mistakes at every length; what grows is the
number of free choices that do no harm. Sums and the calculator, whose mistakes are improbable tokens, are the
contrast. Each task is measured by recipes.gradient_noise, with the candidates of candidates.py.
"""

import argparse
import json
import sys
from pathlib import Path

from matplotlib.figure import Figure

from recipes.common.errors import InputError
from recipes.common.launching import say, tidy_output
from recipes.gradient_noise import __main__ as gradient_noise
from recipes.gradient_noise.measure import compare
from recipes.gradient_noise.pools import scale_of
from recipes.gradient_noise.storage import Storage, moments_of
from recipes.studies import candidates
from recipes.toy import scratchpad


RECIPES = Path(__file__).parents[1]
PROMPTS = 16
CALCULATOR = ["--config", str(RECIPES / "tool_math_cpu.yaml"), "--tools", "calculator"]
# Completions per prompt, and what recipes.gradient_noise is told beside; the scratchpads go by their tokens
TASKS = {
    "10": (256, []),
    "30": (256, []),
    "100": (256, []),
    "300": (128, []),
    "sums": (256, ["--config", str(RECIPES / "math_cpu.yaml")]),
    "calculator": (128, CALCULATOR),
}
GROUPS = (4, 8, 32)
BASELINES = ("opo", "ogb", "otb", "otb_shrunk")
PANELS = {
    "as they are": ("none", "opo", "ogb", "otb", "otb_shrunk"),
    "one left out: no bias": ("ogb, one left out", "otb, one left out", "otb_shrunk, one left out"),
    "damped": ("damped_return", "inverse_energy", "inverse_relative", "clipped", "token_damped"),
}


def measure(task: str, folder: Path, seed: int) -> None:
    pool, flags = TASKS[task]
    if task.isdigit():
        data = folder / f"{task}.jsonl"
        data.parent.mkdir(parents=True, exist_ok=True)
        problems = scratchpad.problems(scratchpad.STEPS[int(task)])
        data.write_text("".join(json.dumps(problem) + "\n" for problem in problems))
        flags = ["--model_name_or_path", f"recipes.toy:scratchpad_{task}", "--dataset_name", str(data)]
        flags += ["--instruction", "", "--max_completion_length", str(2 * int(task))]
        flags += ["--reward_funcs", "recipes.toy.scratchpad:last_digit", "--reward_weights", "0", "1"]
    flags = [*flags, "--num_prompts", str(PROMPTS), "--completions_per_prompt", str(pool), "--seed", str(seed)]
    flags += ["--group_sizes", *map(str, GROUPS), "--output_dir", str(folder / task)]
    gradient_noise.main([*flags, "--baselines", *BASELINES, *candidates.register()])


def picture(of: dict[str, dict], path: Path) -> None:
    """The scratchpad: one row per panel of `PANELS`, one column per group size."""
    of = {int(task): rows for task, rows in of.items() if task.isdigit()}
    if not of:
        return
    figure = Figure(figsize=(4.2 * len(GROUPS), 3.2 * len(PANELS)), layout="constrained")
    axes = figure.subplots(len(PANELS), len(GROUPS), sharex=True, sharey=True, squeeze=False)
    lengths = sorted(of)
    for row, (title, names) in zip(axes, PANELS.items(), strict=True):
        for axis, n in zip(row, GROUPS, strict=True):
            for i, name in enumerate(names):
                # Side by side, so that intervals do not hide each other
                found = [
                    (tokens * 1.04 ** (i - len(names) / 2), of[tokens][name, n].over_group_mean) for tokens in lengths
                ]
                found = [(at, ratio) for at, ratio in found if not ratio.lost]
                places, values = [at for at, _ in found], [ratio.value for _, ratio in found]
                line = axis.plot(places, values, "o-", markersize=4, label=name)[0]
                for at, ratio in found:
                    ends = [max(ratio.low, 0), min(ratio.high, 9)]
                    axis.plot([at, at], ends, color=line.get_color(), alpha=0.4)
            axis.axhline(1, color="0.4", linewidth=0.8, linestyle=":")
            axis.set(xscale="log", title=f"{title}, N = {n}", ylim=(0, 1.7))
            axis.set_xticks(lengths, map(str, lengths))
            axis.minorticks_off()
            axis.grid(alpha=0.3)
        row[0].set_ylabel("efficiency over the group mean's")
        row[-1].legend(fontsize=8, loc="upper right")
    for axis in axes[-1]:
        axis.set_xlabel("tokens per completion")
    figure.suptitle(
        f"The scratchpad ({PROMPTS} prompts per length; bars: 95 % by bootstrap over prompts)", fontsize=11
    )
    figure.savefig(path, dpi=110)


def report(folder: Path, tasks: list[str]) -> None:
    """Of all tasks: efficiency and noise to signal over the group mean's with intervals, and the cosine."""
    of = {}
    for task in tasks:
        prompts = Storage(folder / task, {}, read_only=True).prompts()
        of[task] = {(row.name, row.n): row for row in compare(moments_of(prompts, scale_of))}
    lines = []
    for n in GROUPS:
        titles = [f"T = {task}" if task.isdigit() else task for task in tasks]
        lines += [f"\nN = {n}:\n", "| estimator | " + " | ".join(titles) + " |", "|---" * (len(tasks) + 1) + "|"]
        for name, _ in (key for key in of[tasks[0]] if key[1] == n):
            cells = [of[task][name, n] for task in tasks]
            shown = " | ".join(
                f"{row.over_group_mean.text()}; {row.noise_over_group_mean.text()}; {row.cosine.value:.3f}"
                for row in cells
            )
            lines.append(f"| `{name}` | {shown} |")
    text = "\n".join(lines) + "\n"
    (folder / "tables.md").write_text(text)
    picture(of, folder / "horizon.png")
    say(text)
    say(f"{folder}: tables.md, horizon.png, and the data per task.")


def main(argv: list[str]) -> None:
    parser = argparse.ArgumentParser(prog="horizon", description=__doc__.splitlines()[1])
    parser.add_argument("--tasks", nargs="+", choices=TASKS, default=list(TASKS), help="lengths, or other tasks")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--plot_only", action="store_true", help="tables and picture from what is saved")
    parser.add_argument("--output_dir", type=Path, default=Path("runs/studies/horizon"))
    args = parser.parse_args(argv)
    try:
        for task in args.tasks:
            if not args.plot_only:
                measure(task, args.output_dir, args.seed)
        report(args.output_dir, [task for task in TASKS if task in args.tasks])
    except InputError as error:
        parser.error(str(error))


if __name__ == "__main__":
    tidy_output()
    main(sys.argv[1:])
