"""Tables of the studies' pages: written, and read again, so that a column can be measured anew by itself."""

import math
import re
from dataclasses import dataclass
from pathlib import Path

from recipes.common.errors import InputError
from recipes.gradient_noise.measure import Comparison, Estimate


@dataclass
class Cell:
    """
    An estimator on one task at one group size.

    Args:
        efficiency, noise ([`~recipes.gradient_noise.measure.Estimate`]):
            Both over the group mean's; of the noise to signal.
        cosine (`float`):
            Of the expected gradient to the true one; NaN where noise leaves no length to either.
    """

    efficiency: Estimate
    noise: Estimate
    cosine: float

    @classmethod
    def of(cls, row: Comparison) -> "Cell":
        return cls(row.over_group_mean, row.noise_over_group_mean, row.cosine.value)

    def text(self) -> str:
        cosine = "?" if math.isnan(self.cosine) else f"{self.cosine:.3f}"
        return f"{self.efficiency.text()}; {self.noise.text()}; {cosine}"

    @classmethod
    def read(cls, text: str) -> "Cell":
        *ratios, cosine = text.split("; ")
        return cls(*map(_estimate, ratios), _number(cosine))


@dataclass
class Column:
    """A task: how many prompts it was measured on, and its cells by estimator and group size."""

    prompts: int
    cells: dict[tuple[str, int], Cell]


def tables(columns: dict[str, Column], group_sizes: tuple[int, ...]) -> str:
    """One table per group size, one column per task, by name."""
    lines = []
    for n in group_sizes:
        titles = [f"{name} (n = {column.prompts})" for name, column in columns.items()]
        lines += [f"N = {n}:\n", "| estimator | " + " | ".join(titles) + " |", "|---" * (len(titles) + 1) + "|"]
        for name in dict.fromkeys(name for column in columns.values() for name, size in column.cells if size == n):
            cells = [column.cells.get((name, n)) for column in columns.values()]
            lines.append(f"| `{name}` | {' | '.join(cell.text() if cell else '–' for cell in cells)} |")
        lines.append("")
    return "\n".join(lines)


def read_tables(text: str) -> dict[str, Column]:
    """What [`tables`] wrote, with the digits that it wrote."""
    columns = {}
    for n, table in re.findall(r"^N = (\d+):\n\n((?:\|.*\n)+)", text, flags=re.MULTILINE):
        header, _, *rows = ([cell.strip() for cell in line.strip("|").split(" | ")] for line in table.splitlines())
        titles = [re.fullmatch(r"(.+) \(n = (\d+)\)", title).groups() for title in header[1:]]
        for title, prompts in titles:
            columns.setdefault(title, Column(int(prompts), {}))
        for name, *cells in rows:
            for (title, _), cell in zip(titles, cells, strict=True):
                if cell != "–":
                    columns[title].cells[name.strip("`"), int(n)] = Cell.read(cell)
    return columns


def publish(page: Path, measured: dict[str, Column], group_sizes: tuple[int, ...]) -> dict[str, Column]:
    """
    Put what was measured in the place of the page's columns of these names, and return all that it shows then.

    Raises:
        InputError: The page has no such column, or an estimator there that was not measured.
    """
    text = page.read_text()
    introduction, published = text.partition("\nN = ")[0], read_tables(text)
    if unknown := [name for name in measured if name not in published]:
        raise InputError(f"{page} has no column {', '.join(unknown)}, only {', '.join(published)}.")
    for name, column in measured.items():
        if lost := sorted({estimator for estimator, _ in published[name].cells.keys() - column.cells.keys()}):
            raise InputError(f"{page} has {', '.join(lost)} for {name}, which was not measured now: measure it too.")
    columns = published | measured
    page.write_text(f"{introduction}\n{tables(columns, group_sizes)}")
    return columns


def _estimate(text: str) -> Estimate:
    value, low, high = re.fullmatch(r"(\S+) \(([^–]+)–([^–]+)\)", text).groups()
    return Estimate(_number(value), _number(low, -math.inf), _number(high, math.inf))


def _number(text: str, lost: float = math.nan) -> float:
    return lost if text == "?" else float(text)
