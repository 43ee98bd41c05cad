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
from collections.abc import Sequence
from pathlib import Path

import numpy
import pandas
from matplotlib.figure import Figure
from scipy import stats

from trl_otb.stopping import latest_checkpoint


RECIPES = Path(__file__).parent
ACCURACY = "eval_rewards/accuracy/mean"
LEVELS = (0.5, 0.75, 0.95)  # of the first baseline's gain
DRAWS = 2000  # of the bootstrap
Curve = tuple[numpy.ndarray, numpy.ndarray]  # of a run: tokens so far, and the reward there


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


# Tokens saved


def smoothed(tokens: Sequence[float], rewards: Sequence[float]) -> Curve:
    """A run's steps as moving means over a tenth of it."""
    window = numpy.ones(max(len(rewards) // 10, 1)) / max(len(rewards) // 10, 1)
    return numpy.convolve(tokens, window, "valid"), numpy.convolve(rewards, window, "valid")


def stacked(curves: Sequence[Curve]) -> numpy.ndarray:
    """As (run, tokens or reward, point), as far as all of them go."""
    shortest = min(len(tokens) for tokens, _ in curves)
    return numpy.array([[part[:shortest] for part in curve] for curve in curves])


def levels_of(curves: numpy.ndarray) -> numpy.ndarray:
    """The rewards at `LEVELS` of the way from where curves begin to their highest point; (…, level)."""
    rewards = curves[..., 1, :]
    return rewards[..., :1] + numpy.array(LEVELS) * (rewards.max(-1) - rewards[..., 0])[..., None]


def tokens_until(curves: numpy.ndarray, levels: numpy.ndarray) -> numpy.ndarray:
    """Tokens until the reward is at each level for the first time, between two points; infinite if it never is."""
    above = curves[..., 1, None, :] >= levels[..., None]  # (…, level, point)
    at = above.argmax(-1)
    before = numpy.maximum(at - 1, 0)
    ends = [numpy.take_along_axis(curves[..., part, :], of, -1) for part in (0, 1) for of in (before, at)]
    tokens, tokens_there, reward, reward_there = ends
    rise = reward_there - reward
    share = numpy.divide(levels - reward, rise, out=numpy.zeros_like(rise), where=rise > 0)
    return numpy.where(above.any(-1), tokens + share * (tokens_there - tokens), math.inf)


def tokens_saved(reference: Sequence[Curve], other: Sequence[Curve]) -> tuple[list[list[float]], list[int]]:
    """
    What `other` needs to reach the levels of `reference`, whose runs have the same seeds in the same order: at each
    level the change of the number of tokens, −0.4 for 40 % fewer, with the ends of its 95 % interval; and the number of
    pairs in which `other` is there sooner.

    The change is that of the mean curves. The interval is by bootstrap over pairs, each of which draws its level, too.
    A curve that never gets there counts as infinite, in the interval as well. A single pair has no interval.
    """
    both = stacked([*reference, *other]).reshape(2, len(reference), 2, -1)  # (arm, pair, tokens or reward, point)
    pairs = both.shape[1]

    def changes(means: numpy.ndarray) -> numpy.ndarray:
        levels = levels_of(means[0])
        return tokens_until(means[1], levels) / tokens_until(means[0], levels) - 1

    found = [changes(both.mean(axis=1))]
    if pairs > 1:
        drawn = numpy.random.default_rng(0).integers(pairs, size=(DRAWS, pairs))
        found += [*numpy.quantile(changes(both[:, drawn].mean(axis=2)), [0.025, 0.975], axis=0, method="nearest")]
    needed = tokens_until(both, levels_of(both[0].mean(axis=0)))
    return numpy.transpose(found).tolist(), (needed[1] < needed[0]).sum(axis=0).tolist()


def per_cent(change: Sequence[float]) -> str:
    value, *ends = ("never" if math.isinf(x) else f"{100 * x:+.0f}".replace("-", "−") for x in change)
    return f"{value} ({' to '.join(ends)})" if ends else value


def curves_of(by_seed: dict[int, pandas.DataFrame]) -> list[Curve]:
    logs = [log.dropna(subset=["reward", "num_tokens"]) for log in by_seed.values()]
    return [smoothed(log["num_tokens"], log["reward"]) for log in logs]


def tokens_table(logs: dict[str, dict[int, pandas.DataFrame]]) -> str:
    """In Markdown: tokens to the levels of the first baseline, beside its own."""
    (first, reference), *others = logs.items()
    lines = [f"| tokens beside {first}'s, % | 50 % | 75 % | 95 % | sooner |", "|---" * 5 + "|"]
    for name, by_seed in others:
        changes, sooner = tokens_saved(*map(curves_of, (reference, by_seed)))
        pairs = ", ".join(map(str, sooner)) + f" of {len(by_seed)}"
        lines.append(f"| {' | '.join([name, *map(per_cent, changes), pairs])} |")
    return "\n".join(lines) + (
        f"\n\nTokens, with those of prompts, until the training reward is where {first} is after 50, 75 and 95 % of "
        "its gain: −40 are 40 % fewer. Intervals are of 95 %, by bootstrap over pairs of seeds, and short with few. "
        '"Never": the level was not reached. "Sooner": pairs of seeds, by level.\n'
    )


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
    """Held-out accuracy by step and training reward by tokens: single seeds pale, their mean bold; and the levels."""
    figure = Figure(figsize=(10, 4.2), layout="constrained")
    left, right = figure.subplots(1, 2)
    for i, (name, by_seed) in enumerate(logs.items()):
        accuracies = [log.dropna(subset=[ACCURACY]).groupby("step")[ACCURACY].last() for log in by_seed.values()]
        accuracies = pandas.concat(accuracies, axis="columns", join="inner")
        accuracies.plot(ax=left, color=f"C{i}", alpha=0.3, legend=False, title=ACCURACY)
        accuracies.mean(axis="columns").plot(ax=left, color=f"C{i}", linewidth=2, label=name, legend=True)
        curves = curves_of(by_seed)
        for curve in curves:
            right.plot(*curve, color=f"C{i}", alpha=0.3)
        mean = stacked(curves).mean(axis=0)
        right.plot(*mean, color=f"C{i}", linewidth=2, label=name)
        if i == 0:
            for share, level in zip(LEVELS, levels_of(mean), strict=True):
                right.axhline(level, color="0.5", linewidth=0.8, linestyle=":")
                text = f"{share:.0%} of {name}'s gain"
                right.annotate(text, (0.01, level), xycoords=("axes fraction", "data"), fontsize=7, va="bottom")
    right.set(title="reward", xlabel="tokens")
    right.legend(loc="lower right")
    for axis in (left, right):
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
    tables = table(logs) + (f"\n{tokens_table(logs)}" if len(logs) > 1 else "")
    (folder / "compare.md").write_text(tables, encoding="utf-8")
    picture(logs, folder / "compare.png")
    print(f"{tables}\n{folder}: compare.md (these tables), compare.png, and a folder per run.")


if __name__ == "__main__":
    main(sys.argv[1:])
