"""The result of a comparison of baselines: a verdict, a table, a picture."""

import html
import math
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from ..optional import require
from .efficiency import Comparison, Estimate, compare, moments_of
from .estimators import CONTROL, Estimator
from .moments import batches_of, with_estimators_across_prompts
from .storage import load


FEW = 30  # prompts below which the bootstrap's intervals are too narrow
LEAST = 0.005  # the smallest share of more prompts that is called a gain
CLOSE = 0.15  # if the best is better by at most this share, measuring more prompts is not recommended


@dataclass
class BaselineReport:
    """
    Baselines compared with the group mean, from [`~trl_otb.compare_baselines`].

    Its text (HTML in a notebook) is the verdict and a table: how many more prompts per step the group mean would need
    to be as efficient, with a 95 % interval by bootstrap over prompts.

    Args:
        comparisons (`list[Comparison]`):
            Every baseline at every group size.
        group_size (`int`):
            The run's N, which the verdict is for.
        group_sizes (`list[int]`):
            All values of N.
        num_prompts, completions_per_prompt, prompts_per_batch (`int`):
            Number of measured prompts, completions of each, and prompts per step that the figures are for.
        prompts_pooled (`int`):
            Number of prompts that baselines across prompts compared together, about `prompts_per_batch`.
        prompts_varying (`int`):
            Number of prompts whose completions have different returns.
        mean_reward, mean_length (`float`):
            Means over all completions, in units of the reward and in generated tokens.
        subject (`str`):
            The model, for titles.
    """

    comparisons: list[Comparison]
    group_size: int
    group_sizes: list[int]
    num_prompts: int
    completions_per_prompt: int
    prompts_per_batch: int
    prompts_pooled: int
    prompts_varying: int
    mean_reward: float
    mean_length: float
    subject: str

    @classmethod
    def load(cls, output_dir: str | Path, prompts_per_batch: int | None = None) -> "BaselineReport":
        """
        The report of a folder that [`~trl_otb.compare_baselines`] wrote, without measuring.

        Args:
            output_dir (`str` or `Path`):
                The folder.
            prompts_per_batch (`int`, *optional*):
                Prompts per step, by default as measured. With rewards per turn or token, baselines on top of another
                stay pooled as measured.

        Raises:
            ValueError: The folder holds no measurement, or fewer than two prompts.
        """
        found = load(Path(output_dir))
        if found is None or len(found[1]) < 2:
            raise ValueError(f"Nothing is saved under {output_dir} yet: measure first.")
        return cls.of(*found, prompts_per_batch)

    @classmethod
    def of(
        cls, settings: dict[str, Any], prompts: list[dict[Any, Any]], prompts_per_batch: int | None = None
    ) -> "BaselineReport":
        """
        The report from the `settings` and `prompts` of a [`~trl_otb.comparison.storage.Storage`].

        Raises:
            ValueError: No prompt's return varied.
        """
        batch = settings["prompts_per_batch"] if prompts_per_batch is None else prompts_per_batch
        if batch < 3:
            raise ValueError(f"`prompts_per_batch` is {batch}: give 3 or more.")
        varying = sum(prompt["varies"] for prompt in prompts)
        if varying == 0:
            raise ValueError(
                f"No prompt's reward varied: it is {prompts[0]['reward']:.2f} for every completion of the first one. "
                "Check the reward, the prompts and the model: no baseline can be measured."
            )
        estimators = {of["name"]: Estimator(**of) for of in settings["estimators"]}
        sizes = sorted(settings["group_sizes"])
        # With rewards per turn or token, those on top of another are measured with each prompt
        with_each = [{name for name, *_ in filter(lambda key: isinstance(key, tuple), prompt)} for prompt in prompts]
        if any(names != with_each[0] for names in with_each):
            raise ValueError("Rewards per turn or token have come or gone since the first prompt: measure anew.")
        across = [estimators[name] for name in settings["across_prompts"] if name not in with_each[0]]
        if across:
            prompts = with_estimators_across_prompts(prompts, across, sizes, batch)
        moments = moments_of(prompts, estimators, settings["scores_have_mean_zero"])
        comparisons = compare(moments, estimators, batch)
        return cls(
            comparisons=[row for row in comparisons if row.n in sizes or row.name == CONTROL],
            group_size=settings["group_size"],
            group_sizes=sizes,
            num_prompts=len(prompts),
            completions_per_prompt=settings["completions_per_prompt"],
            prompts_per_batch=batch,
            prompts_pooled=round(len(prompts) / batches_of(len(prompts), batch)),
            prompts_varying=varying,
            mean_reward=sum(prompt["reward"] for prompt in prompts) / len(prompts),
            mean_length=sum(prompt["length"] for prompt in prompts) / len(prompts),
            subject=settings["subject"],
        )

    def at(self, group_size: int | None = None) -> list[Comparison]:
        """The comparisons at one group size, by default the run's own: the best first, those lost in noise last."""
        n = self.group_size if group_size is None else group_size
        rows = [row for row in self.comparisons if row.n == n]
        return sorted(rows, key=lambda row: (row.more_prompts.lost, -row.more_prompts.value))

    @property
    def verdict(self) -> str:
        """The verdict at the run's own group size; see [`verdict_at`]."""
        return self.verdict_at(self.group_size)

    def verdict_at(self, group_size: int) -> str:
        """An instruction, and a sentence on what is not known."""
        rows = [row for row in self.at(group_size) if row.name != CONTROL]
        known = [row for row in rows if not row.more_prompts.lost]
        # Without `none`, whose noise grows as successes become common
        better = [row for row in known if row.more_prompts.low > LEAST and row.baseline != "none"]
        best = next((row for row in better if row.unbiased), better[0] if better else None)
        if best is None:
            instruction = f"Keep {CONTROL}."
        else:
            worth = best.more_prompts
            interval = f"{_percent(worth.low)}–{_percent(worth.high)}"
            instruction = f"Set {best.settings}: worth {_percent(worth.value)} % more prompts (95 %: {interval})."
        return f"{instruction}\n{self._unknown(rows, known, best)}"

    def _unknown(self, rows: list[Comparison], known: list[Comparison], best: Comparison | None) -> str:
        """The caveats of the instruction, the most important first."""
        lost = len(rows) - len(known)
        if not known:
            return "No baseline can be compared: the signal is lost in noise. Measure more prompts or completions."
        if best is None:
            first = next((row for row in known if row.baseline != "none"), known[0])
            gain = first.more_prompts
            interval = f"{_percent(gain.value)} % ({_percent(gain.low)} to {_percent(gain.high)})"
            said = f"No baseline is significantly better: {first.settings} is worth {interval} more prompts"
            if gain.value <= 0 or gain.high < CLOSE:
                return f"{said}, and measuring more is unlikely to change that."
            return f"{said}. Measuring {self._more_prompts_to_measure(gain)} more prompts may decide it."
        unknown = []
        if not best.unbiased:
            unknown.append(
                "it is biased: improbable successes teach less under it, which this measurement does not show if they "
                "are rare"
            )
        for row in known[: known.index(best)]:
            rare, common = "is biased, which hurts if successes are rare", "gets worse as successes become common"
            caution = common if row.baseline == "none" else rare
            unknown.append(f"{row.settings} measures {_percent(row.more_prompts.value)} %, but {caution}")
        if lost:
            unknown.append(f"{lost} of {len(rows)} baselines cannot be compared, as the signal is lost in noise")
        if self.num_prompts < FEW:
            unknown.append(f"with {self.num_prompts} prompts, intervals are too narrow")
        unknown.append("this may change during training, so measure again later")
        return f"Caveats: {'; '.join(unknown)}."

    def _more_prompts_to_measure(self, gain: Estimate) -> int:
        """
        The number of further prompts after which the interval may exclude 0: its width falls with the square root of
        their number. The width is itself uncertain, so the answer is at least half of the present number.
        """
        needed = (
            self.num_prompts * ((gain.value - gain.low) / gain.value) ** 2 if math.isfinite(gain.low) else math.inf
        )
        return math.ceil(min(max(needed - self.num_prompts, self.num_prompts / 2), 100 * self.num_prompts))

    def to_pandas(self, lost: bool = False) -> Any:
        """
        A `pandas.DataFrame` with a row per baseline and group size, the best first; with `lost`, including those lost
        in noise. Each estimate is followed by the ends of its 95 % interval.
        """
        pandas = require("pandas", "A table")
        records = []
        for n in self.group_sizes:
            for row in self.at(n):
                if row.more_prompts.lost and not lost:
                    continue
                record: dict[str, Any] = {"N": n, "baseline": row.baseline, "leave_one_out": row.leave_one_out}
                record["unbiased"] = row.unbiased
                for name, estimate in _estimates(row).items():
                    record |= {name: estimate.value, f"{name}_low": estimate.low, f"{name}_high": estimate.high}
                records.append(record)
        return pandas.DataFrame.from_records(records)

    def to_json(self) -> dict[str, Any]:
        """The report as plain data; numbers lost in noise are `None`."""

        def plain(value: Any) -> Any:
            if isinstance(value, dict):
                return {key: plain(item) for key, item in value.items()}
            if isinstance(value, list):
                return [plain(item) for item in value]
            return None if isinstance(value, float) and not math.isfinite(value) else value

        return plain(asdict(self))

    def plot(self, path: str | Path | None = None) -> Any:
        """
        A `matplotlib` figure with one panel per group size: how many more prompts the group mean would need. Saves it
        to `path`, if given.
        """
        from .picture import draw

        figure = draw(self)
        if path is not None:
            figure.savefig(path, dpi=120)
        return figure

    def to_markdown(self) -> str:
        """The verdict, and tables with all figures."""
        lines = [f"# {self.subject}", "", self.verdict.replace("\n", "\n\n"), "", self.summary, ""]
        for n in self.group_sizes:
            lines += [
                f"N = {n}:",
                "",
                "| baseline | more prompts, % | efficiency | over group_mean's | noise over its | cosine | length | "
                "worth group_mean at N = |",
                "|---" * 8 + "|",
            ]
            for row in self.at(n):
                cells = [_percent_text(row), row.efficiency.text(3), row.over_group_mean.text()]
                cells += [row.noise_over_group_mean.text(), row.cosine.text(3), row.length.text(), row.worth.text(1)]
                lines.append(f"| `{row.name}` | " + " | ".join(cells) + " |")
            lines.append("")
        lines += [
            "More prompts: how many more per step the group mean needs to be as efficient. Efficiency: the share of a "
            f"step on {self.prompts_per_batch} such prompts that points along the true gradient, 1 without noise and "
            "bias (above 1, like a cosine above 1, is noise). Length: of the expected gradient, over the true one's; "
            "where it is short, rare successes teach little, which efficiency does not see. In brackets: 95 % "
            f"intervals by bootstrap over prompts (n = {self.num_prompts}). ?: the signal is lost in noise.",
            "",
        ]
        return "\n".join(lines)

    @property
    def summary(self) -> str:
        """A sentence about what was measured."""
        return (
            f"{self.num_prompts} prompts, {self.completions_per_prompt} completions each, {self.mean_length:.0f} "
            f"tokens on average; mean reward {self.mean_reward:.2f}; rewards vary on {self.prompts_varying} of the "
            f"prompts. Steps of {self.prompts_per_batch} prompts; baselines that pool prompts saw "
            f"{self.prompts_pooled} together."
        )

    def __repr__(self) -> str:
        rows = self.at()
        known = [row for row in rows if not row.more_prompts.lost]
        width = max(len(row.name) for row in rows)
        lines = [self.verdict, "", f"{'N = ' + str(self.group_size):<{width}}  more prompts, % (95 %)"]
        lines += [f"{row.name:<{width}}  {_percent_text(row)}" for row in known]
        if len(known) < len(rows):
            lines.append(f"lost in noise: {', '.join(row.name for row in rows if row.more_prompts.lost)}")
        return "\n".join([*lines, "", self.summary])

    def _repr_html_(self) -> str:
        rows = self.at()
        known = "".join(
            f"<tr><td style='text-align:left'><code>{html.escape(row.name)}</code></td>"
            f"<td>{_percent_text(row)}</td></tr>"
            for row in rows
            if not row.more_prompts.lost
        )
        lost = ", ".join(f"<code>{html.escape(row.name)}</code>" for row in rows if row.more_prompts.lost)
        instruction, _, unknown = self.verdict.partition("\n")
        folded = f"<details><summary>lost in noise</summary>{lost}</details>" if lost else ""
        return (
            f"<p><b>{html.escape(instruction)}</b><br>{html.escape(unknown)}</p>"
            f"<table><tr><th>N = {self.group_size}</th><th>more prompts, % (95 %)</th></tr>{known}</table>{folded}"
            f"<p>{html.escape(self.summary)}</p>"
        )


def _estimates(row: Comparison) -> dict[str, Estimate]:
    return {name: value for name, value in vars(row).items() if isinstance(value, Estimate)}


def _percent(share: float) -> str:
    return f"{100 * share:.0f}" if math.isfinite(share) else "?"


def _percent_text(row: Comparison) -> str:
    return row.more_prompts.text(0, factor=100) if row.name != CONTROL else "0"
