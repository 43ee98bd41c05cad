"""The picture of a comparison."""

import math
from typing import Any

from ..optional import require


WIDEST = 3.0  # the share of more prompts at which intervals are cut off


def draw(report: Any) -> Any:
    """One panel per group size, sorted by the run's own; blue: significantly better, red: significantly worse."""
    require("matplotlib.figure", "A picture")
    from ..shown_figure import ShownFigure  # which imports it

    sizes, order = report.group_sizes, [row.name for row in reversed(report.at())]
    figure = ShownFigure(figsize=(4.2 * len(sizes) + 1.5, 0.36 * len(order) + 1.6), layout="constrained")
    axes = figure.subplots(1, len(sizes), squeeze=False, sharey=True)[0]
    for axis, n in zip(axes, sizes, strict=True):
        rows = {row.name: row for row in report.at(n)}
        for place, name in enumerate(order):
            gain = rows[name].more_prompts
            if name == "group_mean":
                axis.plot(0, place, "o", color="0.4")
                continue
            if gain.lost:
                axis.text(0.02, place, "lost in noise", color="0.5", fontsize=8, va="center")
                continue
            color = "tab:blue" if gain.low > 0 else "tab:red" if gain.high < 0 else "0.6"
            ends = [100 * max(gain.low, -1), 100 * min(gain.high, WIDEST)]
            known = math.isfinite(gain.low) and math.isfinite(gain.high)
            axis.plot(ends, [place, place], color=color, linewidth=2, alpha=0.5, linestyle="-" if known else ":")
            axis.plot(100 * min(gain.value, WIDEST), place, "o", color=color)
            text = f"{100 * gain.value:+.0f}"
            at = (100 * min(gain.value, WIDEST), place)
            axis.annotate(text, at, xytext=(0, 6), textcoords="offset points", ha="center", fontsize=8)
        axis.axvline(0, color="0.4", linewidth=0.8, linestyle=":")
        axis.set_yticks(range(len(order)), order)
        axis.set_ylim(-0.6, len(order) - 0.2)
        axis.set(xlabel="more prompts that the group mean needs, %", title=f"N = {n}")
        axis.grid(axis="x", alpha=0.3)
    figure.suptitle(
        f"{report.subject}\nblue: significantly better than the group mean, red: worse, grey: neither\n"
        f"lines: 95 % intervals, {report.num_prompts} prompts",
        fontsize=10,
    )
    return figure
