"""Pictures of a training run and of a group. Without pyplot, which would choose a backend for whoever imports this."""

from pathlib import Path

from matplotlib.figure import Figure
from matplotlib.patches import Rectangle


PANELS = (
    ("reward", "reward (share of right answers)"),
    ("grad_norm", "gradient norm"),
    ("otb/energy/token_mean", "energy of a token, mean of $w_t$"),
    ("turns", "turns of a completion"),
    ("tools/failure_frequency", "share of calls that fail"),
)


def plot_training(log_history: list[dict], path: Path, title: str) -> None:
    """Reward, gradient norm, energy and turns over the steps of a run, each with its running mean over a tenth of it."""
    panels = [(key, label) for key, label in PANELS if any(entry.get(key) is not None for entry in log_history)]
    figure = Figure(figsize=(4.2 * len(panels), 3.4), layout="constrained")
    axes = figure.subplots(1, len(panels), squeeze=False)
    for axis, (key, label) in zip(axes[0], panels, strict=True):
        points = [(entry["step"], entry[key]) for entry in log_history if entry.get(key) is not None]
        steps, values = zip(*points, strict=True)
        axis.plot(steps, values, color="tab:blue", alpha=0.35, linewidth=1)
        width = max(1, len(values) // 10)
        means = [sum(values[max(0, i - width + 1) : i + 1]) / min(i + 1, width) for i in range(len(values))]
        axis.plot(steps, means, color="tab:blue", linewidth=2)
        axis.set_xlabel("step")
        axis.set_title(label, fontsize=10)
        axis.set_ylim(bottom=0)
        axis.grid(alpha=0.3)
    figure.suptitle(title, fontsize=11)
    figure.savefig(path, dpi=120)


def plot_group(
    tokens: list[list[str]],
    by_policy: list[list[bool]],
    panels: dict[str, list[list[float]]],
    labels: list[str],
) -> Figure:
    """
    One group of completions, token by token: each panel colours the policy's tokens by a value and leaves tool output grey.

    Args:
        tokens (`list[list[str]]`):
            Of each completion, as they are to be written.
        by_policy (`list[list[bool]]`):
            Whether the policy generated the token.
        panels (`dict[str, list[list[float]]]`):
            By title, a value for each token.
        labels (`list[str]`):
            Of each completion, to stand at its left.
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
        shown = axis.imshow(image, cmap="viridis", aspect="auto")
        middle = (shown.norm.vmin + shown.norm.vmax) / 2
        for row, characters in enumerate(tokens):
            for column, character in enumerate(characters):
                dark = by_policy[row][column] and image[row][column] < middle
                axis.text(column, row, character, ha="center", va="center", fontsize=8, color="white" if dark else "black")  # fmt: skip
        axis.set_yticks(range(len(labels)), labels)
        axis.set(title=title, xlabel="token of the completion (grey: tool output)")
        figure.colorbar(shown, ax=axis, pad=0.01)
    return figure
