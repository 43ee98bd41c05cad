"""
The studies' results as data, results/*.json, and the pages' tables and pictures, which are rendered from them.

    python -m recipes.studies.render

Below a line such as `<!-- horizon.json: N = 4 -->` stands the table that horizon.json has for `N = 4`. An interval is
`[value, low, high]`; `null` is what is lost in noise: a value, or an end of an interval.
"""

import json
import re
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from recipes.common.errors import InputError
from recipes.common.report import markdown
from recipes.toy import lake, scratchpad


HERE = Path(__file__).parent
PAGES = ("README", "horizon", "value", "turns", "learning_curves")
Tables = dict[str, list[dict[str, Any]]]  # of cells by task, or of arms by title

# Results


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
    Put these tables in the place of the published ones, and render all pages.

    Raises:
        InputError: There is no such table, or an estimator in it that was not measured.
    """
    results = load(name)
    published = results["tables"]
    if unknown := [title for title in tables if title not in published]:
        raise InputError(f"results/{name}.json has no column {', '.join(unknown)}, only {', '.join(published)}.")
    for title, measured in tables.items():
        both = published[title], measured
        before, now = ({(row.get("estimator") or row["baseline"], row["n"]) for row in rows} for rows in both)
        if lost := ", ".join(sorted({estimator for estimator, _ in before - now})):
            raise InputError(
                f"results/{name}.json has {lost} for {title}, which was not measured now: measure it too."
            )
    save(name, results | {"tables": published | tables})
    render()


# Tables


def number(value: float | None, form: str) -> str:
    return "?" if value is None else format(value, form)


def interval(values: list[float | None], form: str = ".2f") -> str:
    value, low, high = (number(x, form) for x in values)
    return f"{value} ({low}–{high})"


def by_task(tables: Tables, n: int) -> str:
    """An estimator per row, a task per column, at group size `n`."""
    of = {(task, cell["estimator"]): cell for task, cells in tables.items() for cell in cells if cell["n"] == n}
    titles = {task: f"{task} (n = {cell['prompts']})" for (task, _), cell in of.items()}

    def text(cell: dict | None) -> str:
        if cell is None:
            return "–"
        return f"{interval(cell['efficiency'])}; {interval(cell['noise'])}; {number(cell['cosine'], '.3f')}"

    names = dict.fromkeys(name for _, name in of)
    rows = [[f"`{name}`", *(text(of.get((task, name))) for task in titles)] for name in names]
    return markdown([["estimator", *titles.values()], *rows])


def _tokens(tokens: dict) -> str:
    """Over the seeds that reach the threshold, and how many never do."""
    if tokens["thousands"] is None:
        return "never"
    return interval(tokens["thousands"], ".3g") + (f", {tokens['never']} never" if tokens["never"] else "")


def _tuned(at: dict) -> str:
    seeds = f" ({at['seeds']})" if "seeds" in at else ""
    return f"{at['score']:.3f}{seeds}" + (f", {at['collapsed']} collapsed" if at["collapsed"] else "")


ARM = {
    "task": ("task", str),
    "n": ("N", str),
    "baseline": ("baseline", str),
    "learning_rate": ("learning rate", "{:g}".format),
    "seeds": ("seeds", str),
    "over_the_run": ("over the run", lambda x: interval(x, ".3f")),
    "last_tenth": ("in the last tenth", lambda x: interval(x, ".3f")),
    "minus_group_mean": ("minus the group mean's, over the run", lambda x: interval(x, ".3f")),
    "probability": ("probability that a run beats one of the group mean's", interval),
    "tokens": ("tokens to threshold (thousands)", _tokens),
    "held_out": ("held-out at the end (%)", lambda x: interval(x, ".3g")),
    "grad_norm": ("worst gradient norm", "{:.2f}".format),
    "entropy": ("entropy, first and last tenth", lambda x: "{:.3f}, {:.3f}".format(*x)),
    "noise_scale": ("noise scale (prompts)", lambda x: number(x, ".0f")),
    "collapsed": ("collapsed", str),
}


def of_arms(arms: list[dict]) -> str:
    """An arm of the learning curves per row, with the columns that the arms have, or a column per learning rate."""
    columns = {key: column for key, column in ARM.items() if any(key in arm for arm in arms)}
    rates = list(dict.fromkeys(rate for arm in arms for rate in arm.get("rates", {})))
    rows = [
        [text(arm[key]) if key in arm else "" for key, (_, text) in columns.items()]
        + [_tuned(arm["rates"][rate]) for rate in rates]
        for arm in arms
    ]
    return markdown([[title for title, _ in columns.values()] + rates, *rows])


def headline() -> str:
    """Noise to signal over the group mean's, of tasks of all studies, as headline.json chooses them."""
    chosen, of = load("headline"), {}
    for title, (name, task) in chosen["columns"].items():
        for cell in load(name)["tables"][task]:
            if cell["n"] == chosen["n"]:
                of[title, cell["estimator"]] = "?" if cell["noise"][0] is None else interval(cell["noise"])
    titles, rows = chosen["columns"], chosen["rows"]
    cells = [[label, *(of.get((title, name), "–") for title in titles)] for label, name in rows.items()]
    return markdown([["", *titles], *cells])


def rendered(page: str) -> str:
    """The page's text with its tables as the results have them."""

    def table(found: re.Match) -> str:
        line, name, key = found.groups()
        if name == "headline":
            return f"{line}\n\n{headline()}"
        tables = load(name)["tables"]
        return f"{line}\n\n{of_arms(tables[key]) if key in tables else by_task(tables, int(key))}"

    pattern = r"^(<!-- (\w+)(?:\.json)?: (?:N = )?(.+) -->)\n\n(?:\|.*\n)*"
    return re.sub(pattern, table, page, flags=re.MULTILINE)


# Pictures

# By results, to which candidates are added: what the dial counts, and columns by title, each a group size and the
# tasks by the value of the dial
PICTURES = {
    "horizon": (
        "tokens per completion",
        {f"N = {n}": (n, {t: f"T = {t}" for t in scratchpad.STEPS}) for n in (4, 8, 32)},
    ),
    "turns": (
        "turns per game",
        {
            "reward at the end, N = 4": (4, {t: f"lake_{t}" for t in lake.SIDES}),
            "rewards per turn, N = 4": (4, {t: f"lake_{t}_turns" for t in lake.SIDES}),
        },
    ),
}
PANELS = {
    "as they are": ("none", "opo", "ogb", "otb", "otb_shrunk"),
    "one left out: no bias": ("ogb, one left out", "otb, one left out", "otb_shrunk, one left out"),
    "pooled": ("rloo_pooled", "ogb_pooled", "ogb_pooled_damped"),
    "damped": ("damped_return", "inverse_energy", "inverse_relative", "clipped", "token_damped"),
}


def draw(name: str, tables: Tables, path: Path) -> None:
    """One row per panel of `PANELS`, one column per column of the picture `name`, of what is there."""
    dial, columns = PICTURES[name]
    of = {(task, cell["estimator"], cell["n"]): cell for task, cells in tables.items() for cell in cells}
    dials = {title: {x: task for x, task in tasks.items() if task in tables} for title, (_, tasks) in columns.items()}
    columns = {title: (columns[title][0], tasks) for title, tasks in dials.items() if tasks}
    estimators = {estimator for _, estimator, _ in of}
    panels = {title: names for title, names in PANELS.items() if estimators & {*names}}
    if not columns:
        return
    figure = Figure(figsize=(4.2 * len(columns) + 0.6, 3.2 * len(panels)), layout="constrained")
    axes = figure.subplots(len(panels), len(columns), sharex=True, sharey=True, squeeze=False)
    for row, (panel, names) in zip(axes, panels.items(), strict=True):
        for axis, (title, (n, tasks)) in zip(row, columns.items(), strict=True):
            names = [name for name in names if name in estimators]
            for i, name in enumerate(names):
                found = [(x, of[task, name, n]["efficiency"]) for x, task in tasks.items() if (task, name, n) in of]
                # Side by side, so that intervals do not hide each other; not what is lost in noise
                found = [(x * 1.04 ** (i - len(names) / 2), *e) for x, e in found if e[0] is not None and any(e[1:])]
                line = axis.plot([x for x, *_ in found], [e for _, e, *_ in found], "o-", markersize=4, label=name)[0]
                for x, _, low, high in found:
                    ends = [max(low or 0, 0), 9 if high is None else min(high, 9)]
                    axis.plot([x, x], ends, color=line.get_color(), alpha=0.4)
            axis.axhline(1, color="0.4", linewidth=0.8, linestyle=":")
            axis.set(xscale="log", ylim=(0, 2))
            axis.set_title(f"{panel}, {title}", fontsize=10)
            axis.set_xticks(list(tasks), map(str, tasks))
            axis.minorticks_off()
            axis.grid(alpha=0.3)
        row[0].set_ylabel("efficiency over the group mean's")
        row[-1].legend(fontsize=8, loc="upper right")
    for axis in axes[-1]:
        axis.set_xlabel(dial)
    prompts = sorted({tables[task][0]["prompts"] for _, tasks in columns.values() for task in tasks.values()})
    numbers = " to ".join(map(str, dict.fromkeys((prompts[0], prompts[-1]))))
    figure.suptitle(f"{numbers} prompts per point; bars: 95 % by bootstrap over prompts", fontsize=11)
    figure.savefig(path, dpi=110)


def report(tables: Tables, folder: Path) -> None:
    """The tables beside a study's data, and on the screen."""
    sizes = dict.fromkeys(cell["n"] for cells in tables.values() for cell in cells)
    text = "\n".join(f"N = {n}:\n\n{by_task(tables, n)}" for n in sizes)
    (folder / "tables.md").write_text(text)
    print(f"{text}\n{folder}: tables.md, a picture, and the data.")


def render() -> None:
    """All pages and pictures."""
    for name in PAGES:
        page = HERE / f"{name}.md"
        page.write_text(rendered(page.read_text()))
    for name in PICTURES:
        measured, candidates = (load(of)["tables"] for of in (name, f"{name}_candidates"))
        draw(name, {task: cells + candidates.get(task, []) for task, cells in measured.items()}, HERE / f"{name}.png")


if __name__ == "__main__":
    render()
