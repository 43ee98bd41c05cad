"""The result of a comparison of baselines: a verdict, a table, a picture."""

import json
import math
from dataclasses import asdict, dataclass, field
from io import BytesIO
from pathlib import Path
from typing import Any

from .efficiency import Comparison, Estimate, compare, control, moments_of, percent


MIN_PROMPTS = 30  # prompts below which the bootstrap's intervals are too narrow
MIN_GAIN = 0.005  # the smallest share of more prompts that is called a gain
SETTLED_BELOW = 0.15  # if the best is better by at most this share, measuring more prompts is not recommended
PLOT_LIMIT = 3.0  # the share of more prompts at which intervals are cut off in the picture


@dataclass
class BaselineReport:
    """
    Baselines compared with the group mean (`rloo_pooled` for N = 1), from [`~trl_otb.compare_baselines`].

    Its text is the verdict and a table: how many more prompts per step the group mean would need to be as efficient,
    with a 95 % interval by bootstrap over prompts. Then what other N are worth with equally many completions per step.

    """

    comparisons: list[Comparison]  # every baseline at every group size
    group_size: int  # the run's N, which the verdict is for
    group_sizes: list[int]  # all values of N
    num_prompts: int  # that were measured
    completions_per_prompt: int
    prompts_per_batch: int  # per step that the figures are for
    prompts_varying: int  # whose completions have different returns
    mean_reward: float
    mean_length: float  # in generated tokens
    subject: str  # the model, for titles
    # Metrics of the baselines that learned here, as `value/explained`: means over the last half of their batches
    learned: dict[str, float] = field(default_factory=dict)

    @classmethod
    def of(
        cls, prompts: list[dict[Any, Any]], unbiased: dict[str, bool], scores_have_mean_zero: bool, **settings: Any
    ) -> "BaselineReport":
        """
        The report of measured prompts; a `ValueError` if no prompt's return varied. `unbiased` says of baselines that
        are whether this is certain for these rewards.
        """
        varying, number = sum(prompt["varies"] for prompt in prompts), len(prompts)
        if varying == 0:
            raise ValueError(
                f"No prompt's reward varied: it is {prompts[0]['reward']:.2f} for every completion of the first one. "
                "Check the reward, the prompts and the model: no baseline can be measured."
            )
        moments = moments_of(prompts, {name for name, certain in unbiased.items() if certain}, scores_have_mean_zero)
        rows = compare(moments, settings["prompts_per_batch"], settings["group_size"])
        for row in rows:
            row.unbiased = None if row.name in unbiased and not row.unbiased else row.unbiased
        return cls(
            comparisons=rows,
            num_prompts=number,
            prompts_varying=varying,
            mean_reward=sum(prompt["reward"] for prompt in prompts) / number,
            mean_length=sum(prompt["length"] for prompt in prompts) / number,
            **settings,
        )

    def at(self, group_size: int | None = None) -> list[Comparison]:
        """The comparisons at one group size, by default the run's own: the best first, those lost in noise last."""
        n = self.group_size if group_size is None else group_size
        rows = [row for row in self.comparisons if row.n == n]
        return sorted(rows, key=lambda row: (row.more_prompts.lost, -row.more_prompts.value))

    @property
    def best(self) -> Comparison | None:
        """The baseline to set at the run's own N; `None` if none is surely better than the control."""
        # Without `none`, whose noise grows as successes become common
        rows = [row for row in self.at() if row.name not in ("none", self.control)]
        better = [row for row in rows if row.more_prompts.low > MIN_GAIN]
        return next((row for row in better if row.unbiased is not False), better[0] if better else None)

    @property
    def control(self) -> str:
        """What baselines are compared with at the run's N."""
        return control(self.group_size)

    @property
    def verdict(self) -> str:
        """An instruction for the run's own group size, and a sentence on what is not known."""
        rows, best = [row for row in self.at() if row.name != self.control], self.best
        known = [row for row in rows if not row.more_prompts.lost]
        if best is None:
            return f"Keep {self.control}.\n{self._why_none(known)}"
        worth = best.more_prompts
        interval = f"{percent(worth.low)}–{percent(worth.high)}"
        instruction = f"Set baseline={best.name!r}: worth {percent(worth.value)} % more prompts (95 %: {interval})."
        return f"{instruction}\n{self._caveats(rows, known, best)}"

    def _why_none(self, known: list[Comparison]) -> str:
        if not known:
            return "No baseline can be compared: the signal is lost in noise. Measure more prompts or completions."
        first = next((row for row in known if row.name != "none"), known[0])
        gain = first.more_prompts
        interval = f"{percent(gain.value)} % ({percent(gain.low)} to {percent(gain.high)})"
        settled = gain.value <= 0 or gain.high < SETTLED_BELOW
        return (
            f"No baseline is significantly better: baseline={first.name!r} is worth {interval} more prompts. Measuring "
            f"more prompts {'is unlikely to change that' if settled else 'may decide it'}."
        )

    def _caveats(self, rows: list[Comparison], known: list[Comparison], best: Comparison) -> str:
        """What the instruction leaves open, the most important first."""
        caveats = []
        if best.unbiased is None:
            caveats.append(
                "it may be biased, by sampling that is cut off, or by rewards of turns that depend on later tokens "
                "(then set `credit_whole_return=True`); its bias is part of what is measured"
            )
        elif not best.unbiased:
            caveats.append(
                "it is biased: improbable successes teach less under it, which is not seen here if they are rare"
            )
        for row in known[: known.index(best)]:
            caution = {True: "that is not significant", None: "it may be biased", False: "it is biased"}[row.unbiased]
            caution = "it gets worse as successes become common" if row.name == "none" else caution
            caveats.append(f"baseline={row.name!r} measures {percent(row.more_prompts.value)} %, but {caution}")
        if lost := len(rows) - len(known):
            caveats.append(f"{lost} of {len(rows)} baselines cannot be compared, as the signal is lost in noise")
        if self.num_prompts < MIN_PROMPTS:
            caveats.append(f"with {self.num_prompts} prompts, intervals are too narrow")
        caveats.append("this may change during training, so measure again later")
        return f"Caveats: {'; '.join(caveats)}."

    @property
    def spending(self) -> str:
        """What a smaller N is worth for as many completions, under the best baseline known at several N, or empty."""
        completions = self.group_size * self.prompts_per_batch
        for name in [*([self.best.name] if self.best else []), *(row.name for row in self.at() if row.name != "none")]:
            rows = {row.n: row.more_completions for row in self.comparisons if row.name == name}
            known = {
                n: rows[n]
                for n in sorted(rows)
                if n <= self.group_size and completions % n == 0 and completions > n and not rows[n].lost
            }
            if len(known) > 1 and self.group_size in known:
                break
        else:
            return ""
        lines = [f"{name}, {completions} completions per step  more completions, % (95 %)"]
        lines += [f"N = {n:<4} {completions // n:>5} prompts  {of}" for n, of in known.items()]
        n, most = max(known.items(), key=lambda item: item[1].value)
        if most.low > max(known[self.group_size].high, 0.0):
            lines.append(f"Spend them on more prompts: baseline={name!r}, num_generations={n}.")
        return "\n".join(lines)

    def to_json(self) -> dict[str, Any]:
        """The report as plain data; numbers lost in noise are `None`."""
        return json.loads(json.dumps(asdict(self)), parse_constant=lambda constant: None)

    def plot(self, path: str | Path | None = None) -> Any:
        """A `matplotlib` figure, a panel per group size: how many more prompts the control needs. Saved to `path`."""
        sizes, names = self.group_sizes, [row.name for row in [*self.at(), *self.comparisons]]
        order = [*reversed(dict.fromkeys(names))]
        figure = new_figure(figsize=(4.2 * len(sizes) + 1.5, 0.36 * len(order) + 1.6), layout="constrained")
        axes = figure.subplots(1, len(sizes), squeeze=False, sharey=True)[0]
        for axis, n in zip(axes, sizes, strict=True):
            rows = {row.name: row for row in self.at(n)}
            for place, name in enumerate(order):
                if name in rows:
                    _draw(axis, place, rows[name].more_prompts, is_control=name == control(n))
            axis.axvline(0, color="0.4", linewidth=0.8, linestyle=":")
            axis.set_yticks(range(len(order)), order)
            axis.set_ylim(-0.6, len(order) - 0.2)
            axis.set(xlabel=f"more prompts that {control(n)} needs, %", title=f"N = {n}")
            axis.grid(axis="x", alpha=0.3)
        figure.suptitle(
            f"{self.subject}\nblue: significantly better than the control, red: worse, grey: neither\n"
            f"lines: 95 % intervals, {self.num_prompts} prompts",
            fontsize=10,
        )
        if path is not None:
            figure.savefig(path, dpi=120)
        return figure

    @property
    def summary(self) -> str:
        """A sentence about what was measured."""
        text = (
            f"{self.num_prompts} prompts, {self.completions_per_prompt} completions each, {self.mean_length:.0f} "
            f"tokens on average; mean reward {self.mean_reward:.2f}; rewards vary on {self.prompts_varying} of the "
            f"prompts. Steps of {self.prompts_per_batch} prompts."
        )
        explained = self.learned.get("value/explained", math.nan)
        known = f" While it learned here, `otb/value/explained` was {explained:.2f}."
        return text if math.isnan(explained) else text + known

    def __repr__(self) -> str:
        rows = self.at()
        width = max(len(row.name) for row in rows)
        lines = [self.verdict, "", f"{'N = ' + str(self.group_size):<{width}}  more prompts, % (95 %)"]
        for row in rows:
            if not row.more_prompts.lost:
                lines.append(f"{row.name:<{width}}  {row.more_prompts if row.name != self.control else 0}")
        if lost := [row.name for row in rows if row.more_prompts.lost]:
            lines.append(f"lost in noise: {', '.join(lost)}")
        return "\n".join([*lines, *["", self.spending] * bool(self.spending), "", self.summary])


def new_figure(**options: Any) -> Any:
    """A matplotlib figure that notebooks display, without pyplot, whose import would choose a backend."""
    from matplotlib.figure import Figure

    class ShownFigure(Figure):
        def _repr_png_(self) -> bytes:
            picture = BytesIO()
            self.savefig(picture, format="png", dpi=80)
            return picture.getvalue()

    return ShownFigure(**options)


def _draw(axis: Any, place: int, gain: Estimate, is_control: bool) -> None:
    """One row of a panel: the estimate and its interval."""
    if is_control:
        axis.plot(0, place, "o", color="0.4")
        return
    if gain.lost:
        axis.text(0.02, place, "lost in noise", color="0.5", fontsize=8, va="center")
        return
    color = "tab:blue" if gain.low > 0 else "tab:red" if gain.high < 0 else "0.6"
    known = math.isfinite(gain.low) and math.isfinite(gain.high)
    ends = [100 * max(gain.low, -1), 100 * min(gain.high, PLOT_LIMIT)]
    axis.plot(ends, [place, place], color=color, linewidth=2, alpha=0.5, linestyle="-" if known else ":")
    at = (100 * min(gain.value, PLOT_LIMIT), place)
    axis.plot(*at, "o", color=color)
    text = f"{100 * gain.value:+.0f}"
    axis.annotate(text, at, xytext=(0, 6), textcoords="offset points", ha="center", fontsize=8)
