"""
Compare baselines with one recipe over several seeds: every run, one table, one picture.

    python -m recipes.compare --recipe math --baselines otb group_mean --seeds 1 2 3
    python -m recipes.compare --recipe math --baselines otb group_mean --seeds 1 2 3 4 5 \\
        --launcher "accelerate launch --config_file recipes/accelerate/zero3.yaml" --config recipes/math_zero3.yaml

All other flags go to the recipe. Repeat the command to resume it: finished runs are kept, and unfinished ones continue
from their newest checkpoint. Baselines and seeds may be added; other flags must stay, so that runs can be compared.
"""

import argparse
import json
import os
import shlex
import signal
import statistics
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pandas
from matplotlib.figure import Figure
from scipy import stats

from recipes.common.errors import HelpShown, InputError, Stopped, input_errors, launch, stopping_signals
from recipes.common.launching import flag_names, print_once
from recipes.common.report import markdown, smoothed
from recipes.common.run_folder import CONFIGURATION, COUNTS, RESULT, STATE, differences, latest_checkpoint
from trl_otb.baselines import BASELINES
from trl_otb.comparison.storage import lock


RECIPES = Path(__file__).parent


@dataclass
class Run:
    """A finished run: `result` as in its result.json, `log` as in its trainer_state.json."""

    baseline: str
    seed: int
    result: dict
    log: list[dict]
    configuration: dict

    def percent(self, when: str) -> float:
        """The held-out accuracy `"before"` or `"after"`."""
        return 100 * self.result[when]["mean"]

    def held_out(self) -> pandas.Series:
        """The held-out accuracy in percent, by step."""
        return pandas.Series({e["step"]: 100 * e["mean"] for e in self.result["evaluations"]})

    def reward(self) -> pandas.Series:
        """The training reward, smoothed, by step."""
        return smoothed(pandas.Series({entry["step"]: entry["reward"] for entry in self.log if "reward" in entry}))

    @property
    def gain(self) -> float:
        """The gain in held-out accuracy, in percentage points."""
        return self.percent("after") - self.percent("before")


class Parser(argparse.ArgumentParser):
    def error(self, message: str) -> None:
        raise InputError(f"{message}. See --help.")

    def exit(self, status: int = 0, message: str | None = None) -> None:
        raise HelpShown(status)


def parse(argv: list[str]) -> tuple[argparse.Namespace, list[str]]:
    """compare.py's own flags, and the recipe's."""
    form = argparse.RawTextHelpFormatter
    parser = Parser("compare.py", description=__doc__, allow_abbrev=False, formatter_class=form)
    parser.add_argument("--recipe", choices=("math", "tool_math"), default="math")
    names = f"{', '.join(BASELINES)}, module:function"
    parser.add_argument("--baselines", nargs="+", required=True, metavar="NAME", help=names)
    parser.add_argument("--seeds", nargs="+", required=True, type=int, metavar="SEED")
    parser.add_argument("--folder", type=Path, help="folder of runs, table and picture (runs/compare/RECIPE)")
    parser.add_argument("--launcher", default=sys.executable, help="command that starts the recipe (python)")
    own, flags = parser.parse_known_args(argv)
    for name in ("baseline", "seed", "output_dir", "overwrite", "resume_from_checkpoint", "eval_only"):
        if name in flag_names(flags):
            raise InputError(f"--{name} is set by compare.py: use --baselines, --seeds or --folder.")
    for values, name in ((own.baselines, "baselines"), (own.seeds, "seeds")):
        if len(set(values)) < len(values):
            raise InputError(f"`{name}` has duplicates: {' '.join(map(str, values))}.")
    for name in own.baselines:
        if name not in BASELINES and ":" not in name:
            raise InputError(f"`baselines` names {name!r}: choose from {', '.join(BASELINES)}, or module:function.")
    own.folder = own.folder or Path("runs", "compare", own.recipe)
    return own, flags


def run_recipe(own: argparse.Namespace, flags: list[str], baseline: str, seed: int) -> Run:
    """Run the recipe, or resume it."""
    folder = own.folder / f"{baseline.replace(':', '.')}-seed{seed}"
    command = [*shlex.split(own.launcher), str(RECIPES / f"{own.recipe}.py"), *flags]
    command += ["--baseline", baseline, "--seed", str(seed), "--output_dir", str(folder)]
    if any((folder / name).is_file() for name in (RESULT, COUNTS)) or latest_checkpoint(folder) is not None:
        command += ["--resume_from_checkpoint", "latest"]
    code = run_stoppably(command)
    if code == 130:
        raise Stopped(f"Finished runs and checkpoints are kept in {own.folder}; repeat the command to resume.")
    if code != 0 or not (folder / RESULT).is_file():
        raise InputError(f"{baseline}, seed {seed} ended without a result (exit code {code}): {shlex.join(command)}")
    names = (RESULT, STATE, CONFIGURATION)
    result, state, configuration = (json.loads((folder / name).read_text()) for name in names)
    return Run(baseline, seed, result, state["log_history"], configuration)


def run_stoppably(command: list[str]) -> int:
    """
    The exit code of a command, 130 if it was stopped. Ctrl-C and the other stopping signals are passed on once, to the
    command and its children, and the command may take its time to save a checkpoint.
    """
    stopped = []
    with subprocess.Popen(command, start_new_session=True) as child:  # out of reach of the terminal's Ctrl-C
        for signum in stopping_signals():
            signal.signal(signum, lambda signum, frame: stopped.append(os.killpg(child.pid, signum)))
        code = child.wait()
    for signum in stopping_signals():
        signal.signal(signum, signal.default_int_handler)
    return 130 if stopped else code


def check_alike(runs: list[Run]) -> None:
    """Raise an `InputError` if the last run differs from the first in more than baseline and seed."""
    first, last = runs[0], runs[-1]
    last.configuration["trainer"] |= {"baseline": first.baseline, "seed": first.seed}
    before, after = ({**run.configuration, "steps": run.result["steps"]} for run in (first, last))
    if changed := differences(before, after):
        both = f"{first.baseline} with seed {first.seed} and {last.baseline} with seed {last.seed}"
        raise InputError(f"{both} cannot be compared: {'; '.join(changed)}. Choose another --folder.")


def check_flags(folder: Path, flags: list[str]) -> None:
    """Raise an `InputError` if the folder's runs were started with other flags; save the flags of the first."""
    path = folder / "flags.json"
    before = json.loads(path.read_text()) if path.is_file() else flags
    if before != flags:
        others = f"was started with the flags {shlex.join(before)!r}, and these are {shlex.join(flags)!r}"
        raise InputError(f"{folder} {others}: such runs cannot be compared. Choose another --folder.")
    path.write_text(json.dumps(flags) + "\n")


def interval(values: list[float]) -> str:
    """Mean and 95 % confidence interval (Student's t); for a single value, the value alone."""
    if len(values) == 1:
        return f"{values[0]:.1f}"
    half = stats.t.ppf(0.975, df=len(values) - 1) * stats.sem(values)
    return f"{statistics.fmean(values):.1f} ± {half:.1f}"


def table(runs: list[Run]) -> str:
    """A Markdown table with a row per baseline and its difference from the first one, paired by seed."""
    first, *_ = baselines = list(dict.fromkeys(run.baseline for run in runs))
    rows = [f"baseline|n|before, %|after, %|gain, points|gain minus {first}'s|tokens|seconds".split("|")]
    gain_of_first = {run.seed: run.gain for run in runs if run.baseline == first}
    for name in baselines:
        own = [run for run in runs if run.baseline == name]
        accuracies = [interval([run.percent(when) for run in own]) for when in ("before", "after")]
        ahead = interval([run.gain - gain_of_first[run.seed] for run in own]) if name != first else ""
        costs = [statistics.fmean(run.result[key] for run in own) for key in ("tokens_generated", "training_seconds")]
        gain = interval([run.gain for run in own])
        rows.append([name, str(len(own)), *accuracies, gain, ahead, *(f"{cost:,.0f}" for cost in costs)])
    n = len({run.seed for run in runs})
    note = "95 % intervals over seeds (Student's t); differences are paired by seed"
    return f"{markdown(rows)}\nn = {n} seed{'s: ' + note if n > 1 else ': one seed gives no interval'}.\n"


def picture(runs: list[Run], path: Path, heading: str) -> None:
    """Held-out accuracy and smoothed reward over the steps that all runs have: each run, and their mean in bold."""
    figure = Figure(figsize=(10, 4.2), layout="constrained")
    panels = {"held-out accuracy, %": Run.held_out, "training reward, centred mean over a tenth": Run.reward}
    for axis, (title, curve) in zip(figure.subplots(1, 2), panels.items(), strict=True):
        for i, name in enumerate(dict.fromkeys(run.baseline for run in runs)):
            curves = [curve(run) for run in runs if run.baseline == name]
            by_step = pandas.concat(curves, axis="columns", join="inner")
            style = {"ax": axis, "color": f"C{i}", "title": title, "xlabel": "step"}
            by_step.plot(**style, alpha=0.3, legend=False)
            by_step.mean(axis="columns").plot(**style, linewidth=2, label=f"{name}, n = {len(curves)}", legend=True)
        axis.grid(alpha=0.3)
    figure.suptitle(f"{heading}\nbold: mean over seeds; pale: single seeds", fontsize=11)
    figure.savefig(path, dpi=120)


def main(argv: list[str]) -> None:
    own, flags = parse(argv)
    with input_errors(ValueError):
        held = lock(own.folder, again=True)  # noqa: F841  until this function returns
    check_flags(own.folder, flags)
    jobs = [(baseline, seed) for seed in own.seeds for baseline in own.baselines]  # all baselines early
    runs = []
    for i, (baseline, seed) in enumerate(jobs, start=1):
        print_once(f"\n== {i} of {len(jobs)}: {baseline}, seed {seed}")
        runs.append(run_recipe(own, flags, baseline, seed))
        check_alike(runs)
    runs.sort(key=lambda run: own.baselines.index(run.baseline))
    written = table(runs)
    (own.folder / "compare.md").write_text(written, encoding="utf-8")
    picture(runs, own.folder / "compare.png", f"{own.recipe} {shlex.join(flags)}".strip())
    print_once(f"\n{written}\n{own.folder}: compare.md (this table), compare.png and a folder per run.")


if __name__ == "__main__":
    launch("compare.py", main, sys.argv[1:])
