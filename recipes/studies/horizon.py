"""
Does the gain of a baseline by energy grow with the horizon? Efficiency on a scratchpad of 10 to 300 tokens.

    OMP_NUM_THREADS=1 python -m recipes.studies.horizon              # an hour on one core; can be stopped and go on
    OMP_NUM_THREADS=1 python -m recipes.studies.horizon --tasks 10   # minutes
    OMP_NUM_THREADS=1 python -m recipes.studies.horizon --tasks 10 30 100 sums --num_prompts 32
    OMP_NUM_THREADS=1 python -m recipes.studies.horizon --tasks 10 --seed 1 --output_dir runs/studies/horizon-1
    python -m recipes.studies.horizon --plot_only
    python -m recipes.studies.horizon --tasks 100 300 --plot_only --publish   # two columns of horizon.md, horizon.png

The policies of the scratchpad (recipes/toy/scratchpad.py) make as many mistakes at every length; what grows is the
number of free choices that do no harm. Sums and the calculator, whose mistakes are improbable tokens, are the
contrast. Each task is measured by recipes.gradient_noise, with the candidates of candidates.py.
"""

import argparse
import json
import sys
from dataclasses import dataclass
from pathlib import Path

from matplotlib.figure import Figure

from recipes.common.errors import InputError
from recipes.common.launching import say, tidy_output
from recipes.gradient_noise import __main__ as gradient_noise
from recipes.gradient_noise.across import with_pooled
from recipes.gradient_noise.measure import compare
from recipes.gradient_noise.pools import scale_of
from recipes.gradient_noise.storage import Storage, moments_of
from recipes.studies import candidates
from recipes.studies.pages import Cell, Column, publish, tables
from recipes.toy import lake, scratchpad


RECIPES = Path(__file__).parents[1]
PROMPTS = 16
CALCULATOR = ["--config", str(RECIPES / "tool_math_cpu.yaml"), "--tools", "calculator"]
# Completions per prompt, and what recipes.gradient_noise is told beside; the dials go by their names
TASKS = {
    "10": (256, []),
    "30": (256, []),
    "100": (256, []),
    "300": (128, []),
    "sums": (256, ["--config", str(RECIPES / "math_cpu.yaml")]),
    "calculator": (128, CALCULATOR),
    "lake_6": (128, []),
    "lake_14": (128, []),
    "lake_30": (128, []),
    "lake_46": (128, []),
    "lake_6_turns": (128, []),
    "lake_14_turns": (128, []),
    "lake_30_turns": (128, []),
    "lake_46_turns": (128, []),
}
POOLED = ("rloo_pooled", "ogb_pooled", "ogb_pooled_damped")


@dataclass(frozen=True)
class Family:
    """
    Tasks that are measured alike and shown side by side.

    Args:
        tasks (`list[str]`):
            Keys of `TASKS`.
        groups (`tuple[int, ...]`):
            Group sizes.
        baselines (`tuple[str, ...]`):
            Built-in ones and candidates.
        columns (`dict[str, tuple[int, dict[int, str]]]`):
            Of the picture, by title: a group size, and the tasks by the value of the dial.
        dial (`str`):
            What the dial counts.
        page (`str`):
            The published one; its picture has the same name.
    """

    tasks: list[str]
    groups: tuple[int, ...]
    baselines: tuple[str, ...]
    columns: dict[str, tuple[int, dict[int, str]]]
    dial: str
    page: str


FAMILIES = {
    "tokens": Family(
        ["10", "30", "100", "300", "sums", "calculator"],
        (4, 8, 32),
        ("opo", "ogb", "otb", "otb_shrunk", *POOLED, *candidates.names()),
        {f"N = {n}": (n, {t: str(t) for t in scratchpad.STEPS}) for n in (4, 8, 32)},
        "tokens per completion",
        "horizon.md",
    ),
    "turns": Family(
        [task for task in TASKS if task.startswith("lake")],
        (4, 8),
        ("opo", "ogb", "otb", "otb_shrunk", *POOLED, "damped_return", "damped_mean", "inverse_energy", "clipped"),
        {
            "reward at the end, N = 4": (4, {t: f"lake_{t}" for t in lake.SIDES}),
            "rewards per turn, N = 4": (4, {t: f"lake_{t}_turns" for t in lake.SIDES}),
        },
        "turns per game",
        "turns.md",
    ),
}
PANELS = {
    "as they are": ("none", "opo", "ogb", "otb", "otb_shrunk"),
    "one left out: no bias": ("ogb, one left out", "otb, one left out", "otb_shrunk, one left out"),
    "pooled": POOLED,
    "damped": ("damped_return", "inverse_energy", "inverse_relative", "clipped", "token_damped"),
}


def write(problems: list[dict], path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(problem) + "\n" for problem in problems))


def flags_of(task: str, folder: Path, seed: int, num_prompts: int | None = None) -> list[str]:
    """What recipes.gradient_noise is told; data that it reads are written to `folder`."""
    pool, flags = TASKS[task]
    if task.isdigit():
        data = folder / f"{task}.jsonl"
        write(scratchpad.problems(scratchpad.STEPS[int(task)]), data)
        flags = ["--model_name_or_path", f"recipes.toy:scratchpad_{task}", "--dataset_name", str(data)]
        flags += ["--instruction", "", "--max_completion_length", str(2 * int(task))]
        flags += ["--reward_funcs", "recipes.toy.scratchpad:last_digit", "--reward_weights", "0", "1"]
    elif task.startswith("lake"):
        turns, kind = int(task.split("_")[1]), task.endswith("_turns")
        data = folder / f"lake_{turns}.jsonl"
        write(lake.problems(lake.SIDES[turns]), data)
        flags = ["--config", str(RECIPES / "tool_math_cpu.yaml"), "--model_name_or_path", f"recipes.toy:lake_{turns}"]
        flags += ["--dataset_name", str(data), "--environment_factory", "recipes.toy.lake:Lake"]
        flags += ["--reward_funcs", f"recipes.toy.lake:{'progress' if kind else 'won'}", "--reward_weights", "0", "1"]
        flags += ["--max_tool_calling_iterations", str(2 * turns), "--max_completion_length", str(32 * turns)]
    flags = [*flags, "--num_prompts", str(num_prompts or PROMPTS), "--completions_per_prompt", str(pool)]
    return [*flags, "--seed", str(seed), "--output_dir", str(folder / task)]


def measure(task: str, family: Family, folder: Path, seed: int, num_prompts: int | None) -> None:
    candidates.register()
    flags = [*flags_of(task, folder, seed, num_prompts), "--group_sizes", *map(str, family.groups)]
    gradient_noise.main([*flags, "--baselines", *family.baselines])


def title_of(task: str) -> str:
    return f"T = {task}" if task.isdigit() else task


def picture(columns: dict[str, Column], family: Family, path: Path) -> None:
    """One row per panel of `PANELS`, one column per column of the family, of the tasks that are there."""
    shown = {
        title: (n, {x: columns[title_of(task)] for x, task in tasks.items() if title_of(task) in columns})
        for title, (n, tasks) in family.columns.items()
    }
    shown = {title: (n, tasks) for title, (n, tasks) in shown.items() if tasks}
    if not shown:
        return
    figure = Figure(figsize=(4.2 * len(shown) + 0.6, 3.2 * len(PANELS)), layout="constrained")
    axes = figure.subplots(len(PANELS), len(shown), sharex=True, sharey=True, squeeze=False)
    for row, (panel, names) in zip(axes, PANELS.items(), strict=True):
        names = [
            name for name in names if any((name, n) in t.cells for n, tasks in shown.values() for t in tasks.values())
        ]
        for axis, (title, (n, tasks)) in zip(row, shown.items(), strict=True):
            for i, name in enumerate(names):
                # Side by side, so that intervals do not hide each other
                found = [
                    (x * 1.04 ** (i - len(names) / 2), task.cells[name, n].efficiency)
                    for x, task in tasks.items()
                    if (name, n) in task.cells
                ]
                found = [(at, ratio) for at, ratio in found if not ratio.lost]
                places, values = [at for at, _ in found], [ratio.value for _, ratio in found]
                line = axis.plot(places, values, "o-", markersize=4, label=name)[0]
                for at, ratio in found:
                    ends = [max(ratio.low, 0), min(ratio.high, 9)]
                    axis.plot([at, at], ends, color=line.get_color(), alpha=0.4)
            axis.axhline(1, color="0.4", linewidth=0.8, linestyle=":")
            axis.set(xscale="log", title=f"{panel}, {title}", ylim=(0, 2))
            axis.title.set_fontsize(10)
            axis.set_xticks(list(tasks), map(str, tasks))
            axis.minorticks_off()
            axis.grid(alpha=0.3)
        row[0].set_ylabel("efficiency over the group mean's")
        row[-1].legend(fontsize=8, loc="upper right")
    for axis in axes[-1]:
        axis.set_xlabel(family.dial)
    prompts = sorted({task.prompts for _, tasks in shown.values() for task in tasks.values()})
    numbers = " to ".join(map(str, dict.fromkeys((prompts[0], prompts[-1]))))
    figure.suptitle(f"{numbers} prompts per point; bars: 95 % by bootstrap over prompts", fontsize=11)
    figure.savefig(path, dpi=110)


def measured(folder: Path, family: Family, tasks: list[str]) -> dict[str, Column]:
    columns = {}
    for task in tasks:
        storage = Storage(folder / task, {}, read_only=True)
        prompts = storage.prompts()
        if across := storage.settings.get("across_prompts"):
            prompts = with_pooled(prompts, across, list(family.groups), PROMPTS)
        rows = compare(moments_of(prompts, scale_of), batch=PROMPTS)
        columns[title_of(task)] = Column(len(prompts), {(row.name, row.n): Cell.of(row) for row in rows})
    return columns


def report(folder: Path, family: Family, tasks: list[str]) -> dict[str, Column]:
    """Tables of all tasks, and the picture, beside the data."""
    columns = measured(folder, family, tasks)
    text = tables(columns, family.groups)
    (folder / "tables.md").write_text(text)
    picture(columns, family, folder / "horizon.png")
    say(text)
    say(f"{folder}: tables.md, horizon.png, and the data per task.")
    return columns


def main(argv: list[str]) -> None:
    parser = argparse.ArgumentParser(prog="horizon", description=__doc__.splitlines()[1])
    parser.add_argument("--family", choices=FAMILIES, default="tokens", help="what the dial counts")
    parser.add_argument("--tasks", nargs="+", choices=TASKS, help="some of the family's tasks; by default all")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--num_prompts", type=int, help=f"per task, by default {PROMPTS}; more add to what is there")
    parser.add_argument("--plot_only", action="store_true", help="tables and picture from what is saved")
    parser.add_argument("--publish", action="store_true", help="put the columns into the page, and draw its picture")
    parser.add_argument("--output_dir", type=Path, help="by default runs/studies/horizon, or runs/studies/turns")
    args = parser.parse_args(argv)
    if args.publish and args.seed:
        parser.error("--publish is for the seed of the page, 0")
    family = FAMILIES[args.family]
    tasks = args.tasks or family.tasks
    if others := [task for task in tasks if task not in family.tasks]:
        parser.error(
            f"--tasks: {', '.join(others)} is not in the family {args.family}, which has {', '.join(family.tasks)}"
        )
    folder = args.output_dir or Path("runs/studies") / {"tokens": "horizon"}.get(args.family, args.family)
    try:
        for task in tasks:
            if not args.plot_only:
                measure(task, family, folder, args.seed, args.num_prompts)
        columns = report(folder, family, [task for task in family.tasks if task in tasks])
        if args.publish:
            page = Path(__file__).parent / family.page
            picture(publish(page, columns, family.groups), family, page.with_suffix(".png"))
    except InputError as error:
        parser.error(str(error))


if __name__ == "__main__":
    tidy_output()
    main(sys.argv[1:])
