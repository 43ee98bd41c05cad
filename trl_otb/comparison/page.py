"""The report of a comparison as a page that needs no other file, on a phone and in the dark, too."""

import html
import math
import re
from typing import TYPE_CHECKING

from .efficiency import UNKNOWN, Comparison, control


if TYPE_CHECKING:
    from .report import BaselineReport


PLOT_LIMIT = 3.0  # the share of more prompts at which intervals are cut off in pictures
NO_LIMIT = f"?: these prompts set no limit, or it is beyond {100 * UNKNOWN:,.0f} %."
WIDTH, NAMES, ROW = 370, 132, 24  # of a picture, of its names, and a row's height; a phone is 390 wide
STYLE = """
:root { color-scheme: light dark; --text: #1c1c1c; --faint: #6a6a6a; --line: #d5d5d5; --back: #fff;
  --better: #0b62a8; --worse: #b3261e; }
@media (prefers-color-scheme: dark) {
  :root { --text: #e8e8e8; --faint: #a5a5a5; --line: #454545; --back: #161616; --better: #7db9f0; --worse: #f2918a; }
}
body { margin: 0 auto; padding: 1rem; max-width: 46rem; background: var(--back); color: var(--text);
  overflow-wrap: break-word; font: 16px/1.5 system-ui, sans-serif; }
h1 { font-size: 1.2rem; overflow-wrap: anywhere; } h2 { font-size: 1rem; margin-top: 2rem; }
.advice { font-weight: 600; } .faint, figcaption { color: var(--faint); font-size: .875rem; }
table { border-collapse: collapse; font-size: .875rem; }
th, td { padding: .25rem .75rem .25rem 0; text-align: left; vertical-align: top; border-bottom: 1px solid var(--line); }
.long { overflow-wrap: anywhere; }
figure { margin: 1rem 0; } svg { width: 100%; max-width: 34rem; height: auto; font-size: 11px; fill: var(--text); }
pre { overflow-x: auto; font-size: .8rem; }
"""


def page_of(report: "BaselineReport") -> str:
    """HTML with the verdict, and for each N a table and a picture, the run's own N first."""
    advice, *others = report.verdict.splitlines()
    sizes = sorted(report.group_sizes, key=lambda n: n != report.group_size)
    parts = [
        f"<h1>Which baseline for {html.escape(report.subject)}?</h1>",
        f"<p class=advice>{html.escape(advice)}</p>",
        *(f"<p>{html.escape(line)}</p>" for line in others),
        f"<p class=faint>{html.escape(report.summary)}</p>",
        *(_section(report, n) for n in sizes),
    ]
    if report.spending:
        parts.append(f"<h2>As many completions per step</h2><pre>{html.escape(report.spending)}</pre>")
    return (
        "<!doctype html><html lang=en><meta charset=utf-8>"
        "<meta name=viewport content='width=device-width, initial-scale=1'>"
        f"<title>Baselines for {html.escape(report.subject)}</title><style>{STYLE}</style>{''.join(parts)}</html>"
    )


def _section(report: "BaselineReport", n: int) -> str:
    rows, of = report.at(n), control(n)
    cells = "".join(f"<tr>{_cell(name)}<td>{more}<td>{noise}</tr>" for name, more, noise in report.table_of(n))
    return (
        f"<h2>N = {n}</h2><table><tr><th>baseline<th>more prompts, % (95 %)<th>noise on the same prompts, × {of}'s</tr>"
        f"{cells}</table>{f'<p class=faint>{NO_LIMIT}</p>' * ('?' in cells)}"
        f"<figure>{_picture(rows, of)}<figcaption>More prompts per step that {of} needs, in per cent, with intervals "
        "of 95 %. Blue: surely more; red: surely fewer; grey: neither.</figcaption></figure>"
    )


def picture_of(report: "BaselineReport") -> str:
    """The picture of the run's own N as an SVG that needs no page."""
    colors = "--text: #1c1c1c; --faint: #6a6a6a; --line: #d5d5d5; --better: #0b62a8; --worse: #b3261e"
    picture = _picture(report.at(), report.control)
    size = f"width='{1.5 * WIDTH:.0f}' font-family='sans-serif' font-size='11' fill='#1c1c1c'"
    return picture.replace("<svg ", f"<svg xmlns='http://www.w3.org/2000/svg' {size} style='{colors}' ", 1)


def _cell(name: str) -> str:
    """A name that is broken only where it is long, after a sign."""
    text = html.escape(name)
    return f"<td>{text}" if _short(name) == name else "<td class=long>" + re.sub("([.:_])", r"\1<wbr>", text)


def _short(name: str) -> str:
    return name if len(name) <= 20 else f"{name[:19]}…"


def _picture(rows: list[Comparison], of: str) -> str:
    """An SVG with a row per baseline: the estimate and its interval."""
    known = [row for row in rows if not row.more_prompts.lost]
    ends = [end for row in known for end in (row.more_prompts.low, row.more_prompts.high, row.more_prompts.value)]
    ends = [min(max(end, -1.0), PLOT_LIMIT) for end in ends if not math.isnan(end)]
    low, high = min([-0.1, *ends]), max([0.1, *ends])
    tick = next(step for step in (0.1, 0.25, 0.5, 1.0) if (high - low) / step <= 5)
    low, high = tick * math.floor(low / tick), tick * math.ceil(high / tick)

    def at(share: float) -> float:
        share = min(max(share, low), high)
        return round(NAMES + (WIDTH - NAMES - 24) * (share - low) / (high - low), 1)

    bottom, parts = ROW * len(rows), []
    for i in range(round((high - low) / tick) + 1):
        share = low + i * tick
        dashes = "" if abs(share) < 1e-9 else " stroke-dasharray='2 3'"
        parts.append(f"<path d='M{at(share)} 0V{bottom}' stroke='var(--line)'{dashes}/>")
        parts.append(f"<text x='{at(share)}' y='{bottom + 14}' text-anchor='middle'>{round(100 * share)}</text>")
    for i, row in enumerate(rows):
        y, gain = ROW * (i + 0.5), row.more_prompts
        parts.append(f"<text x='0' y='{y + 4}'>{html.escape(_short(row.name))}</text>")
        if row.name == of:
            parts.append(f"<circle cx='{at(0)}' cy='{y}' r='4' fill='var(--faint)'/>")
        elif gain.lost:
            parts.append(f"<text x='{NAMES + 4}' y='{y + 4}' fill='var(--faint)'>lost in noise</text>")
        else:
            surely_more, surely_fewer = round(gain.low, 4) > 0, round(gain.high, 4) < 0  # beyond rounding
            color = f"var(--{'better' if surely_more else 'worse' if surely_fewer else 'faint'})"
            ends_at = f"M{at(gain.low)} {y}H{at(gain.high)}"
            parts.append(f"<path d='{ends_at}' stroke='{color}' stroke-width='3' stroke-opacity='.55'/>")
            parts.append(f"<circle cx='{at(gain.value)}' cy='{y}' r='4' fill='{color}'/>")
    label = f"How many more prompts {of} needs than each baseline"
    return f"<svg viewBox='0 0 {WIDTH} {bottom + 20}' role='img' aria-label='{label}'>{''.join(parts)}</svg>"
