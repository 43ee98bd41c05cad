"""Pictures of a training run and of a group. Without pyplot, which would choose a backend for whoever imports this."""

import math
from pathlib import Path

from matplotlib.colors import Normalize, TwoSlopeNorm
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

from .held_out import Accuracy


PANELS = (
    ("reward", "reward, mean of a batch"),
    ("grad_norm", "gradient norm"),
    ("otb/energy/token_mean", "energy of a token, mean of $w_t$"),
    ("turns", "turns per completion"),
    ("tools/failure_frequency", "share of calls that fail"),
)
SEQUENTIAL, DIVERGING = "viridis", "RdBu"


def plot_training(log_history: list[dict], evaluations: list[Accuracy], path: Path, title: str) -> None:
    """
    Held-out accuracy, reward, gradient norm, energy and turns over the steps of a run.

    Where values are logged often, the pale line is every one and the bold one their centred mean over a tenth of
    the run. A panel whose values are missing is left out.
    """
    panels = [(key, label) for key, label in PANELS if any(_is_number(entry.get(key)) for entry in log_history)]
    if all(entry.get("turns", 1) == 1 for entry in log_history):
        panels = [(key, label) for key, label in panels if key != "turns"]
    rows = 1 + (len(panels) > 3)
    columns = math.ceil((len(panels) + 1) / rows)
    figure = Figure(figsize=(4.2 * columns, 3.1 * rows + 0.6), layout="constrained")
    first, *others = figure.subplots(rows, columns, squeeze=False).flat
    for unused in others[len(panels) :]:
        unused.remove()
    others = others[: len(panels)]
    first.errorbar(
        [e.step for e in evaluations],
        [100 * e.mean for e in evaluations],
        [0.0 if math.isnan(e.standard_error) else 100 * e.standard_error for e in evaluations],
        color="tab:red", marker="o", capsize=3,
    )  # fmt: skip
    first.set_title("held-out accuracy, % ± standard error", fontsize=10)
    for axis, (key, label) in zip(others, panels, strict=True):
        steps, values = zip(*[(e["step"], e[key]) for e in log_history if _is_number(e.get(key))], strict=True)
        axis.plot(steps, values, color="tab:blue", alpha=0.35, linewidth=1, marker="." if len(values) < 10 else None)
        axis.plot(steps, centred_mean(values, len(values) // 10), color="tab:blue", linewidth=2)
        axis.set_title(label, fontsize=10)
    for axis in (first, *others):
        axis.set_xlabel("step")
        axis.set_ylim(0, axis.get_ylim()[1] * 1.05)
        axis.grid(alpha=0.3)
    explained = "pale: every logged value; bold: their centred mean over a tenth of the run"
    figure.suptitle(f"{title}\n{explained}" if others else title, fontsize=10)
    figure.savefig(path, dpi=120)


def centred_mean(values: list[float], width: int) -> list[float]:
    """The mean over about `width` values around each one; fewer at the ends, as many on the left as on the right."""
    means = []
    for i in range(len(values)):
        reach = min(width // 2, i, len(values) - 1 - i)
        window = values[i - reach : i + reach + 1]
        means.append(sum(window) / len(window))
    return means


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


def _is_number(value) -> bool:
    return isinstance(value, int | float) and math.isfinite(value)
