"""
The studies' results as data, results/*.json, and the pages' tables and pictures, which are rendered from them.

    python -m recipes.studies.render

Below a line such as `<!-- noise: same; otb; value | T = 30; sums -->` stands the noise of these baselines on these
tasks, on the same prompts; with `step` in the place of `same` that of a step whose prompts are drawn, with `both` the
two and how many more prompts the group mean needs, with `fit` how well V fits before the last token.
Below `<!-- runs: task; task -->` stand these tasks' runs, below `<!-- saved: task; task -->` how many tokens each arm
saves beside the group mean, below `<!-- helps: task; task -->` the README's table, below `<!-- rates: task; task -->`
the rewards that chose rates, below `<!-- signal: task; task -->` signal over noise in its runs, below
`<!-- bias: all -->`, `<!-- predicted: all -->` and `<!-- later_trl: all -->` the studies of these names. An interval is
`[value, low, high]`; `null` is lost in noise.
"""

import json
import math
import re
from collections import Counter
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any

import numpy
import pandas
from matplotlib.figure import Figure

from recipes import compare
from recipes.studies.runs import arms, points, tokens_saved


HERE = Path(__file__).parent
RUN = ("task", "n", "baseline", "learning_rate", "seed", "policy")  # what tells one run from another
PICTURED = ("blocks_counting", "whole_counting", "whole_columns")  # tasks
PAGES = ("../../README", "learning", "value", "progress", "later_trl")
# Of tasks, in pictures and tables
NAMES = {
    "blocks_columns": "blocks of SmolLM2, column sums",
    "blocks_columns_short": "blocks, 30 steps of 4 prompts",
    "blocks_counting": "blocks of SmolLM2, counting",
    "blocks_sorting": "blocks of SmolLM2, sorting digits",
    "blocks_sorting_16": "blocks of SmolLM2, sorting digits, 30 steps of 16 prompts",
    "calculator": "toy calculator",
    "calculator_async_4": "toy calculator, samples four steps late",
    "column_sums": "SmolLM2 (full vocabulary), sums by column",
    "lake_6": "game of 6 turns",
    "scratchpad_100": "scratchpad of 100 tokens",
    "sums_async_4": "toy sums, samples four steps late",
    "whole_columns": "30 blocks of SmolLM2, column sums",
    "whole_columns_8": "30 blocks of SmolLM2, column sums, 8 completions per step",
    "whole_counting": "30 blocks of SmolLM2, counting",
}
PROGRESS = "value_progress"  # the arm of `value` that reads the reward of the text so far
ARM_NAMES = {"dr_grpo": "Dr. GRPO", PROGRESS: "value, with progress", "value_learned": "value that has learned"}
# Of tasks with runs against the group mean: the title of their noise in noise.json, which may not be measured, and a
# run's prompts per step, and steps
PREDICTED = {
    "scratchpad_100": ("T = 100", 16, 100),
    "calculator": ("calculator", 16, 100),
    "blocks_columns": ("SmolLM2's blocks, column sums", 8, 60),
    "blocks_counting": ("SmolLM2's blocks, counting", 8, 60),
    "blocks_sorting": ("SmolLM2's blocks, sorting digits", 8, 60),
    "blocks_columns_short": ("SmolLM2's blocks, column sums", 4, 30),
    "whole_columns": ("SmolLM2's 30 blocks, column sums", 8, 30),
    "whole_columns_8": ("SmolLM2's 30 blocks, column sums", 2, 60),
    "whole_counting": ("SmolLM2's 30 blocks, counting", 8, 30),
    "lake_6": ("6 turns", 16, 50),
}
TOY = "84 thousand"
SIZES = {"SmolLM2": "135 million", "blocks": "14 million", "30 blocks": "106 million"}  # by how a title starts
Tables = dict[str, list[dict[str, Any]]]  # of cells, by task
KINDS = {"same": "noise", "step": "step", "fit": "r2_at_end"}  # of noise tables: what they show of cells


def load(name: str) -> dict[str, Any]:
    return json.loads((HERE / "results" / f"{name}.json").read_text())


def save(name: str, results: dict[str, Any]) -> None:
    """With five digits of every number."""
    results = json.loads(json.dumps(results), parse_float=lambda text: float(f"{float(text):.5g}"))
    (HERE / "results" / f"{name}.json").write_text(_lines(results) + "\n")


def _lines(value: Any, depth: int = 1) -> str:
    """JSON with one line per record, so that a change of one shows."""
    if isinstance(value, dict):
        (left, right), items = "{}", [f"{json.dumps(key)}: {_lines(of, depth + 1)}" for key, of in value.items()]
    elif isinstance(value, list):
        (left, right), items = "[]", [json.dumps(record, ensure_ascii=False) for record in value]
    else:
        return json.dumps(value, ensure_ascii=False)
    margin = "\n" + " " * depth
    return left + margin + f",{margin}".join(items) + "\n" + " " * (depth - 1) + right


def publish(name: str, tables: Tables) -> None:
    """
    Replace the published tables of these names, or add to them, and render all pages.

    Raises:
        ValueError: A published table has an estimator that was not measured.
    """
    results = load(name)
    published = results["tables"]
    for title, measured in tables.items():
        before, now = ({cell["estimator"] for cell in cells} for cells in (published.get(title, []), measured))
        if lost := ", ".join(sorted(before - now)):
            problem = f"results/{name}.json has {lost} for {title}, which was not measured now"
            raise ValueError(f"{problem}: measure it too.")
    save(name, results | {"tables": published | tables})
    render()


def runs_of(task: str) -> list[dict]:
    """The published runs of a task."""
    return [row for row in load("runs")["runs"] if row["task"] == task]


def publish_runs(rows: list[dict]) -> None:
    """Add these runs to the published ones, replacing the same ones, and render all pages."""
    of = {tuple(row[key] for key in RUN): row for row in [*load("runs")["runs"], *rows]}
    save("runs", load("runs") | {"runs": [of[key] for key in sorted(of)]})
    render()


def named(task: str) -> str:
    return NAMES.get(task, task)


def arm_named(baseline: str) -> str:
    return ARM_NAMES.get(baseline, baseline)


# Tables


def number(value: float | None, form: str) -> str:
    return "?" if value is None else format(value, form)


def interval(values: list[float | None], form: str = ".2f") -> str:
    value, low, high = (number(x, form) for x in values)
    return f"{value} ({low}–{high})"


def markdown(rows: list[list[str]]) -> str:
    """A Markdown table; the first row is the header."""
    head, *body = ("|" + "".join(f" {cell} |" if cell else " |" for cell in row) + "\n" for row in rows)
    return "".join([head, "|---" * len(rows[0]) + "|\n", *body])


def _markdown(table: pandas.DataFrame, missing: str) -> str:
    return markdown([[*table], *table.fillna(missing).values.tolist()])


def noise(tables: Tables, names: list[str], what: str = "noise") -> str:
    """
    A task per row, one of these estimators per column: noise to signal over the group mean's, on the same prompts; or,
    if `what` is "step", of a step whose prompts are drawn; or, if it is "r2_at_end", how well V fits.
    """
    rows = [["task (prompts)", *(f"`{name}`" for name in names)]]
    for task, cells in tables.items():
        shown = {cell["estimator"]: cell[what] for cell in cells if what in cell}
        of = {name: interval(x) if isinstance(x, list) else f"{x:.2f}" for name, x in shown.items()}
        rows.append([f"{task} ({cells[0]['prompts']})", *(of.get(name, "–") for name in names)])
    return markdown(rows)


def both_units(tables: Tables, names: Collection[str] = ()) -> str:
    """A task and estimator (of these, if named) per row: noise and variance, and what the latter is worth."""
    rows = [["task (prompts)", "baseline", "noise, same prompts", "variance, prompts drawn", "more prompts (%)"]]
    for task, cells in tables.items():
        for cell in cells:
            if "noise" in cell and (not names or cell["estimator"] in names):
                value, low, high = step = cell["step"]
                more = [None if x is None else 100 / x - 100 for x in (value, high, low)]
                texts = [interval(cell["noise"]), interval(step), interval(more, ".0f")]
                rows.append([f"{task} ({cell['prompts']})", f"`{cell['estimator']}`", *texts])
    return markdown(rows)


ARM = {
    "n": ("N", str),
    "baseline": ("baseline", arm_named),
    "learning_rate": ("learning rate", "{:g}".format),
    "seeds": ("seeds", str),
    "over_the_run": ("over the run", lambda x: interval(x, ".3f")),
    "minus_group_mean": ("minus the group mean's", lambda x: interval(x, ".3f")),
    "held_out": ("held-out (%)", lambda x: interval(x, ".3g")),
    "collapsed": ("collapsed", str),
    "won": ("pairs of seeds won", str),
}


def _tuned(at: dict) -> str:
    return f"{at['score']:.3f} ({at['seeds']})" + (f", {at['collapsed']} collapsed" if at["collapsed"] else "")


def of_runs(rows: list[dict], tuning: bool = False) -> str:
    """A task's arm per row; the group mean's difference is from itself, of seeds in pairs."""
    table = [
        {"task": named(task)}
        | {title: "" if arm[key] is None else text(arm[key]) for key, (title, text) in ARM.items()}
        | ({rate: _tuned(at) for rate, at in arm["rates"].items()} if tuning else {})
        for task in dict.fromkeys(row["task"] for row in rows)
        for arm in arms([row for row in rows if row["task"] == task])
    ]
    return _markdown(pandas.DataFrame(table), "")


def of_rates(key: str) -> str:
    """
    A task's arm per row: the mean reward over the run at each learning rate, with the seeds that chose the arm's own.
    """
    found = [(named(task), arm) for task in key.split("; ") for arm in arms(runs_of(task)) if arm["rates"]]
    rates = sorted({rate for _, arm in found for rate in arm["rates"]}, key=float)
    rows = [["task", "baseline", "N", *rates]]
    for task, arm in found:
        scores = [f"{arm['rates'][rate]['score']:.3f}" if rate in arm["rates"] else "–" for rate in rates]
        rows.append([task, arm_named(arm["baseline"]), str(arm["n"]), *scores])
    return markdown(rows)


def row_of_value(task: str) -> dict[str, Any] | None:
    """The row of `value` at N = 4, of that with progress where there is no other."""
    rows = {row["baseline"]: row for row in tokens_saved(runs_of(task)) if row["n"] == 4}
    return rows.get("value") or rows.get(PROGRESS)


def noise_of(task: str, baseline: str) -> dict[str, Any] | None:
    """The cell of a baseline's noise, if it was measured."""
    cells = load("noise")["tables"].get(PREDICTED[task][0], []) if task in PREDICTED else []
    return next((cell for cell in cells if cell["estimator"] == baseline), None)


def of_saved(key: str) -> str:
    """A task and an arm per row: its tokens to the group mean's reward after 50, 75 and 95 % of that one's gain."""
    rows = [["task", "arm", "GRPO's reward", "50 %", "75 %", "95 %", "pairs sooner, by level"]]
    for task in key.split("; "):
        for row in tokens_saved(runs_of(task)):
            first, most = row["gain"]
            arm = arm_named(row["baseline"]) + (f", N = {row['n']}" if row["n"] != 4 else "")
            sooner = f"{', '.join(map(str, row['sooner']))} of {row['pairs']}"
            texts = map(compare.per_cent, row["changes"])
            rows.append([named(task), arm, f"{first:.2f} → {most:.2f}", *texts, sooner])
    return markdown(rows)


def of_helps(key: str) -> str:
    """A task per row: the variance of a step of `value`, and the tokens that it saves."""
    first = ["policy and task", "variance of a step"]
    rows = [[*first, "tokens to 75 % of GRPO's gain", "to 95 %", "pairs of runs sooner"]]
    for task in key.split("; "):
        row = row_of_value(task)
        cell = noise_of(task, row["baseline"])
        arm = ", with progress" if row["baseline"] == PROGRESS else ""
        variance = f"{cell['step'][0]:.2f} ×" if cell else "not measured"
        saved = [compare.per_cent(change) for change in row["changes"][1:]]
        rows.append([f"{named(task)}{arm}", variance, *saved, f"{row['sooner'][1]} of {row['pairs']}"])
    return markdown(rows)


def predictions() -> list[dict[str, Any]]:
    """
    By task: what noise on the same prompts lets one expect of `value`, beside what it saved. From the efficiency E and
    noise r over the group mean's follows s, the signal ‖g‖² over the noise of a step of the group mean, by
    E = (s + 1)/(s + r). At the best rate of each, plain SGD needs (s + r)/(s + 1) as many steps; Adam, whose step is
    divided by the root of signal and noise, at the same small rate the root of it.
    """
    found = []
    for task, (_, prompts, steps) in PREDICTED.items():
        if (cell := noise_of(task, "value")) and (row := row_of_value(task)):
            efficiency, noise = (cell[key][0] for key in ("efficiency", "noise"))
            signal = max((1 - efficiency * noise) / (efficiency - 1), 0) * prompts / 16
            needs = (signal + noise) / (signal + 1)
            expected = {"signal": signal, "noise": noise, "needs": needs, "root": needs**0.5}
            found.append({"task": task, "prompts": prompts * steps, **expected, **row})
    return found


def of_predicted(key: str) -> str:
    rows = [["task", "prompts", "signal", "noise", "SGD, %", "Adam, %", "50 %", "75 %", "95 %"]]
    for row in predictions():
        figures = [f"{row['signal'] / (1 + row['signal']):.0%}", f"{row['noise']:.2f}"]
        expected = [compare.per_cent([row[key] - 1]) for key in ("needs", "root")]
        rows.append(
            [named(row["task"]), str(row["prompts"]), *figures, *expected, *map(compare.per_cent, row["changes"])]
        )
    return markdown(rows)


def of_signal(key: str) -> str:
    """
    A task's arm with N = 4 per row: the signal over the noise of a step as its runs logged it, medians over thirds; 0
    where the signal is lost in noise.
    """
    rows = [["task", "baseline", "first third", "second", "last"]]
    found = [(task, arm) for task in key.split("; ") for arm in arms(runs_of(task)) if arm["n"] == 4 and arm["runs"]]
    for task, arm in found:
        scales = numpy.array([row["steps"]["noise_scale"] for row in arm["runs"]], dtype=float)
        thirds = numpy.array_split(PREDICTED[task][1] / numpy.nan_to_num(scales, nan=numpy.inf), 3, axis=1)
        medians = [f"{numpy.median(of):.2f}" for of in thirds]
        rows.append([named(task), arm_named(arm["baseline"]), *medians])
    return markdown(rows)


OF_RUNS: dict[str, Callable[[str], str]] = {
    "predicted": of_predicted,
    "rates": of_rates,
    "signal": of_signal,
    "runs": lambda key: of_runs([row for task in key.split("; ") for row in runs_of(task)]),
    "saved": of_saved,
    "helps": of_helps,
}


def of_bias(policies: list[dict]) -> str:
    """Of small policies: by the loss, least and most of what each part of a baseline adds to the mean gradient."""
    losses, parts = [[*policies[0]][1:], [*next(iter([*policies[0].values()][1:]))]]
    rows = [["loss", *parts]]
    for loss in losses:
        of = [[policy[loss][part] for policy in policies] for part in parts]
        rows.append([f"`{loss}`", *("0" if max(x) < 5e-4 else f"{min(x):.3f}–{max(x):.3f}" for x in of)])
    return markdown(rows)


def of_later_trl(results: dict) -> str:
    """What comes of edits of TRL, and in how many runs."""
    found = Counter(row["verdict"] for row in results["edits"])
    return markdown([["what comes of it", "runs"], *([verdict, str(runs)] for verdict, runs in found.items())])


def rendered(page: str) -> str:
    """The page's text with its tables as the results have them."""

    def table(found: re.Match) -> str:
        line, name, key = found.groups()
        if name == "bias":
            text = of_bias(load("bias")["policies"])
        elif name == "later_trl":
            text = of_later_trl(load(name))
        elif name in OF_RUNS:
            text = OF_RUNS[name](key)
        else:
            (unit, *names), tasks = (part.split("; ") for part in key.split(" | "))
            shown = {task: load(name)["tables"][task] for task in tasks}
            text = both_units(shown, names) if unit == "both" else noise(shown, names, KINDS[unit])
        return f"{line}\n\n{text}\n"

    pattern = r"^(<!-- (\w+): (.+) -->)\n\n(?:(?:\|.*\n)+\n)?"
    return re.sub(pattern, table, page, flags=re.MULTILINE)


# Pictures


COLORS = {
    "group_mean": "0.4",
    "otb": "tab:red",
    "ogb_pooled": "tab:blue",
    "value": "tab:green",
    PROGRESS: "tab:cyan",
    "dr_grpo": "tab:blue",
    "rloo": "tab:purple",
    "none": "tab:brown",
}


def axes_of(titles: list[str]) -> tuple[Figure, Any]:
    figure = Figure(figsize=(4.6 * max(len(titles), 1), 3.6), layout="constrained")
    axes = figure.subplots(1, len(titles), sharey=True, squeeze=False)[0]
    for axis, title in zip(axes, titles, strict=True):
        axis.set_title(title, fontsize=10)
        axis.grid(alpha=0.3)
    return figure, axes


def titled(task: str) -> str:
    """Above a task's curves: its name, how large the policy is, and for how many prompts it was trained, if known."""
    title = named(task)
    size = next((size for start, size in SIZES.items() if title.startswith(start)), TOY)
    prompts = f", {math.prod(PREDICTED[task][1:]):,} prompts" if task in PREDICTED else ""
    return f"{title}\n{size} parameters{prompts}"


def learning(
    tasks: dict[str, list[dict]], path: Path, names: Collection[str] = (), arm_names: Mapping[str, str] = ARM_NAMES
) -> None:
    """
    The reward over tokens under each baseline (or these), if possible at N = 4: mean and range over seeds; and the
    rewards that the group mean has after 50, 75 and 95 % of its gain, with what `value` saves until the second.
    """
    sizes = [4 if any(row["n"] == 4 for row in rows) else rows[0]["n"] for rows in tasks.values()]
    figure, axes = axes_of([f"{titled(task)}, N = {n}" for task, n in zip(tasks, sizes, strict=True)])
    for axis, rows, n in zip(axes, tasks.values(), sizes, strict=True):
        runs = {arm["baseline"]: arm["runs"] for arm in arms(rows) if arm["n"] == n}
        means = {}
        for name in names or COLORS:
            if of := runs.get(name):
                curves = compare.stacked([points(row) for row in of])
                curves[:, 0] /= 1000
                means[name] = thousands, mean = curves.mean(axis=0)
                axis.plot(thousands, mean, color=COLORS[name], label=f"{arm_names.get(name, name)}, {len(of)} seeds")
                band = curves[:, 1].min(0), curves[:, 1].max(0)
                axis.fill_between(thousands, *band, color=COLORS[name], alpha=0.1, linewidth=0)
        if "group_mean" in means:
            saved = [row for row in tokens_saved(rows) if (row["baseline"], row["n"]) == ("value", n)]
            draw_levels(axis, means, saved[0]["changes"][1] if saved else [])
        axis.set(xlabel="generated tokens (thousands)")
        axis.legend(fontsize=8, loc="lower right")
    axes[0].set_ylabel("mean reward (bands: range)")
    figure.savefig(path, dpi=120)


def draw_levels(axis: Any, means: dict[str, numpy.ndarray], change: list[float]) -> None:
    """
    The levels of the group mean's curve, and what `value` saves until the second of them: by an arrow, if that is sure,
    else by its interval.
    """
    levels = compare.levels_of(means["group_mean"])
    for i, level in enumerate(levels):
        label = "shares of GRPO's gain" if i == 0 else None
        axis.axhline(level, color="0.4", linewidth=0.7, linestyle=":", label=label)
    shares = [f"{share:.0%}" for share in compare.LEVELS]
    axis.secondary_yaxis("right").set_yticks(levels, shares, fontsize=7, color="0.4")
    if len(change) == 3 and change[2] < 0:
        at, end = levels[1], compare.tokens_until(means["group_mean"], levels)[1]
        axis.annotate("", (end * (1 + change[0]), at), (end, at), arrowprops={"arrowstyle": "->", "color": "black"})
        saved = f"{compare.per_cent(change[:1])} %"
        axis.annotate(saved, (end, at), (6, -4), textcoords="offset points", va="top", fontsize=8)
    elif change:
        saved = f"tokens to {shares[1]}: {compare.per_cent(change)} %"
        axis.annotate(saved, (0.98, 0.27), xycoords="axes fraction", ha="right", fontsize=8)


def render() -> None:
    """All pages and pictures."""
    for name in PAGES:
        page = HERE / f"{name}.md"
        page.write_text(rendered(page.read_text()))
    rows_of = {task: rows for task in PICTURED if (rows := runs_of(task))}
    names = ARM_NAMES | {"group_mean": "GRPO (TRL's default)"}
    learning(rows_of, HERE / "default.png", ("group_mean", "value"), names)


if __name__ == "__main__":
    render()
