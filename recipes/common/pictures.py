"""The picture of a training run."""

from pathlib import Path

import matplotlib


matplotlib.use("Agg")
import matplotlib.pyplot as plt


PANELS = (
    ("reward", "reward (share of right answers)"),
    ("grad_norm", "gradient norm"),
    ("otb/energy/token_mean", "energy of a token, mean of $w_t$"),
)


def plot_training(log_history: list[dict], path: Path, title: str) -> None:
    """Reward, gradient norm and energy over the steps of a run, each with its running mean over a tenth of it."""
    figure, axes = plt.subplots(1, len(PANELS), figsize=(4.2 * len(PANELS), 3.4), layout="constrained")
    for axis, (key, label) in zip(axes, PANELS, strict=True):
        points = [(entry["step"], entry[key]) for entry in log_history if entry.get(key) is not None]
        steps, values = zip(*points, strict=True) if points else ((), ())
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
    plt.close(figure)
