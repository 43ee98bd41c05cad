"""The result of a comparison of baselines: a verdict, a table, a picture."""

import json
import math
from dataclasses import asdict, dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

from ..version import __version__
from .efficiency import UNKNOWN, Comparison, Estimate, compare, control, moments_of, percent
from .page import NO_LIMIT, page_of, picture_of
from .progress import WITH_PROGRESS


SETTLED_BELOW = 0.15  # if the best is better by at most this share, measuring more prompts is not recommended


def setting(name: str) -> str:
    """What to set for a row."""
    return "baseline='value', progress_funcs='rewards'" if name == WITH_PROGRESS else f"baseline={name!r}"


def listed(names: list[str]) -> str:
    return " and ".join([", ".join(names[:-1]), names[-1]] if len(names) > 1 else names)


def no_reward_varies(reward: float) -> ValueError:
    return ValueError(
        f"No prompt's reward varied: it is {reward:.2f} for every completion of the first one. Check the reward, the "
        "prompts and the model: no baseline can be measured."
    )


@dataclass
class BaselineReport:
    """
    Baselines compared with the group mean (`rloo_pooled` for N = 1), from [`~trl_otb.compare_baselines`].

    Its text is the verdict and a table: how many more prompts per step the group mean needs for as little variance,
    where the prompts of a step are drawn, too, and the noise on the same prompts, over the group mean's; with 95 %
    intervals by bootstrap over prompts. Then what other N are worth with equally many completions per step.
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
    baseline: str = ""  # the run's own
    repeated: int = 0  # different examples, if these were too few and each was measured several times
    progress_error: str = ""  # why `value` could not be measured with the rewards as progress functions

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
            raise no_reward_varies(prompts[0]["reward"])
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
        """
        The baseline to set at the run's own N; `None` if none is surely better than the control. Of those that are, it
        is the run's own, else `value`, else the first, unless another one is surely better on the same prompts.
        """
        rows = self._candidates()
        certain = {row.name: row for row in rows if row.unbiased is not False and not row.more_prompts.lost}
        sure = {name: row for name, row in certain.items() if row.surely_better_than_control}
        if not certain:  # all are biased
            return next((row for row in rows if row.surely_better_than_control), None)
        best = next((sure[name] for name in (self.baseline, "value", *sure) if name in sure), None)
        while best and (better := [row for row in sure.values() if row.surely_better_than(best)]):
            best = next((row for row in better if row.name == "value"), better[0])
        return best

    def _candidates(self) -> list[Comparison]:
        """All but the control, and `none`, whose noise depends on where rewards have their 0."""
        return [row for row in self.at() if row.name not in ("none", self.control)]

    def _alike(self, best: Comparison) -> list[Comparison]:
        """Those that cannot be told apart from `best`, and are better than the control."""
        rows = [row for row in self._candidates() if row.name != best.name]
        better = [row for row in rows if row.surely_better_than_control and row.unbiased is not False]
        return [row for row in better if not row.surely_better_than(best) and not best.surely_better_than(row)]

    @property
    def control(self) -> str:
        """What baselines are compared with at the run's N."""
        return control(self.group_size)

    @property
    def verdict(self) -> str:
        """An instruction for the run's own group size, and a sentence on what is not known."""
        rows, best = [row for row in self.at() if row.name != self.control], self.best
        known = [row for row in rows if not row.more_prompts.lost]
        own = next((row for row in known if row.name == self.baseline and row.unbiased is not False), None)
        if best is None:
            advice = f"Keep {self.control}."
            if own is not None and own.more_prompts.high < 0:
                advice = f"Set baseline={self.control!r}: {own.name!r} is surely worse."
            elif own is not None:
                advice = f"Keep baseline={own.name!r}: it cannot be told apart from {self.control}."
            return "\n".join([advice, self._why_none(known), *self._of_none(None), *self._of_progress()])
        verb, n_of_run = "Keep" if best.name == self.baseline else "Set", self.group_size
        whose = f"{self.control}, GRPO's," if self.control == "group_mean" else self.control
        more = f"{percent(best.more_prompts.value)} % more prompts per step (95 %: {best.more_prompts.interval})"
        lines = [f"{verb} {setting(best.name)}: {whose} needs {more} for as little variance."]
        if worth := self._of_other_size(best):
            n, of = worth
            lines = [
                f"{verb} {setting(best.name)}{', and set' if verb == 'Keep' else ' and'} num_generations={n}, with "
                f"{n_of_run / n:.3g} times as many prompts per step: {whose} with N = {n_of_run} needs "
                f"{percent(of.value)} % more completions (95 %: {of.interval}) for as little variance.",
                f"With N = {n_of_run} {whose} needs {more}.",
            ]
        if alike := [row.name for row in self._alike(best)]:
            lines.append(f"On these prompts {listed([best.name, *alike])} cannot be told apart.")
        if own and not own.surely_better_than_control and not best.surely_better_than(own):
            lines.append(
                f"{own.name!r}, the run's own, may be as good: {own.more_prompts} is its estimate, which is not surely "
                "above 0."
            )
        return "\n".join([*lines, *self._of_none(best), *self._of_progress(), self._caveats(rows, known, best)])

    def _of_progress(self) -> list[str]:
        """Why there is no row of `value` with progress."""
        return [f"{WITH_PROGRESS!r} could not be measured. {self.progress_error}"] * bool(self.progress_error)

    def _of_other_size(self, best: Comparison) -> tuple[int, Estimate] | None:
        """An N and what it is worth, if that is surely more than the run's own."""
        name, known = self._sizes
        n = self._better_size(known) if name == best.name else None
        return None if n is None else (n, known[n])

    def _of_none(self, best: Comparison | None) -> list[str]:
        """A sentence on `none` where it has a higher estimate than all baselines that could be set."""
        none = next((row for row in self.at() if row.name == "none" and not row.more_prompts.lost), None)
        if none is None or not none.surely_better_than_control:
            return []
        if best is not None and none.more_prompts.value < best.more_prompts.value:
            return []
        return [
            f"none, which subtracts nothing, has {none.more_prompts} here. Its number changes if a "
            "constant is added to the reward, so it is not advised."
        ]

    def _why_none(self, known: list[Comparison]) -> str:
        if not known:
            return "No baseline can be compared: the signal is lost in noise. Measure more prompts or completions."
        sure = [row.name for row in known if row.name != "none" and row.surely_better_than_control]
        biased = f" {listed(sure)} would be better here, but biased: improbable successes teach less." if sure else ""
        first = next((row for row in known if row.name not in ("none", *sure)), None)
        if first is None:
            return f"No unbiased baseline could be compared: none was measured, or the signal is lost in noise.{biased}"
        gain = first.more_prompts
        settled = gain.value <= 0 or gain.high < SETTLED_BELOW
        return (
            f"No unbiased baseline is surely better. The first is {first.name!r}, {gain} % more prompts, so the sign "
            f"is not known. Measuring more prompts {'is unlikely to change that' if settled else 'may decide it'}."
            f"{biased}"
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
        if biased := [row.name for row in known if row.unbiased is False and row.surely_better_than(best)]:
            caveats.append(f"{listed(biased)} would be better here, but biased: improbable successes teach less")
        if lost := [row.name for row in rows if row.more_prompts.lost]:
            caveats.append(f"{listed(lost)} cannot be compared, as the signal is lost in noise")
        if self.repeated:
            caveats.append(f"there are only {self.repeated} different examples, so other prompts are not represented")
        caveats.append("less noise does not tell how many tokens a run saves, and it may change during training")
        return f"Note: {'; '.join(caveats)}."

    @property
    def spending(self) -> str:
        """What a smaller N is worth for as many completions, under the best baseline known at several N, or empty."""
        name, known = self._sizes
        if not known:
            return ""
        completions = self.group_size * self.prompts_per_batch
        lines = [
            f"{name}, {completions} completions per step  more that {self.control} with N = {self.group_size} needs, %"
        ]
        lines += [f"N = {n:<4} {completions // n:>5} prompts  {of}" for n, of in known.items()]
        if (better := self._better_size(known)) is not None:
            lines.append(f"Spend them on more prompts: {setting(name)}, num_generations={better}.")
        return "\n".join(lines)

    @property
    def _sizes(self) -> tuple[str, dict[int, Estimate]]:
        """The best baseline that is known at several N up to the run's, and what each is worth; or nothing."""
        completions = self.group_size * self.prompts_per_batch
        for name in [*([self.best.name] if self.best else []), *(row.name for row in self.at() if row.name != "none")]:
            rows = {row.n: row.more_completions for row in self.comparisons if row.name == name}
            known = {
                n: rows[n]
                for n in sorted(rows)
                if n <= self.group_size and completions % n == 0 and completions > n and not rows[n].lost
            }
            if len(known) > 1 and self.group_size in known:
                return name, known
        return "", {}

    def _better_size(self, known: dict[int, Estimate]) -> int | None:
        """The N that is surely worth more than the run's own."""
        n, most = max(known.items(), key=lambda item: item[1].value, default=(0, None))
        return n if most is not None and most.low > max(known[self.group_size].high, 0.0) else None

    def to_json(self) -> dict[str, Any]:
        """The report as plain data; numbers lost in noise are `None`."""
        return json.loads(json.dumps(asdict(self)), parse_constant=lambda constant: None)

    def save(self, folder: str | Path) -> None:
        """Write `report.json` and `report.html`, a page with all tables and a picture for each N, into `folder`."""
        folder = Path(folder)
        folder.mkdir(parents=True, exist_ok=True)
        where = {name: version(name) for name in ("trl", "transformers", "torch")} | {"trl_otb": __version__}
        where["device"] = torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU"
        data = json.dumps(self.to_json() | {"measured_with": where}, indent=1)
        (folder / "report.json").write_text(data, encoding="utf-8")
        (folder / "report.html").write_text(page_of(self), encoding="utf-8")

    def _repr_svg_(self) -> str:
        """The picture of the run's own N, which notebooks show."""
        return picture_of(self)

    @property
    def summary(self) -> str:
        """A sentence about what was measured."""
        text = (
            f"{self.num_prompts} prompts, {self.completions_per_prompt} completions each, {self.mean_length:.0f} "
            f"tokens on average; mean reward {self.mean_reward:.2f}; rewards vary on {self.prompts_varying} of the "
            f"prompts. 'More prompts' is for steps of {self.prompts_per_batch} prompts, new ones in each step. "
            "Intervals are over the prompts measured."
        )
        explained = self.learned.get("value/explained", math.nan)
        known = f" While it learned here, `otb/value/explained` was {explained:.2f}."
        return text if math.isnan(explained) else text + known

    def table_of(self, n: int) -> list[tuple[str, str, str]]:
        """Of each baseline at group size `n`: its name, more prompts in per cent, and noise on the same prompts."""
        lines = []
        for row in self.at(n):
            more = (
                "0" if row.name == control(n) else "lost in noise" if row.more_prompts.lost else str(row.more_prompts)
            )
            lines.append((row.name, more, "1" if row.name == control(n) else _ratio(row.noise_over_group_mean)))
        return lines

    def __repr__(self) -> str:
        title = (f"N = {self.group_size}", "more prompts, % (95 %)", f"noise on the same prompts, x {self.control}'s")
        lines = [title, *self.table_of(self.group_size)]
        widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
        table = ["  ".join(map(str.ljust, line, widths)).rstrip() for line in lines]
        if any("?" in line for line in table):
            table.append(NO_LIMIT)
        return "\n".join([self.verdict, "", *table, *["", self.spending] * bool(self.spending), "", self.summary])


def _ratio(of: Estimate) -> str:
    """`"0.46 (0.34 to 0.56)"`; `?` where nothing is known."""
    value, low, high = (f"{x:.2f}" if abs(x) <= UNKNOWN else "?" for x in (of.value, of.low, of.high))
    return f"{value} ({low} to {high})"
