"""The picture of a group: its tokens coloured by energy, by advantage, and by the group mean's advantage."""

from dataclasses import dataclass
from typing import Any
from unicodedata import east_asian_width

from .text import IMPROBABLE, Group, ShownCompletion, Token, new_figure, visible


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


def draw(group: Group, num_generations: int) -> Any:
    """See [`~trl_otb.rollout.Rollout.plot`]."""
    if not group.values:
        raise ValueError("The rollout has neither energies nor advantages: there is nothing to draw.")
    places, heads, depth = _layout(group.completions)
    width = max((place.x + place.width for place in places), default=1)
    # Not narrower than its titles
    size = (LEFT + max(width * LETTER, 5.5) + RIGHT, len(group.values) * (TOP + depth) + BOTTOM)
    figure = new_figure(figsize=size)
    axes = {}
    for i, name in enumerate(group.values):
        bottom = size[1] - (i + 1) * (TOP + depth)
        box = (LEFT / size[0], bottom / size[1], width * LETTER / size[0], depth / size[1])
        axes[name] = figure.add_axes(box, xlim=(0, width), ylim=(depth, 0))
        _draw(axes[name], group, name, places, heads)
    for names in (["energy"], ["advantage", "group_mean_advantage"]):  # which share a scale
        if shown := [axes[name] for name in names if name in axes]:
            low, high = min(a.get_position().y0 for a in shown), max(a.get_position().y1 for a in shown)
            bar = figure.add_axes(((size[0] - RIGHT + 0.2) / size[0], low, 0.12 / size[0], high - low))
            figure.colorbar(_colours(names[0], group.largest(names[0])), cax=bar)
            bar.tick_params(labelsize=8)
    figure.text(LEFT / size[0], 0.1 / size[1], _note(group, num_generations), fontsize=8, color="0.35")
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


def _draw(axis: Any, group: Group, name: str, places: list[Place], heads: list[float]) -> None:
    from matplotlib.patches import Rectangle

    colours = _colours(name, group.largest(name))
    letters: dict[str, Any] = {"ha": "center", "va": "center_baseline", "fontsize": FONT, "family": "monospace"}
    for place in places:
        number = place.token.values.get(name)
        face = "0.88" if not place.token.generated else "white" if number is None else colours.to_rgba(number)
        axis.add_patch(Rectangle((place.x, place.y), place.width, LINE, facecolor=face, linewidth=0))
        if place.token.improbable:
            edges = (place.x + 0.15, place.y + 0.01), place.width - 0.3, LINE - 0.02
            axis.add_patch(Rectangle(*edges, fill=False, edgecolor="black", linewidth=1.4, zorder=2))
        dark = not isinstance(face, str) and 0.3 * face[0] + 0.59 * face[1] + 0.11 * face[2] < 0.5
        at = (place.x + place.width / 2, place.y + LINE / 2)
        axis.text(*at, visible(place.token.text), color="white" if dark else "black", parse_math=False, **letters)
    axis.set_yticks([head + LINE / 2 for head in heads], [completion.label for completion in group.completions])
    axis.set_xticks([])
    axis.tick_params(length=0)
    axis.spines[:].set_visible(False)
    axis.set_title(TITLES[name], loc="left", fontsize=11)


def _colours(name: str, largest: float) -> Any:
    from matplotlib.cm import ScalarMappable
    from matplotlib.colors import Normalize

    ends, name = ((0.0, largest), "Oranges") if name == "energy" else ((-largest, largest), "RdBu")
    return ScalarMappable(Normalize(*ends), name)


def _note(group: Group, num_generations: int) -> str:
    """A note on the meaning of frames and grey, and on what is omitted."""
    note = f"framed: {IMPROBABLE}"
    if any(not token.generated for completion in group.completions for token in completion.tokens):
        note += "; grey: tool output"
    if any(completion.left_out for completion in group.completions):
        note += f"; only the first {max(len(completion.tokens) for completion in group.completions)} tokens"
    if len(group.completions) < num_generations:
        note += f"; {len(group.completions)} of {num_generations} completions"
    return note
