"""
Compare baselines with one recipe over several seeds: every run, one table, one picture.

    python -m recipes.compare --recipe math --baselines otb group_mean --seeds 1 2 3
    python -m recipes.compare --baselines otb group_mean --seeds 1 2 3 4 5 --config recipes/math_zero3.yaml \\
        --launcher "accelerate launch --config_file recipes/accelerate/zero3.yaml"

All other flags go to the recipe. Repeat the command to go on: finished runs are kept, and unfinished ones continue
from their last checkpoint. Baselines and seeds may be added; other flags must stay, so that runs can be compared.
"""

import argparse
import json
import math
import shlex
import signal
import statistics
import subprocess
import sys
from pathlib import Path

import pandas
from matplotlib.figure import Figure
from scipy import stats

from trl_otb.stopping import latest_checkpoint


RECIPES = Path(__file__).parent
ACCURACY = "eval_rewards/accuracy/mean"


def run(recipe: str, launcher: str, flags: list[str], baseline: str, seed: int, folder: Path) -> pandas.DataFrame:
    """The log of a run, which is trained unless its folder holds it."""
    state = folder / "trainer_state.json"
    if not state.is_file():
        own = ["--baseline", baseline, "--seed", str(seed), "--output_dir", str(folder)]
        if latest_checkpoint(folder):
            own += ["--resume_from_checkpoint", "latest"]
        script = str(RECIPES / f"{recipe}.py")
        process = subprocess.Popen([*shlex.split(launcher), script, *flags, *own])
        before = signal.signal(signal.SIGINT, lambda *_: None)  # Ctrl-C reaches the run as well, which saves and ends
        code = process.wait()
        signal.signal(signal.SIGINT, before)
        if code != 0:
            sys.exit(f"compare.py: {baseline} with seed {seed} ended with exit code {code}.")
    return pandas.DataFrame(json.loads(state.read_text())["log_history"])


def interval(values: list[float]) -> str:
    """The mean and its 95 % interval (Student's t); of a single value, the value."""
    if len(values) == 1:
        return f"{values[0]:.1f}"
    half = stats.t.ppf(0.975, df=len(values) - 1) * statistics.stdev(values) / math.sqrt(len(values))
    return f"{statistics.fmean(values):.1f} ± {half:.1f}"


def table(logs: dict[str, dict[int, pandas.DataFrame]]) -> str:
    """In Markdown, a row per baseline, and its gain beside the first one's with the same seeds."""
    first = next(iter(logs))
    lines = [f"| baseline | n | before, % | after, % | gain, points | gain minus {first}'s |", "|---" * 6 + "|"]
    gains: dict[str, dict[int, float]] = {}
    for name, by_seed in logs.items():
        accuracies = {seed: 100 * log[ACCURACY].dropna() for seed, log in by_seed.items()}
        before, after = ([of.iloc[i] for of in accuracies.values()] for i in (0, -1))
        gains[name] = {seed: of.iloc[-1] - of.iloc[0] for seed, of in accuracies.items()}
        ahead = [gain - gains[first][seed] for seed, gain in gains[name].items()]
        cells = [name, str(len(by_seed)), *map(interval, (before, after, [*gains[name].values()]))]
        lines.append(f"| {' | '.join(cells)} | {'' if name == first else interval(ahead)} |")
    return "\n".join(lines) + "\n\nIntervals are of 95 % over seeds (Student's t); differences are paired by seed.\n"


def picture(logs: dict[str, dict[int, pandas.DataFrame]], path: Path) -> None:
    """Held-out accuracy and training reward by step: single seeds pale, their mean bold."""
    figure = Figure(figsize=(10, 4.2), layout="constrained")
    for axis, column in zip(figure.subplots(1, 2), (ACCURACY, "reward"), strict=True):
        for i, (name, by_seed) in enumerate(logs.items()):
            curves = [log.dropna(subset=[column]).groupby("step")[column].last() for log in by_seed.values()]
            smooth = [c.rolling(1 + len(c) // 10, center=True, min_periods=1).mean() for c in curves]
            curves = pandas.concat(curves if column == ACCURACY else smooth, axis="columns", join="inner")
            curves.plot(ax=axis, color=f"C{i}", alpha=0.3, legend=False, title=column)
            curves.mean(axis="columns").plot(ax=axis, color=f"C{i}", linewidth=2, label=name, legend=True)
        axis.grid(alpha=0.3)
    figure.savefig(path, dpi=120)


def main(argv: list[str]) -> None:
    parser = argparse.ArgumentParser(prog="compare.py", description=__doc__.splitlines()[1], allow_abbrev=False)
    parser.add_argument("--recipe", choices=["math", "tool_math"], default="math")
    parser.add_argument("--baselines", nargs="+", required=True)
    parser.add_argument("--seeds", nargs="+", type=int, required=True)
    parser.add_argument("--launcher", default=sys.executable, help="the command that starts a run")
    parser.add_argument("--folder", type=Path, help="by default runs/compare/RECIPE")
    own, flags = parser.parse_known_args(argv)
    folder = own.folder or Path("runs/compare", own.recipe)
    folder.mkdir(parents=True, exist_ok=True)
    started = folder / "flags.txt"
    if started.is_file() and started.read_text() != shlex.join(flags):
        parser.error(f"{folder} has runs with the flags {started.read_text()!r}: use these, or another --folder.")
    started.write_text(shlex.join(flags))
    logs: dict[str, dict[int, pandas.DataFrame]] = {name: {} for name in dict.fromkeys(own.baselines)}
    for seed in own.seeds:  # all baselines early
        for name in logs:
            place = folder / f"{name.replace(':', '.')}-seed{seed}"
            logs[name][seed] = run(own.recipe, own.launcher, flags, name, seed, place)
    (folder / "compare.md").write_text(table(logs), encoding="utf-8")
    picture(logs, folder / "compare.png")
    print(f"{table(logs)}\n{folder}: compare.md (this table), compare.png, and a folder per run.")


if __name__ == "__main__":
    main(sys.argv[1:])
