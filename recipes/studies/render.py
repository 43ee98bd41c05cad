"""
The studies' results as data, results/*.json, and the pages' tables and pictures, which are rendered from them.

    python -m recipes.studies.render

Below a line such as `<!-- value.json: 4; otb; value | T = 10; sums -->` stands the noise at N = 4 of these baselines on
these tasks (on all, if none is named), on the same prompts; with `step 4` in the place of N that of a step whose
prompts are drawn, with `both 4` the two and what they are worth in prompts, with `equal` at 64 completions per step.
Below `<!-- runs: task -->` stand that task's runs, below `<!-- tokens: task -->` their tokens to a threshold, below
`<!-- bias: all -->`, `<!-- few_prompts: all -->` and `<!-- later_trl: all -->` the studies of these names. An interval
is `[value, low, high]`; `null` is lost in noise.
"""

import json
import re
from collections.abc import Callable
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy
import pandas
from matplotlib.figure import Figure

from recipes.studies.runs import arms, estimate, tokens_until


HERE = Path(__file__).parent
RUN = ("task", "n", "baseline", "learning_rate", "seed", "policy")  # what tells one run from another
LEARNING = {  # by picture, its tasks
    "default": ("calculator_scaled, policy 681f", "chain_sum"),
    "learning": ("scratchpad_100, policy 71ea", "calculator_decay, policy b3cf", "scratchpad_mixed, policy e90f"),
    "language": ("copy", "gemma_copy", "word_sequence_reversal", "word_sorting"),
}
PAGES = ("value", "language", "progress", "asynchronous", "relatives", "later_trl")
NAMES = {"calculator_scaled": "toy calculator", "chain_sum": "SmolLM2, sums of two digits"}  # of tasks, in pictures
THRESHOLDS = {"calculator": 0.85, "scratchpad_100": 0.8}  # of the mean reward
Tables = dict[str, list[dict[str, Any]]]  # of cells, by task


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
        both = published.get(title, []), measured
        before, now = ({(cell["estimator"], cell["n"]) for cell in cells} for cells in both)
        if lost := ", ".join(sorted({estimator for estimator, _ in before - now})):
            problem = f"results/{name}.json has {lost} for {title}, which was not measured now"
            raise ValueError(f"{problem}: measure it too.")
    save(name, results | {"tables": published | tables})
    render()


def runs_of(task: str) -> list[dict]:
    """The published runs of a task, or of `"task, policy hash"`."""
    name, _, policy = task.partition(", policy ")
    return [row for row in load("runs")["runs"] if row["task"] == name and row["policy"].startswith(policy)]


def publish_runs(rows: list[dict]) -> None:
    """Add these runs to the published ones, replacing the same ones, and render all pages."""
    of = {tuple(row[key] for key in RUN): row for row in [*load("runs")["runs"], *rows]}
    save("runs", load("runs") | {"runs": [of[key] for key in sorted(of)]})
    render()


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


def _frame(tables: Tables, n: int, text: Callable[[dict], str]) -> pandas.DataFrame:
    """An estimator per row, a task per column: `text` of each cell at group size `n`."""
    columns = {
        task: {f"`{cell['estimator']}`": text(cell) for cell in cells if cell["n"] == n}
        for task, cells in tables.items()
    }
    return pandas.DataFrame({task: column for task, column in columns.items() if column})


def _markdown(table: pandas.DataFrame, missing: str) -> str:
    return markdown([[*table], *table.fillna(missing).values.tolist()])


def by_task(tables: Tables, n: int) -> str:
    """An estimator per row, a task per column, at group size `n`."""

    def text(cell: dict) -> str:
        return f"{interval(cell['efficiency'])}; {interval(cell['noise'])}; {number(cell['cosine'], '.3f')}"

    found = _frame(tables, n, text).rename(columns=lambda task: f"{task} (n = {tables[task][0]['prompts']})")
    return _markdown(found.rename_axis("estimator").reset_index(), "–")


def of_step(cell: dict) -> list[float | None]:
    """
    The variance of a step whose prompts are drawn; in older results, all of N = 4, that at as many completions, which
    was measured on the same prompts alone, if the baseline was not certain to be unbiased.
    """
    if "step" in cell:
        return cell["step"]
    unknown = cell["equal_completions"] == cell["noise"] and cell["noise"][0] != 1
    return [None, None, None] if unknown else cell["equal_completions"]


def noise(tables: Tables, n: int, names: list[str], of_steps: bool = False) -> str:
    """
    A task per row, one of these estimators per column: noise to signal over the group mean's, on the same prompts or of
    a step whose prompts are drawn. `explained` is what `value` explained of the batches that it learned from, `removed`
    the share of `rloo_pooled`'s noise that it removes.
    """
    read = of_step if of_steps else lambda cell: cell["noise"]
    found = _frame(tables, n, lambda cell: interval(read(cell))).reindex([f"`{name}`" for name in names])
    for task, cells in tables.items():
        of = {cell["estimator"]: cell for cell in cells if cell["n"] == n}
        if "explained" in names and {"value", "rloo_pooled"} <= {*of}:
            found.loc["`explained`", task] = number(of["value"].get("explained"), ".2f")
            left = read(of["value"])[0] / read(of["rloo_pooled"])[0]
            found.loc["`removed`", task] = number(1 - left, ".2f")
    found = found.dropna(axis="columns", how="all").T
    found = found.rename(index=lambda task: f"{task} ({tables[task][0]['prompts']})")
    return _markdown(found.rename_axis("task (prompts)").reset_index(), "–")


def both_units(tables: Tables, n: int, names: list[str]) -> str:
    """A task and estimator per row: noise and variance over the group mean's, and what they are worth in prompts."""
    titles = "noise, same prompts", "variance, prompts drawn", "worth, same (%)", "worth, drawn (%)"
    rows = [["task (prompts)", "baseline", *titles]]
    for task, cells in tables.items():
        of = {cell["estimator"]: cell for cell in cells if cell["n"] == n}
        for name in names:
            if name in of:
                units = of[name]["noise"], of_step(of[name])
                worth = [[None if x is None else 100 / x - 100 for x in (a, c, b)] for a, b, c in units]
                texts = [*map(interval, units), *(interval(x, ".0f") for x in worth)]
                rows.append([f"{task} ({of[name]['prompts']})", f"`{name}`", *texts])
    return markdown(rows)


def at_equal_completions(tables: Tables, names: list[str]) -> str:
    """A task and N per row, an estimator per column: noise at as many completions per step."""
    rows = [["task", "N", *(f"`{name}`" for name in names)]]
    for task, cells in tables.items():
        of = {(cell["estimator"], cell["n"]): cell.get("equal_completions") for cell in cells}
        for n in sorted({cell["n"] for cell in cells}):
            found = [of.get((name, n)) for name in names]
            texts = ["–" if x is None else number(x[0], ".2f") if x[1] is None else interval(x) for x in found]
            rows.append([task, str(n), *texts])
    return markdown(rows)


ARM = {
    "n": ("N", str),
    "baseline": ("baseline", str),
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
    """Of a task's runs, an arm per row; the group mean's difference is from itself, of seeds in pairs."""
    table = [
        {title: "" if arm[key] is None else text(arm[key]) for key, (title, text) in ARM.items()}
        | ({rate: _tuned(at) for rate, at in arm["rates"].items()} if tuning else {})
        for arm in arms(rows)
    ]
    return _markdown(pandas.DataFrame(table), "")


def of_tokens(key: str) -> str:
    """
    Of a task's runs (or `"task, policy hash"`) at 64 completions per step, an arm per row: tokens until the mean reward
    is at the task's threshold, and how many fewer that are than with N = 32. N = 4 is the task without `_64`, from the
    same policy.
    """
    task, _, policy = key.partition(", policy ")
    wide = runs_of(f"{task}_64, policy {policy}")
    policies = {row["policy"] for row in wide}
    narrow = [row for row in runs_of(task) if row["n"] == 4 and row["policy"] in policies]
    compared = {row["baseline"] for row in wide}
    found = [arm for arm in arms([*narrow, *wide]) if arm["runs"] and arm["baseline"] in compared]
    found.sort(key=lambda arm: (arm["baseline"], arm["n"]))
    tokens = {
        (arm["baseline"], arm["n"]): [tokens_until(run, THRESHOLDS[task]) for run in arm["runs"]] for arm in found
    }
    rows = [["baseline", "N", "learning rate", "seeds", "thousands of tokens", "than with N = 32", "over the run"]]
    for arm in found:
        own, most = (tokens.get((arm["baseline"], n), [None]) for n in (arm["n"], 32))
        arrived = [x / 1000 for x in own if x is not None]
        text = interval(estimate(arrived), ".0f") if arrived else "never"
        text += f", {len(arrived)} of {len(own)} runs" if 0 < len(arrived) < len(own) else ""
        known = None not in [*own, *most] and arm["n"] != 32
        fewer = f"{fmean(own) / fmean(most) - 1:+.0%}" if known else ""
        arm_of = [arm["baseline"], str(arm["n"]), f"{arm['learning_rate']:g}", str(arm["seeds"])]
        rows.append([*arm_of, text, fewer, interval(arm["over_the_run"], ".3f")])
    return markdown(rows)


def of_bias(policies: list[dict]) -> str:
    """Of small policies: by the loss, least and most of what each part of a baseline adds to the mean gradient."""
    losses, parts = [[*policies[0]][1:], [*next(iter([*policies[0].values()][1:]))]]
    rows = [["loss", *parts]]
    for loss in losses:
        of = [[policy[loss][part] for policy in policies] for part in parts]
        rows.append([f"`{loss}`", *("0" if max(x) < 5e-4 else f"{min(x):.3f}–{max(x):.3f}" for x in of)])
    return markdown(rows)


def of_few_prompts(results: dict) -> str:
    """A baseline per row: what all prompts say, and of few, in per cent, how often the interval holds it, its width."""
    few = sorted({cell["drawn"] for cell in results["cells"]})
    of = {(cell["estimator"], cell["drawn"]): cell for cell in results["cells"]}
    titles = [f"{n} prompts: held, too high, width" for n in few]
    rows = [["baseline", f"more prompts, by all {results['prompts']} (%)", *titles]]
    for name in dict.fromkeys(cell["estimator"] for cell in results["cells"]):
        texts = []
        for cell in (of[name, n] for n in few):
            width = None if cell["width"] is None else 100 * cell["width"]
            texts.append(f"{100 * cell['held']:.0f} %, {100 * cell['too_high']:.0f} %, {number(width, '.0f')}")
        rows.append([f"`{name}`", interval([100 * x for x in of[name, few[0]]["truth"]], ".0f"), *texts])
    return markdown(rows)


def of_later_trl(results: dict) -> str:
    """An edit of TRL per row: the runs under which what came of it is the same, before and now, and what is said."""
    before = {(row["edit"], row["run"]): row["verdict"] for row in results["edits of 0.12.1"]}
    found: dict[tuple[str, ...], list[str]] = {}
    for row in results["edits"]:
        of = row["edit"], before[row["edit"], row["run"]], row["verdict"], row["error"].replace("|", "\\|")
        found.setdefault(of, []).append(f"`{row['run']}`")
    rows = [["what TRL has otherwise", "run", "0.12.1", "now", "error"]]
    for (edit, *verdicts, error), runs in found.items():
        rows.append([edit, ", ".join(runs), *(f"**{of}**" if of == "wrong" else of for of in verdicts), error])
    return markdown(rows)


def rendered(page: str) -> str:
    """The page's text with its tables as the results have them."""

    def table(found: re.Match) -> str:
        line, name, key = found.groups()
        if name == "bias":
            text = of_bias(load("bias")["policies"])
        elif name == "few_prompts":
            text = of_few_prompts(load("few_prompts"))
        elif name == "later_trl":
            text = of_later_trl(load(name))
        elif name in ("runs", "tokens"):
            text = of_runs(runs_of(key)) if name == "runs" else of_tokens(key)
        else:
            (n, *names), tables, tasks = key.split(" | ")[0].split("; "), load(name)["tables"], key.partition(" | ")[2]
            tables = {task: tables[task] for task in tasks.split("; ")} if tasks else tables
            unit, size = n.split() if " " in n else ("", n)
            if n == "equal":
                text = at_equal_completions(tables, names)
            elif unit == "both":
                text = both_units(tables, int(size), names)
            else:
                text = noise(tables, int(size), names, of_steps=unit == "step")
        return f"{line}\n\n{text}\n"

    pattern = r"^(<!-- (\w+)(?:\.json)?: (.+) -->)\n\n(?:(?:\|.*\n)+\n)?"
    return re.sub(pattern, table, page, flags=re.MULTILINE)


# Pictures


COLORS = {
    "group_mean": "0.4",
    "otb": "tab:red",
    "otb, one left out": "tab:orange",
    "ogb_pooled": "tab:blue",
    "value": "tab:green",
    "value_progress": "tab:cyan",
    "value_weights_one": "tab:olive",
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


def learning(tasks: dict[str, list[dict]], path: Path) -> None:
    """The reward in each tenth of a run under each baseline, if possible at N = 4: mean and range over seeds."""
    sizes = [4 if any(row["n"] == 4 for row in rows) else rows[0]["n"] for rows in tasks.values()]
    names = [NAMES.get(name, name) for name in (task.partition(",")[0] for task in tasks)]
    figure, axes = axes_of([f"{name}, N = {n}" for name, n in zip(names, sizes, strict=True)])
    for axis, rows, n in zip(axes, tasks.values(), sizes, strict=True):
        runs = {arm["baseline"]: arm["runs"] for arm in arms(rows) if arm["n"] == n}
        for name in COLORS:
            if of := runs.get(name):
                curves = numpy.array([row["curve"] for row in of])
                tenths = (numpy.arange(curves.shape[1]) + 0.5) / curves.shape[1]
                thousands = numpy.mean([row["tokens"] for row in of]) / 1000 * tenths
                axis.plot(thousands, curves.mean(axis=0), color=COLORS[name], label=f"{name} ({len(of)} seeds)")
                axis.fill_between(thousands, curves.min(0), curves.max(0), color=COLORS[name], alpha=0.1, linewidth=0)
        axis.set(xlabel="generated tokens (thousands)")
        axis.legend(fontsize=8)
    axes[0].set_ylabel("mean reward (bands: range)")
    figure.savefig(path, dpi=120)


def report(tables: Tables, folder: Path) -> None:
    """The tables beside a study's data, and on the screen."""
    sizes = dict.fromkeys(cell["n"] for cells in tables.values() for cell in cells)
    text = "\n".join(f"N = {n}:\n\n{by_task(tables, n)}" for n in sizes)
    (folder / "tables.md").write_text(text)
    print(f"{text}\n{folder}: tables.md, and by task noise.png and the data.")


def render() -> None:
    """All pages and pictures."""
    for name in PAGES:
        page = HERE / f"{name}.md"
        page.write_text(rendered(page.read_text()))
    for name, tasks in LEARNING.items():
        learning({task: runs_of(task) for task in tasks}, HERE / f"{name}.png")


if __name__ == "__main__":
    render()
