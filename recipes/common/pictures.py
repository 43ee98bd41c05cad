"""A picture of a group. Without pyplot, which would choose a backend for whoever imports this."""

import math

from matplotlib.colors import Normalize, TwoSlopeNorm
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle


SEQUENTIAL, DIVERGING = "viridis", "RdBu"


def plot_group(
    tokens: list[list[str]],
    by_policy: list[list[bool]],
    panels: dict[str, list[list[float]]],
    labels: list[str],
    diverging: tuple[str, ...] = ("advantage",),
) -> Figure:
    """
    One group of completions, token by token: each panel colours the policy's tokens by a value and leaves tool output
    grey.

    Args:
        tokens (`list[list[str]]`):
            Of each completion, as they are to be written.
        by_policy (`list[list[bool]]`):
            Whether the policy generated the token.
        panels (`dict[str, list[list[float]]]`):
            By title, a value for each token.
        labels (`list[str]`):
            Of each completion, to stand at its left.
        diverging (`tuple[str, ...]`, *optional*):
            Panels whose title holds one of these words have a sign: blue above 0, white at 0, red below.
    """
    width = max(map(len, tokens))
    size = (0.25 * width + 2.5, (0.3 * len(tokens) + 0.8) * len(panels))
    figure = Figure(figsize=size, layout="constrained")
    axes = figure.subplots(len(panels), 1, squeeze=False)
    for axis, (title, values) in zip(axes[:, 0], panels.items(), strict=True):
        image = [[float("nan")] * width for _ in tokens]
        for row, generated in enumerate(by_policy):
            for column, is_generated in enumerate(generated):
                if is_generated:
                    image[row][column] = values[row][column]
                else:
                    axis.add_patch(Rectangle((column - 0.5, row - 0.5), 1, 1, color="0.85", linewidth=0))
        signed = any(word in title.lower() for word in diverging)
        shown = axis.imshow(image, cmap=DIVERGING if signed else SEQUENTIAL, norm=_norm(image, signed), aspect="auto")
        for row, characters in enumerate(tokens):
            for column, character in enumerate(characters):
                color = "black"
                if by_policy[row][column]:
                    red, green, blue, _ = shown.to_rgba(image[row][column])
                    color = "white" if 0.3 * red + 0.59 * green + 0.11 * blue < 0.5 else "black"
                axis.text(column, row, character, ha="center", va="center", fontsize=8, color=color)
        axis.set_yticks(range(len(labels)), labels)
        axis.set(title=title, xlabel="token of the completion (grey: tool output)")
        figure.colorbar(shown, ax=axis, pad=0.01)
    return figure


def _norm(image: list[list[float]], signed: bool) -> Normalize:
    values = [value for row in image for value in row if not math.isnan(value)] or [0.0]
    if signed:
        largest = max(map(abs, values)) or 1.0
        return TwoSlopeNorm(0.0, -largest, largest)
    return Normalize(min(values), max(values))
