"""The picture of a group: its tokens coloured by energy, by advantage, and by the group mean's advantage."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unicodedata import east_asian_width

from matplotlib.axes import Axes
from matplotlib.cm import ScalarMappable
from matplotlib.colors import Normalize
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

from ..figure import new_figure
from .group import IMPROBABLE, Group, ShownCompletion, Token, read_group, visible


TITLES = {
    "energy": "Energy: high where the policy was unsure, or wrong against its own odds",
    "advantage": "Advantage under the baseline of the run (blue: more of this, red: less)",
    "group_mean_advantage": "Advantage under the group mean, as GRPO has it",
}
COLUMNS = 120  # of a line, in letters; longer completions continue on the next
# Inches. A letter of the font below is 0.084 wide.
LETTER, LINE, BETWEEN, FONT = 0.088, 0.22, 0.07, 10
LEFT, RIGHT, TOP, BOTTOM = 0.95, 0.95, 0.42, 0.3


@dataclass
class Place:
    """The place of a token: letters from the left, inches from the top, and its width in letters."""

    token: Token
    x: int
    y: float
    width: int


def plot(
    rollout: Any,
    path: str | Path | None,
    prompt: int,
    tokenizer: Any,
    max_tokens: int,
    max_completions: int,
) -> Figure:
    """See [`~trl_otb.rollout.Rollout.plot`]."""
    group = read_group(rollout, prompt, tokenizer, max_tokens, max_completions)
    if not group.values:
        raise ValueError("The rollout has neither energies nor advantages: there is nothing to draw.")
    places, heads, depth = _layout(group.completions)
    width = max((place.x + place.width for place in places), default=1)
    panels = len(group.values)
    # Not narrower than its titles
    size = (LEFT + max(width * LETTER, 5.5) + RIGHT, panels * (TOP + depth) + BOTTOM)
    figure = new_figure(figsize=size)
    axes = {}
    for i, name in enumerate(group.values):
        bottom = size[1] - (i + 1) * (TOP + depth)
        box = (LEFT / size[0], bottom / size[1], width * LETTER / size[0], depth / size[1])
        axes[name] = figure.add_axes(box, xlim=(0, width), ylim=(depth, 0))
        _draw(axes[name], group, name, places, heads)
    for names in (["energy"], ["advantage", "group_mean_advantage"]):
        _scale(figure, group, [axes[name] for name in names if name in axes], names[0], size)
    figure.text(LEFT / size[0], 0.1 / size[1], _note(group, rollout.num_generations), fontsize=8, color="0.35")
    if path is not None:
        figure.savefig(path, dpi=120)
    return figure


def _layout(completions: list[ShownCompletion]) -> tuple[list[Place], list[float], float]:
    """The places of all tokens, the start of each completion, and the total height in inches."""
    places, heads, y = [], [], 0.0
    for completion in completions:
        heads.append(y)
        x = 0
        for token in completion.tokens:
            width = 1 + sum(2 if east_asian_width(letter) in "WF" else 1 for letter in visible(token.text))
            if x > 0 and x + width > COLUMNS:
                x, y = 0, y + LINE
            places.append(Place(token, x, y, width))
            x += width
        y += LINE + BETWEEN
    return places, heads, y - BETWEEN


def _draw(axis: Axes, group: Group, name: str, places: list[Place], heads: list[float]) -> None:
    colours: Any = _colours(name, group.largest(name))  # whose annotations forget single numbers
    for place in places:
        number = place.token.values.get(name)
        face = "0.88" if not place.token.generated else "white" if number is None else colours.to_rgba(number)
        axis.add_patch(Rectangle((place.x, place.y), place.width, LINE, facecolor=face, linewidth=0))
        if place.token.improbable:
            edges = (place.x + 0.15, place.y + 0.01), place.width - 0.3, LINE - 0.02
            axis.add_patch(Rectangle(*edges, fill=False, edgecolor="black", linewidth=1.4, zorder=2))
        dark = not isinstance(face, str) and 0.3 * face[0] + 0.59 * face[1] + 0.11 * face[2] < 0.5
        at = (place.x + place.width / 2, place.y + LINE / 2)
        axis.text(
            *at,
            visible(place.token.text),
            ha="center",
            va="center_baseline",
            color="white" if dark else "black",
            fontsize=FONT,
            family="monospace",
            parse_math=False,
        )
    axis.set_yticks([head + LINE / 2 for head in heads], [completion.label for completion in group.completions])
    axis.set_xticks([])
    axis.tick_params(length=0)
    axis.spines[:].set_visible(False)
    axis.set_title(TITLES[name], loc="left", fontsize=11)


def _scale(figure: Figure, group: Group, axes: list[Axes], name: str, size: tuple[float, float]) -> None:
    """A colour bar that `axes` share."""
    if not axes:
        return
    boxes = [axis.get_position() for axis in axes]
    low, high = min(box.y0 for box in boxes), max(box.y1 for box in boxes)
    bar = figure.add_axes(((size[0] - RIGHT + 0.2) / size[0], low, 0.12 / size[0], high - low))
    figure.colorbar(_colours(name, group.largest(name)), cax=bar)
    bar.tick_params(labelsize=8)


def _colours(name: str, largest: float) -> ScalarMappable:
    if name == "energy":
        return ScalarMappable(Normalize(0.0, largest), "Oranges")
    return ScalarMappable(Normalize(-largest, largest), "RdBu")


def _note(group: Group, num_generations: int) -> str:
    """A note on the meaning of frames and grey, and on what is omitted."""
    note = f"framed: {IMPROBABLE}"
    if any(not token.generated for completion in group.completions for token in completion.tokens):
        note += "; grey: tool output"
    longest = max(len(completion.tokens) for completion in group.completions)
    if any(completion.left_out for completion in group.completions):
        note += f"; only the first {longest} tokens"
    if len(group.completions) < num_generations:
        note += f"; {len(group.completions)} of {num_generations} completions"
    return note
