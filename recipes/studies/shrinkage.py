"""
Does a baseline gain from the other prompts? Leave-one-out baselines shrunk towards those of the other prompts.

    OMP_NUM_THREADS=1 python -m recipes.studies.shrinkage               # 70 minutes on one core; can be stopped
    OMP_NUM_THREADS=1 python -m recipes.studies.shrinkage --tasks 10 --seed 1 --output_dir runs/studies/shrinkage-1
    python -m recipes.studies.shrinkage --plot_only     # table and picture, from what is saved
    python -m recipes.studies.shrinkage --plot_only --group_sizes 4 --prompts_per_batch 4

The idea is that of https://arxiv.org/abs/2511.03710, there for the plain mean; here for weighted ones too. No knob and
no bias: what a completion is compared with depends on other completions alone. Tasks are those of horizon.py.
"""

import argparse
import math
import sys
from functools import partial
from pathlib import Path

import torch
from matplotlib.figure import Figure

from recipes.common.arguments import parse
from recipes.common.errors import InputError
from recipes.common.launching import say, tidy_output
from recipes.common.run_folder import configuration
from recipes.gradient_noise.__main__ import CONFIG, NoiseArguments, collect
from recipes.gradient_noise.across import moments_of_batches
from recipes.gradient_noise.measure import compare
from recipes.gradient_noise.pools import Estimator, WeightedScores, returns_of
from recipes.gradient_noise.storage import Storage, moments_of
from recipes.studies.horizon import PROMPTS, TASKS, flags_of, title_of
from recipes.studies.pages import Cell
from trl_otb.baselines import Groups, partial_pooling
from trl_otb.rollout import Rollout


MEASURED = ["sums", "calculator", "10", "30", "100", "lake_14", "lake_30"]
GROUPS = (2, 4, 8)
PER_TOKEN = ("otb", "otb_shrunk")
# Of the picture, by label: the estimator, its colour and line
SHOWN = {
    "none": ("none", "black", "--"),
    "rloo": ("mean, one left out", "C0", ":"),
    "rloo_pooled": ("mean, pooled", "C0", "-"),
    "ogb": ("ogb, one left out", "C1", ":"),
    "ogb_pooled": ("ogb, pooled", "C1", "-"),
    "otb": ("otb, one left out", "C2", ":"),
    "otb, pooled": ("otb, pooled", "C2", "-"),
}
SHARES = (0.25, 0.5, 1, 2, 4)  # of the group mean's noise, on its axis
DEALS = 20


def damped(energy: torch.Tensor, power: float) -> torch.Tensor:
    """(1 − ω)^power, ω a completion's share of its group's energy; `(P, N)` -> `(P, N)`."""
    return (1 - energy / energy.sum(1, keepdim=True).clamp(min=1e-20)).pow(power)


def inverse(energy: torch.Tensor, constant: float) -> torch.Tensor:
    """1 / (c + W / W̄), W̄ the batch's mean."""
    return 1 / (constant + energy / energy.mean().clamp(min=1e-20))


# Of pooled advantages, from energies, lengths and those advantages, each `(P, N)`; what depends on a completion itself
# biases the gradient
FACTORS = {
    "(1 − ω)^½": lambda w, t, a: damped(w, 0.5),
    "(1 − ω)": lambda w, t, a: damped(w, 1.0),
    "(1 − ω)²": lambda w, t, a: damped(w, 2.0),
    "1 / (4 + W / W̄)": lambda w, t, a: inverse(w, 4.0),
    "1 / (1 + W / W̄)": lambda w, t, a: inverse(w, 1.0),
    "1 / (¼ + W / W̄)": lambda w, t, a: inverse(w, 0.25),
    "min(1, median / (√W·abs(A)))": lambda w, t, a: _clipping(w.sqrt() * a.abs()),
    "T^½": lambda w, t, a: t.pow(0.5),
    "T^−½": lambda w, t, a: t.pow(-0.5),
    "T^−1": lambda w, t, a: t.pow(-1.0),
}


def _clipping(size: torch.Tensor) -> torch.Tensor:
    return (size.median() / size.clamp(min=1e-20)).clamp(max=1)


def left_one_out(returns: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """`(P, N)` twice -> `(P, N)`, the weighted mean of the others' returns."""
    ones = torch.ones(returns.numel(), 1)
    groups = Groups(returns.flatten(), ones, ones, returns.size(1), per_token=False)
    return groups.mean(weights.unsqueeze(2), leave_one_out=True).squeeze(2)


def pooling(baselines: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """λ and the target of [`~trl_otb.baselines.partial_pooling`], each `(P, 1)`, from `(P, N)`."""
    share, target = partial_pooling(baselines.unsqueeze(2), torch.ones_like(baselines).unsqueeze(2))
    return share.squeeze(2), target.squeeze(2)


def pool_of(rollout: Rollout, scores: WeightedScores, sizes: tuple[int, ...], seed: int) -> dict:
    """The gradient of every completion of a pool, with weight 1 and under baselines per token in one deal per size."""
    rng = torch.Generator().manual_seed(seed)
    order = torch.randperm(len(rollout), generator=rng)
    kinds = [(name, n) for n in sizes for name in PER_TOKEN]
    weights = torch.ones(len(rollout), 1 + len(kinds), rollout.mask.size(1))
    for i, (name, n) in enumerate(kinds, start=1):
        rows = order[: len(order) // n * n]
        weights[rows, i] = Estimator(name, name, leave_one_out=True).advantages(rollout, rows, n)
    found = torch.stack([scores(rollout, row, weights[row]) for row in range(len(rollout))], dim=1)
    return {
        "returns": returns_of(rollout),
        "energy": (rollout.energy * rollout.mask).sum(dim=1),
        "length": rollout.mask.sum(dim=1).clamp(min=1).float(),
        "order": order,
        "gradients": dict(zip(["own", *kinds], found[:, order], strict=True)),
    }


def moments(pools: list[dict], n: int, prompts_per_batch: int, seed: int = 0) -> list[dict]:
    """For every prompt, what [`moments_of`] reads. Groups of different prompts meet at random, as in a batch."""
    size = len(pools[0]["order"]) // 2 // n * n  # of a half
    starts = [0, len(pools[0]["order"]) // n // 2 * n]
    halves = [slice(start, start + size) for start in starts]
    returns, energy, length = (
        torch.stack([pool[key][pool["order"]] for pool in pools]) for key in ("returns", "energy", "length")
    )
    own = torch.stack([pool["gradients"]["own"] for pool in pools])
    rng = torch.Generator().manual_seed(seed)

    def dealt() -> torch.Tensor:
        """Groups stay as they were dealt for the baselines per token; which groups meet is drawn anew."""
        places = torch.stack([torch.arange(start, start + size).view(-1, n) for start in starts])
        return torch.stack(
            [torch.stack([half[torch.randperm(len(half), generator=rng)] for _ in pools]) for half in places]
        )

    def gradients(batch: torch.Tensor, rows: torch.Tensor) -> dict[str, torch.Tensor]:
        at = batch[:, None], rows
        return _gradients([pools[p] for p in batch], returns[at], energy[at], length[at], own[at], rows, n)

    found = moments_of_batches((dealt() for _ in range(DEALS)), gradients, prompts_per_batch, rng)
    return [
        {"truth": _truth(own[p], returns[p], energy[p], halves)}
        | {(name, n): values for name, values in of_prompt.items()}
        for p, of_prompt in enumerate(found)
    ]


def _gradients(pools, returns, energy, length, scores, places, n) -> dict[str, torch.Tensor]:
    """`(P, k)` by estimator, of one group of every prompt."""

    def with_advantages(advantages):
        return torch.einsum("pn,pnk->pk", advantages, scores) / n

    plain, by_energy = left_one_out(returns, torch.ones_like(energy)), left_one_out(returns, energy)
    found = {
        "none": with_advantages(returns),
        "group_mean": with_advantages(returns - returns.mean(1, keepdim=True)),
        "the other prompts' mean": with_advantages(returns - pooling(plain)[1]),
    }
    for name, baseline in {"mean": plain, "ogb": by_energy}.items():
        share, target = pooling(baseline)
        found[f"{name}, one left out"] = with_advantages(returns - baseline)
        pooled = returns - (1 - share) * baseline - share * target
        found[f"{name}, pooled"] = with_advantages(pooled)
        for factor, of in FACTORS.items():
            found[f"{name}, pooled × {factor}"] = with_advantages(of(energy, length, pooled) * pooled)
    found["none × (1 − ω)²"] = with_advantages(damped(energy, 2.0) * returns)
    # The share and the target of ogb
    for name in PER_TOKEN:
        gradients = torch.stack([pool["gradients"][name, n][at] for pool, at in zip(pools, places, strict=True)])
        of_tokens = gradients.mean(dim=1)
        found[f"{name}, one left out"] = of_tokens
        found[f"{name}, pooled"] = (1 - share) * of_tokens + share * with_advantages(returns - target)
    return found


def _truth(scores, returns, energy, halves) -> torch.Tensor:
    found = []
    for rows in halves:
        advantages = returns[rows] - left_one_out(returns[None, rows], energy[None, rows])[0]
        found.append((advantages[:, None] * scores[rows]).mean(dim=0))
    return torch.stack(found)


def scale_of(name: str, n: int) -> float | None:
    """c of Eĝ = c g; `None` where a factor biases ĝ."""
    return None if "×" in name else (n - 1) / n if name == "group_mean" else 1.0


def measure(task: str, folder: Path, seed: int, num_prompts: int | None) -> None:
    """Keep the pools of a task."""
    flags = [*flags_of(task, folder, seed, num_prompts), "--group_sizes", *map(str, GROUPS), "--projection", "4096"]
    settings, args, model_args = parse("gradient_noise", NoiseArguments, CONFIG, flags)
    storage = Storage(folder / task, {"configuration": configuration(settings, args, model_args)})
    collect(settings, args, model_args, storage, partial(pool_of, sizes=GROUPS, seed=seed))


def report(folder: Path, tasks: list[str], group_sizes: list[int], prompts_per_batch: int) -> None:
    """Noise to signal over the group mean's with intervals, of all tasks, and the efficiency of factors."""
    rows, titles = {}, []
    for task in tasks:
        pools = Storage(folder / task, {}, read_only=True).prompts()
        titles.append(f"{title_of(task)} (n = {len(pools)})")
        found = [
            {key: value for of_size in per_prompt for key, value in of_size.items()}
            for per_prompt in zip(*[moments(pools, n, prompts_per_batch) for n in group_sizes], strict=True)
        ]
        rows[task] = {(row.name, row.n): row for row in compare(moments_of(found, scale_of), batch=prompts_per_batch)}
    lines = []
    names = list(dict.fromkeys(name for name, _ in rows[tasks[0]]))
    header = ["| baseline | " + " | ".join(titles) + " |", "|---" * (len(tasks) + 1) + "|"]
    for n in group_sizes:
        lines += [f"\nN = {n}:\n", *header]
        for name in (name for name in names if "×" not in name):
            cells = " | ".join(rows[task][name, n].noise_over_group_mean.text() for task in tasks)
            lines.append(f"| `{name}` | {cells} |")
    for n in group_sizes:
        said = f"With a factor, N = {n}: efficiency over the group mean's; noise over its; cosine"
        lines += [f"\n{said}\n", *header]
        for name in (name for name in names if "×" in name or name in ("ogb, pooled", "mean, pooled")):
            lines.append(f"| `{name}` | {' | '.join(Cell.of(rows[task][name, n]).text() for task in tasks)} |")
    text = "\n".join(lines) + "\n"
    suffix = "" if prompts_per_batch == PROMPTS else f"-{prompts_per_batch}"
    (folder / f"tables{suffix}.md").write_text(text)
    picture(rows, group_sizes, folder / f"shrinkage{suffix}.png")
    say(text)
    say(f"{folder}: tables{suffix}.md, shrinkage{suffix}.png, and the data per task.")


def picture(rows: dict[str, dict], group_sizes: list[int], path: Path) -> None:
    """One panel per task, noise over the group mean's by the size of the groups."""
    columns = min(4, len(rows) + 1)
    lines = math.ceil((len(rows) + 1) / columns)  # one place is the legend's
    figure = Figure(figsize=(3.4 * columns + 0.6, 3.2 * lines), layout="constrained")
    axes = figure.subplots(lines, columns, sharey=True, squeeze=False).flatten()
    for axis, (task, of_task) in zip(axes, rows.items(), strict=False):
        for i, (label, (name, color, line)) in enumerate(SHOWN.items()):
            places = [n * 1.03 ** (i - len(SHOWN) / 2) for n in group_sizes]
            ratios = [of_task[name, n].noise_over_group_mean for n in group_sizes]
            values = [ratio.value for ratio in ratios]
            axis.plot(places, values, "o", markersize=4, label=label, color=color, linestyle=line)
            for at, ratio in zip(places, ratios, strict=True):
                axis.plot([at, at], [ratio.low, ratio.high], color=color, alpha=0.4)
        axis.axhline(1, color="0.4", linewidth=0.8)
        axis.set(xscale="log", yscale="log", xlabel="N", title=title_of(task))
        axis.set_xticks(group_sizes, map(str, group_sizes))
        axis.set_yticks(SHARES, map(str, SHARES))
        axis.minorticks_off()
        axis.grid(alpha=0.3)
    for axis in axes[::columns]:
        axis.set_ylabel("noise over the group mean's")
    for axis in axes[len(rows) :]:
        axis.set_axis_off()
    axes[len(rows)].legend(*axes[0].get_legend_handles_labels(), loc="center left")
    figure.suptitle("One left out (dotted), pooled (solid), nothing subtracted (dashed); no bias", fontsize=11)
    figure.savefig(path, dpi=110)


def main(argv: list[str]) -> None:
    parser = argparse.ArgumentParser(prog="shrinkage", description=__doc__.splitlines()[1])
    parser.add_argument("--tasks", nargs="+", choices=TASKS, default=MEASURED)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--num_prompts", type=int, help=f"per task, by default {PROMPTS}; more add to what is there")
    parser.add_argument("--group_sizes", nargs="+", type=int, choices=GROUPS, default=list(GROUPS))
    parser.add_argument("--prompts_per_batch", type=int, default=PROMPTS, help="of a step, which are pooled, about")
    parser.add_argument("--plot_only", action="store_true", help="table and picture, from what is saved")
    parser.add_argument("--output_dir", type=Path, default=Path("runs/studies/shrinkage"))
    args = parser.parse_args(argv)
    if args.prompts_per_batch < 3:
        parser.error(f"--prompts_per_batch is {args.prompts_per_batch}: give 3 or more")
    try:
        for task in args.tasks:
            if not args.plot_only:
                measure(task, args.output_dir, args.seed, args.num_prompts)
        tasks = [task for task in TASKS if task in args.tasks]
        report(args.output_dir, tasks, args.group_sizes, args.prompts_per_batch)
    except InputError as error:
        parser.error(str(error))


if __name__ == "__main__":
    tidy_output()
    main(sys.argv[1:])
