"""
The studies' results as data, results/*.json, and the tables and pictures of the pages that are rendered from them.

    python -m recipes.studies.render

The table below a line such as `<!-- horizon.json: N = 4 -->` is the one that this file has for `N = 4`. An interval is
`[value, low, high]`; `null` stands for what is lost in noise, a value or an end of an interval.
"""

import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from recipes.common.errors import InputError
from recipes.toy import lake, scratchpad


HERE = Path(__file__).parent
PAGES = ("README", "horizon", "turns", "learning_curves")

# Results


def load(name: str) -> dict[str, Any]:
    return json.loads((HERE / "results" / f"{name}.json").read_text())


def save(name: str, results: dict[str, Any]) -> None:
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


def publish(name: str, cells: list[dict]) -> None:
    """
    Put these cells in the place of the published ones of the same tasks.

    Raises:
        InputError: A task is not published, or an estimator that is has not been measured.
    """
    results = load(name)
    published, measured = _estimators(results["cells"]), _estimators(cells)
    if unknown := [task for task in measured if task not in published]:
        raise InputError(f"results/{name}.json has no column {', '.join(unknown)}, only {', '.join(published)}.")
    for task, estimators in measured.items():
        if lost := sorted({estimator for estimator, _ in published[task] - estimators}):
            raise InputError(
                f"results/{name}.json has {', '.join(lost)} for {task}, which was not measured now: measure it too."
            )
    for task in measured:
        at = next(i for i, cell in enumerate(results["cells"]) if cell["task"] == task)
        others = [cell for cell in results["cells"] if cell["task"] != task]
        results["cells"] = others[:at] + [cell for cell in cells if cell["task"] == task] + others[at:]
    save(name, results)


def _estimators(cells: list[dict]) -> dict[str, set[tuple[str, int]]]:
    found = {}
    for cell in cells:
        found.setdefault(cell["task"], set()).add((cell["estimator"], cell["n"]))
    return found


# Tables


def number(value: float | None, form: str) -> str:
    return "?" if value is None else format(value, form)


def interval(values: list[float | None], form: str = ".2f") -> str:
    value, low, high = (number(x, form) for x in values)
    return f"{value} ({low}–{high})"


def _cell(cell: dict) -> str:
    return f"{interval(cell['efficiency'])}; {interval(cell['noise'])}; {number(cell['cosine'], '.3f')}"


def _table(header: list[str], rows: list[list[str]]) -> str:
    lines = [header, *rows]
    lines = ["|" + "".join(f" {cell} |" if cell else " |" for cell in line) + "\n" for line in lines]
    return "".join([lines[0], "|---" * len(header) + "|\n", *lines[1:]])


def by_task(cells: list[dict], n: int) -> str:
    """Of estimators, one per row, at group size `n`, one column per task."""
    tasks = {f"{cell['task']} (n = {cell['prompts']})": cell["task"] for cell in cells if cell["n"] == n}
    of = {(cell["task"], cell["estimator"]): _cell(cell) for cell in cells if cell["n"] == n}
    names = dict.fromkeys(name for _, name in of)
    rows = [[f"`{name}`", *(of.get((task, name), "–") for task in tasks.values())] for name in names]
    return _table(["estimator", *tasks], rows)


def _tokens(tokens: dict) -> str:
    """Over the seeds that reach the threshold, and how many never do."""
    if tokens["thousands"] is None:
        return "never"
    return interval(tokens["thousands"], ".3g") + (f", {tokens['never']} never" if tokens["never"] else "")


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
    """Of learning curves: an arm per row, with the columns that the arms have."""
    columns = {key: column for key, column in ARM.items() if any(key in arm for arm in arms)}
    rows = [[text(arm[key]) if key in arm else "" for key, (_, text) in columns.items()] for arm in arms]
    rates = dict.fromkeys(rate for arm in arms for rate in arm.get("rates", {}))
    for row, arm in zip(rows, arms, strict=True):
        row += [_tuned(arm["rates"][rate]) for rate in rates]
    return _table([title for title, _ in columns.values()] + list(rates), rows)


def _tuned(of_rate: dict) -> str:
    seeds = f" ({of_rate['seeds']})" if "seeds" in of_rate else ""
    return f"{of_rate['score']:.3f}{seeds}" + (f", {of_rate['collapsed']} collapsed" if of_rate["collapsed"] else "")


# Of README.md: columns by title, (results, task); rows by label
HEADLINE = {
    "sums": ("horizon", "sums"),
    "calculator": ("horizon", "calculator"),
    "scratchpad, T = 30": ("horizon", "T = 30"),
    "T = 100": ("horizon", "T = 100"),
    "T = 300": ("horizon", "T = 300"),
    "lake, 30 turns": ("turns", "lake_30"),
    "rewards per turn": ("turns", "lake_30_turns"),
    "SmolLM2 copying, start": ("language", "copy, start"),
    "amid training": ("language", "copy, trained"),
    "SmolLM2 stories": ("language", "words, start"),
    "stories, amid training": ("language", "words, trained"),
}
HEADLINERS = {
    "`none`": "none",
    "*small bias:* `otb`": "otb",
    "`ogb`": "ogb",
    "`otb_shrunk`": "otb_shrunk",
    "*no bias:* `otb`, one left out": "otb, one left out",
    "`ogb`, one left out": "ogb, one left out",
    "`rloo_pooled`": "rloo_pooled",
    "**`ogb_pooled`**": "ogb_pooled",
    "*small bias:* **`ogb_pooled_damped`**": "ogb_pooled_damped",
}


def headline(n: int) -> str:
    """Noise to signal over the group mean's, of the tasks of all studies."""
    of = {
        (name, cell["task"], cell["estimator"]): "?" if cell["noise"][0] is None else interval(cell["noise"])
        for name in {name for name, _ in HEADLINE.values()}
        for cell in load(name)["cells"]
        if cell["n"] == n
    }
    rows = [[label, *(of.get((*at, name), "–") for at in HEADLINE.values())] for label, name in HEADLINERS.items()]
    return _table(["", *HEADLINE], rows)


def rendered(page: str) -> str:
    """The page's text with its tables as the results have them."""

    def table(found: re.Match) -> str:
        line, name, key = found.groups()
        if name == "headline":
            return f"{line}\n\n{headline(int(key))}"
        results = load(name)
        made = of_arms(results["tables"][key]) if "tables" in results else by_task(results["cells"], int(key))
        return f"{line}\n\n{made}"

    pattern = r"^(<!-- (\w+)(?:\.json)?: (?:N = )?(.+) -->)\n\n(?:\|.*\n)*"
    return re.sub(pattern, table, page, flags=re.MULTILINE)


# Pictures


@dataclass(frozen=True)
class Picture:
    """
    Args:
        results (`tuple[str, ...]`):
            Files with the cells.
        columns (`dict[str, tuple[int, dict[int, str]]]`):
            By title: a group size, and the tasks by the value of the dial.
        dial (`str`):
            What the dial counts.
    """

    results: tuple[str, ...]
    columns: dict[str, tuple[int, dict[int, str]]]
    dial: str


PICTURES = {
    "horizon": Picture(
        ("horizon", "horizon_candidates"),
        {f"N = {n}": (n, {t: f"T = {t}" for t in scratchpad.STEPS}) for n in (4, 8, 32)},
        "tokens per completion",
    ),
    "turns": Picture(
        ("turns", "turns_candidates"),
        {
            "reward at the end, N = 4": (4, {t: f"lake_{t}" for t in lake.SIDES}),
            "rewards per turn, N = 4": (4, {t: f"lake_{t}_turns" for t in lake.SIDES}),
        },
        "turns per game",
    ),
}
PANELS = {
    "as they are": ("none", "opo", "ogb", "otb", "otb_shrunk"),
    "one left out: no bias": ("ogb, one left out", "otb, one left out", "otb_shrunk, one left out"),
    "pooled": ("rloo_pooled", "ogb_pooled", "ogb_pooled_damped"),
    "damped": ("damped_return", "inverse_energy", "inverse_relative", "clipped", "token_damped"),
}


def draw(cells: list[dict], picture: Picture, path: Path) -> None:
    """One row per panel of `PANELS`, one column per column of the picture, of what is there."""
    of = {(cell["task"], cell["estimator"], cell["n"]): cell for cell in cells}
    tasks = {task for task, _, _ in of}
    shown = {
        title: (n, {x: task for x, task in by_dial.items() if task in tasks})
        for title, (n, by_dial) in picture.columns.items()
        if tasks & set(by_dial.values())
    }
    panels = {title: [name for name in names if any(name == e for _, e, _ in of)] for title, names in PANELS.items()}
    panels = {title: names for title, names in panels.items() if names}
    if not shown or not panels:
        return
    figure = Figure(figsize=(4.2 * len(shown) + 0.6, 3.2 * len(panels)), layout="constrained")
    axes = figure.subplots(len(panels), len(shown), sharex=True, sharey=True, squeeze=False)
    for row, (panel, names) in zip(axes, panels.items(), strict=True):
        for axis, (title, (n, by_dial)) in zip(row, shown.items(), strict=True):
            for i, name in enumerate(names):
                found = [(x, of[task, name, n]["efficiency"]) for x, task in by_dial.items() if (task, name, n) in of]
                # Side by side, so that intervals do not hide each other
                found = [(x * 1.04 ** (i - len(names) / 2), ratio) for x, ratio in found if not lost(ratio)]
                line = axis.plot([x for x, _ in found], [r[0] for _, r in found], "o-", markersize=4, label=name)[0]
                for x, (_, low, high) in found:
                    ends = [max(low or 0, 0), 9 if high is None else min(high, 9)]
                    axis.plot([x, x], ends, color=line.get_color(), alpha=0.4)
            axis.axhline(1, color="0.4", linewidth=0.8, linestyle=":")
            axis.set(xscale="log", title=f"{panel}, {title}", ylim=(0, 2))
            axis.title.set_fontsize(10)
            axis.set_xticks(list(by_dial), map(str, by_dial))
            axis.minorticks_off()
            axis.grid(alpha=0.3)
        row[0].set_ylabel("efficiency over the group mean's")
        row[-1].legend(fontsize=8, loc="upper right")
    for axis in axes[-1]:
        axis.set_xlabel(picture.dial)
    prompts = sorted(
        {cell["prompts"] for cell in cells for _, by_dial in shown.values() if cell["task"] in by_dial.values()}
    )
    numbers = " to ".join(map(str, dict.fromkeys((prompts[0], prompts[-1]))))
    figure.suptitle(f"{numbers} prompts per point; bars: 95 % by bootstrap over prompts", fontsize=11)
    figure.savefig(path, dpi=110)


def lost(values: list[float | None]) -> bool:
    """Whether noise leaves no value, or an interval without ends."""
    return values[0] is None or values[1] is values[2] is None


def render() -> None:
    """All pages and pictures."""
    for name in PAGES:
        page = HERE / f"{name}.md"
        page.write_text(rendered(page.read_text()))
    for name, picture in PICTURES.items():
        cells = [cell for of in picture.results for cell in load(of)["cells"]]
        draw(cells, picture, HERE / f"{name}.png")


if __name__ == "__main__":
    render()
