"""
Does the gain of a baseline by energy grow with the horizon? Efficiency on a scratchpad of 10 to 300 tokens.

    OMP_NUM_THREADS=1 python -m recipes.studies.horizon                  # about an hour on one core; can be stopped
    OMP_NUM_THREADS=1 python -m recipes.studies.horizon --lengths 10     # minutes
    OMP_NUM_THREADS=1 python -m recipes.studies.horizon --lengths 10 --seed 1 --output_dir runs/studies/horizon-1
    python -m recipes.studies.horizon --plot_only

The policies (recipes/toy/scratchpad.py) make as many mistakes at every length; what grows is the number of free
choices that do no harm. Each length is measured by recipes.gradient_noise, with the candidates of candidates.py.
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


PROMPTS = 16
POOLS = {10: 256, 30: 256, 100: 256, 300: 128}  # completions per prompt
GROUPS = (4, 8, 32)
BASELINES = ("opo", "ogb", "otb", "otb_shrunk")
PANELS = {
    "as they are": ("none", "opo", "ogb", "otb", "otb_shrunk"),
    "one left out: no bias": ("ogb, one left out", "otb, one left out", "otb_shrunk, one left out"),
    "damped": ("damped_return", "damped_mean", "inverse_energy", "inverse_relative", "token_damped"),
}


def measure(tokens: int, folder: Path, seed: int) -> None:
    data = folder / f"{tokens}.jsonl"
    data.parent.mkdir(parents=True, exist_ok=True)
    problems = scratchpad.problems(scratchpad.STEPS[tokens])
    data.write_text("".join(json.dumps(problem) + "\n" for problem in problems))
    options = {
        "model_name_or_path": f"recipes.toy:scratchpad_{tokens}",
        "dataset_name": str(data),
        "instruction": "",
        "reward_funcs": "recipes.toy.scratchpad:last_digit",
        "max_completion_length": str(2 * tokens),
        "num_prompts": str(PROMPTS),
        "completions_per_prompt": str(POOLS[tokens]),
        "seed": str(seed),
        "output_dir": str(folder / str(tokens)),
    }
    flags = [word for name, value in options.items() for word in (f"--{name}", value)]
    flags += ["--reward_weights", "0", "1", "--group_sizes", *map(str, GROUPS)]
    gradient_noise.main([*flags, "--baselines", *BASELINES, *candidates.register()])


def picture(of: dict[int, dict], path: Path) -> None:
    """One row per panel of `PANELS`, one column per group size."""
    figure = Figure(figsize=(4.2 * len(GROUPS), 3.2 * len(PANELS)), layout="constrained")
    axes = figure.subplots(len(PANELS), len(GROUPS), sharex=True, sharey=True, squeeze=False)
    lengths = sorted(of)
    for row, (title, names) in zip(axes, PANELS.items(), strict=True):
        for axis, n in zip(row, GROUPS, strict=True):
            for i, name in enumerate(names):
                ratios = [of[tokens][name, n].over_group_mean for tokens in lengths]
                # Side by side, so that intervals do not hide each other
                shifted = [tokens * 1.04 ** (i - len(names) / 2) for tokens in lengths]
                line = axis.plot(shifted, [r.value for r in ratios], "o-", markersize=4, label=name)[0]
                for at, ratio in zip(shifted, ratios, strict=True):
                    axis.plot([at, at], [max(ratio.low, 0), min(ratio.high, 20)], color=line.get_color(), alpha=0.4)
            axis.axhline(1, color="0.4", linewidth=0.8, linestyle=":")
            axis.set(xscale="log", title=f"{title}, N = {n}", ylim=(0, 4))
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


def report(folder: Path, lengths: list[int]) -> None:
    of = {}
    for tokens in lengths:
        prompts = Storage(folder / str(tokens), {}, read_only=True).prompts()
        of[tokens] = {(row.name, row.n): row for row in compare(moments_of(prompts, scale_of))}
    lines = []
    for n in GROUPS:
        lines += [f"\nN = {n}:\n", "| estimator | " + " | ".join(f"T = {tokens}" for tokens in lengths) + " |"]
        lines.append("|---" * (len(lengths) + 1) + "|")
        for name, _ in (key for key in of[lengths[0]] if key[1] == n):
            cells = [of[tokens][name, n] for tokens in lengths]
            shown = " | ".join(f"{row.over_group_mean.text()}, {row.cosine.value:.3f}" for row in cells)
            lines.append(f"| `{name}` | {shown} |")
    text = "\n".join(lines) + "\n"
    (folder / "tables.md").write_text(text)
    picture(of, folder / "horizon.png")
    say(text)
    say(f"{folder}: tables.md, horizon.png, and the data per length.")


def main(argv: list[str]) -> None:
    parser = argparse.ArgumentParser(prog="horizon", description=__doc__.splitlines()[1])
    parser.add_argument("--lengths", type=int, nargs="+", choices=POOLS, default=list(POOLS))
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--plot_only", action="store_true", help="table and picture from what is saved")
    parser.add_argument("--output_dir", type=Path, default=Path("runs/studies/horizon"))
    args = parser.parse_args(argv)
    try:
        for tokens in args.lengths:
            if not args.plot_only:
                measure(tokens, args.output_dir, args.seed)
        report(args.output_dir, sorted(args.lengths))
    except InputError as error:
        parser.error(str(error))


if __name__ == "__main__":
    tidy_output()
    main(sys.argv[1:])
