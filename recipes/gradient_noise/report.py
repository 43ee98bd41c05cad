"""Table, picture and verdict."""

from functools import partial
from pathlib import Path

from matplotlib.figure import Figure

from recipes.common.errors import InputError
from recipes.common.launching import say

from .across import batches_of, with_pooled
from .measure import Comparison, compare, verdict
from .pools import scale_of
from .storage import Storage, moments_of


def report(storage: Storage, prompts_per_batch: int) -> None:
    """Print and save `table.md`, `noise.png` and the verdicts, for steps of so many prompts."""
    group_sizes, options = sorted(storage.settings["group_sizes"]), storage.settings["options"]
    prompts = storage.prompts()
    name = f"{storage.settings['model']} on {storage.settings['dataset_name']}"
    varying = sum(prompt["varies"] for prompt in prompts)
    if varying == 0:
        raise InputError(
            f"no prompt's reward varied: it is {prompts[0]['reward']:.2f} for every completion of the first prompt. "
            "Look at the reward, --instruction and the model; no baseline has anything to work with."
        )
    met = ""
    if across := storage.settings.get("across_prompts"):
        prompts = with_pooled(prompts, across, group_sizes, prompts_per_batch)
        together = len(prompts) / batches_of(len(prompts), prompts_per_batch)
        met = f" Baselines that pool prompts saw {together:.0f} of them together."
    scales = partial(scale_of, zero_tail=storage.settings["zero_tail"])
    moments = moments_of(prompts, scales if storage.settings.get("scores_have_mean_zero", True) else None)
    rows = compare(moments, options, batch=prompts_per_batch)
    rows = [row for row in rows if row.n in group_sizes or row.name == "group_mean"]
    reward = sum(prompt["reward"] for prompt in prompts) / len(prompts)
    length = sum(prompt["length"] for prompt in prompts) / len(prompts)
    verdicts = [verdict(rows, n, len(prompts), batch=prompts_per_batch) for n in group_sizes]
    lines = [
        f"# {name}",
        "",
        f"{len(prompts)} prompts, {storage.settings['completions_per_prompt']} completions each, {length:.0f} tokens "
        f"on average; mean reward {reward:.2f}; rewards vary on {varying} of the prompts. In brackets: 95 % intervals "
        f"by bootstrap over prompts (n = {len(prompts)}; with few prompts they are too narrow).{met}",
        "",
        f"Efficiency is the share of a step on {prompts_per_batch} such prompts that points along the true gradient: "
        "1 without noise and bias (above 1, like a cosine above 1, is noise), ? where the signal is lost in noise. "
        "The last column is the N at which the group mean is as good, by the law of its noise, (a + b / (N − 1)) / N, "
        "fitted to its rows.",
        "",
        "| N | baseline | efficiency | over group_mean's | noise to signal over its | cosine | worth group_mean at N "
        "= |",
        "|---|---|---|---|---|---|---|",
    ]
    for row in sorted(rows, key=lambda row: row.n):
        cells = [row.efficiency.text(3), row.over_group_mean.text(), row.noise_over_group_mean.text()]
        cells += [row.cosine.text(3), row.worth.text(1)]
        lines.append(f"| {row.n} | `{row.name}` | " + " | ".join(cells) + " |")
    lines += ["", *verdicts, ""]
    text = "\n".join(lines)
    (storage.folder / "table.md").write_text(text)
    say(text)
    plot(rows, group_sizes, name, len(prompts), storage.folder / "noise.png")
    say(f"{storage.folder}: table.md, noise.png and one file per prompt.")


def plot(rows: list[Comparison], group_sizes: list[int], name: str, prompts: int, path: Path) -> None:
    """Efficiency over the group mean's, one panel per group size; the best of the first above."""
    figure = Figure(
        figsize=(5.2 * len(group_sizes) + 1, 0.42 * len({row.name for row in rows}) + 1.8), layout="constrained"
    )
    axes = figure.subplots(1, len(group_sizes), squeeze=False)[0]
    first = [row for row in rows if row.n == group_sizes[0]]
    first.sort(key=lambda row: (not row.over_group_mean.lost, row.over_group_mean.value))
    order = [row.name for row in first]  # in every panel
    for axis, n in zip(axes, group_sizes, strict=True):
        here = sorted((row for row in rows if row.n == n), key=lambda row: order.index(row.name))
        for place, row in enumerate(here):
            ratio = row.over_group_mean
            if ratio.lost:
                axis.text(0.02, place, "lost in noise", color="0.5", fontsize=8, va="center")
                continue
            color = (
                "0.4"
                if row.name == "group_mean"
                else "tab:blue"
                if ratio.low > 1
                else "tab:red"
                if ratio.high < 1
                else "0.6"
            )
            known = -float("inf") < ratio.low and ratio.high < float("inf")
            low, high = max(ratio.low, 0.0), min(ratio.high, 4 * max(ratio.value, 1.0))
            axis.plot(
                [low, high], [place, place], color=color, linewidth=2, alpha=0.5, linestyle="-" if known else ":"
            )
            axis.plot(ratio.value, place, "o", color=color)
            axis.annotate(
                f"{ratio.value:.2f}",
                (ratio.value, place),
                xytext=(0, 6),
                textcoords="offset points",
                ha="center",
                fontsize=8,
            )
        axis.axvline(1, color="0.4", linewidth=0.8, linestyle=":")
        axis.set_yticks(range(len(here)), [row.name for row in here])
        axis.set_ylim(-0.6, len(here) - 0.2)
        axis.set(xlabel="efficiency over the group mean's", title=f"N = {n}", xlim=(0, None))
        axis.grid(axis="x", alpha=0.3)
    figure.suptitle(
        f"{name}\nblue: more efficient than the group mean, red: less, grey: not told apart\n"
        f"lines: 95 %, dotted: unknown; {prompts} prompts",
        fontsize=10,
    )
    figure.savefig(path, dpi=120)
