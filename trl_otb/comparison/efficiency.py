"""Variance and efficiency of gradient estimators from moments of their gradients, prompt by prompt. Pure torch.

A step draws prompts, and completions for each of them. Let ĝ_p be an unbiased estimate of the gradient g_p of prompt p
from one group, and ḡ = E g_p the gradient that training follows. The sum over a step's prompts then has, per prompt,
the variance

    V = E‖ĝ_p‖² − ‖ḡ‖²        = E‖ĝ_p − g_p‖² + E‖g_p − ḡ‖²,

the noise on the same prompts plus the differences between prompts, which no baseline removes. The variance of a step's
mean is V over its number of prompts. So a baseline with half of another's V needs half as many prompts per step.

E‖ĝ_p‖² is a mean over prompts, and ‖ḡ‖² the mean product ⟨g_p, g_q⟩ over pairs of different prompts, whose errors are
independent: both are unbiased with any number of prompts. Intervals are by bootstrap over prompts, with the tails of
Student's t.

An estimator ĝ of the true gradient g of a batch has the efficiency

    e = ⟨Eĝ, g⟩² / (‖g‖² E‖ĝ‖²),

the share of the expected squared step that points along g: 1 for g itself, less with noise or bias, at any scale. On a
smooth objective it bounds the gain of one step at the best learning rate. Gradients of all prompts are summed, as in
training.
"""

import math
from dataclasses import dataclass, field
from statistics import NormalDist
from typing import Any

import torch
from torch import Tensor


DRAWS = 2000  # bootstrap samples of prompts
MIN_GAIN = 0.005  # the smallest share of more prompts that is called a gain
UNKNOWN = 10.0  # the share of more prompts beyond which a number says nothing


def control(n: int) -> str:
    """What every baseline is compared with at group size `n`; one completion has no group."""
    return "group_mean" if n > 1 else "rloo_pooled"


@dataclass
class Moments:
    """
    Unbiased estimates of the moments of one estimator at one group size, for P prompts. If Eĝ = c g is known, as for
    every unbiased estimator, noise can be measured even if the signal is lost in it.
    """

    square: Tensor  # (P,) E‖ĝ_p‖² of a group's gradient
    signal: Tensor  # (P, P) ⟨Eĝ_p, Eĝ_q⟩
    with_truth: Tensor  # (P, P) ⟨Eĝ_p, g_q⟩
    truth: Tensor  # (P, P) ⟨g_p, g_q⟩
    scale: float | None = None  # c

    def of_batch(self, counts: Tensor, size: int | None = None) -> dict[str, Tensor]:
        """
        Figures for a batch of `size` similar prompts, by default as many as these, where prompt p was drawn
        `counts[..., p]` times. A prompt drawn twice represents two similar prompts: products of different prompts are
        averaged over pairs that differ.

        Returns:
            `dict`, each `counts.shape[:-1]`: `signal`, ‖g‖², at least 0; `noise` of ĝ scaled to the length of g;
            `missed`, noise plus the effect of bias, so that the efficiency is signal / (signal + missed); `cosine` of
            Eĝ and g; `step`, the variance V of one prompt's ĝ in a step whose prompts are drawn, plus `size` times the
            square of the mean's bias, with ĝ scaled as for `missed`; `variance`, the same if the scale is known, else
            NaN. NaN if the estimate of a square is not positive; `noise`, `missed` and `step` never, if the scale is
            known.
        """
        counts = counts.double()
        prompts = counts.sum(dim=-1)
        pairs = prompts.square() - counts.square().sum(dim=-1)
        of = prompts if size is None else torch.full_like(prompts, size)
        of_size = counts * (of / prompts).unsqueeze(-1)

        def between(matrix: Tensor) -> Tensor:
            """The mean product of two prompts that differ."""
            whole = torch.einsum("...p,pq,...q->...", counts, matrix, counts)
            return (whole - counts.square() @ matrix.diagonal()) / pairs

        def total(matrix: Tensor) -> Tensor:
            return of_size @ matrix.diagonal() + of * (of - 1) * between(matrix)

        signal, with_truth, truth = total(self.signal), total(self.with_truth), total(self.truth)
        noise_to_signal = of_size @ (self.square - self.signal.diagonal()) / signal
        resolved = (signal > 0) & (truth > 0) & (noise_to_signal > 0)
        cosine = with_truth / (signal * truth).sqrt()
        if self.scale is None:
            efficiency = with_truth.square() / (truth * signal * (1 + noise_to_signal))
            noise = (truth * noise_to_signal).where(resolved, torch.nan)
            missed = (truth * (1 / efficiency - 1)).where(resolved, torch.nan)
            to_truth = truth / with_truth  # what ĝ is multiplied with, so that its part along g is g
            mean_square, of_means = to_truth.square() * between(self.signal), between(self.truth)
            bias = mean_square - 2 * to_truth * between(self.with_truth) + of_means
            step = to_truth.square() * (counts @ self.square) / prompts - mean_square + of * bias
            step = step.where(resolved & (with_truth > 0), torch.nan)
            variance = torch.full_like(truth, torch.nan)
        else:
            noise = missed = of_size @ (self.square / self.scale**2 - self.truth.diagonal())
            step = variance = counts @ self.square / prompts / self.scale**2 - between(self.truth)
        figures = {"signal": truth.clamp(min=0), "noise": noise, "missed": missed, "step": step, "variance": variance}
        return figures | {"cosine": cosine.where(resolved, torch.nan)}


def bootstrap(prompts: int, draws: int = DRAWS, seed: int = 0) -> Tensor:
    """`(1 + draws, P)` how often each prompt is drawn; the first row is the original sample."""
    drawn = torch.randint(prompts, (draws, prompts), generator=torch.Generator().manual_seed(seed))
    counts = torch.zeros(draws, prompts).scatter_add_(1, drawn, torch.ones(draws, prompts))
    return torch.cat([torch.ones(1, prompts), counts])


def interval_tail(prompts: int, outside: float) -> float:
    """
    The share of bootstrap draws beyond each end of an interval that is to miss with probability `outside`: less than
    half of it, since few prompts vary less than many, and as Student's t is wider than the normal distribution
    (Hesterberg, 2015, arXiv 1411.5279, section 5.3).
    """
    degrees, z = prompts - 1, NormalDist().inv_cdf(1 - outside / 2)
    t = z + (z**3 + z) / (4 * degrees) + (5 * z**5 + 16 * z**3 + 3 * z) / (96 * degrees**2)
    return NormalDist().cdf(-t * math.sqrt(prompts / degrees))


@dataclass
class Estimate:
    """A number with an interval, of 95 % if not said otherwise, by bootstrap over prompts."""

    value: float
    low: float
    high: float

    @classmethod
    def of(cls, values: Tensor, tail: float = 0.025) -> "Estimate":
        """From the values of the sample (first) and of the bootstrap; NaN values count as both ends."""
        drawn = values[1:].double()
        lows, highs = (torch.where(drawn.isnan(), end, drawn) for end in (-torch.inf, torch.inf))
        low = lows.quantile(tail, interpolation="lower").item()
        high = highs.quantile(1 - tail, interpolation="higher").item()
        return cls(values[0].item(), low, high)

    @property
    def lost(self) -> bool:
        """Whether the value is lost in noise: it is unknown, or may be negative and beyond `UNKNOWN`."""
        return math.isnan(self.value) or (self.low < 0 and self.high > UNKNOWN)

    def __str__(self) -> str:
        """In per cent, `"81 (77 to 85)"`."""
        return f"{percent(self.value)} ({self.interval})"

    @property
    def interval(self) -> str:
        return f"{percent(self.low)} to {percent(self.high)}"


def percent(share: float) -> str:
    """`?` if it is beyond `UNKNOWN`."""
    return str(round(100 * share)) if abs(share) <= UNKNOWN else "?"


@dataclass
class Comparison:
    """
    A baseline compared with the group mean at the same group size (for N = 1, with `rloo_pooled`).

    Estimates but `cosine` are relative to that control. `more_prompts` is 0.13 if the control needs 13 % more prompts
    per step for the same variance, where the prompts of a step are drawn, too. `noise_over_group_mean` leaves the
    differences between prompts out: it is the noise on the same prompts.
    """

    name: str
    n: int  # group size
    unbiased: bool | None  # up to a factor; `None` if under conditions that are not certain here. Else bias is measured
    more_prompts: Estimate  # of a step whose prompts are drawn
    # Than the control at the run's own N, if a step's completions stay as many; NaN unless it is certainly unbiased
    more_completions: Estimate
    over_group_mean: Estimate  # the ratio of the efficiencies of a step
    noise_over_group_mean: Estimate  # of noise to signal, on the same prompts
    cosine: Estimate  # of the expected gradient to the true one
    # At the run's own N, by name: the same beside another baseline than the control, on the same prompts, with
    # intervals that hold for all of them at once
    more_than: dict[str, Estimate] = field(default_factory=dict)

    @property
    def surely_better_than_control(self) -> bool:
        return not self.more_prompts.lost and self.more_prompts.low > MIN_GAIN

    def surely_better_than(self, other: "Comparison") -> bool:
        return other.name in self.more_than and self.more_than[other.name].low > MIN_GAIN


def compare(moments: dict[tuple[str, int], Moments], prompts_per_batch: int, group_size: int) -> list[Comparison]:
    """
    Compare every baseline of `moments`, by name and N, with the control at each group size, for steps of
    `prompts_per_batch` prompts, and, for as many completions, with the control at the run's own N, `group_size`.
    """
    squares = moments[control(group_size), group_size].square
    counts = bootstrap(len(squares))
    # Samples of a single prompt, or of prompts whose rewards do not vary, are useless
    counts = counts[((counts > 0).sum(dim=1) > 1) & (counts.double() @ squares > 0)]
    figures = {key: m.of_batch(counts, prompts_per_batch) for key, m in moments.items()}
    of_run, rows = group_size * figures[control(group_size), group_size]["variance"], []
    rivals = {name: of["step"] for (name, n), of in figures.items() if n == group_size}
    tail, of_all = (interval_tail(len(squares), outside) for outside in (0.05, 0.05 / max(len(rivals) - 1, 1)))
    for (name, n), of in figures.items():
        of_control, signal = figures[control(n), n], of["signal"]
        others = {other: step for other, step in rivals.items() if n == group_size and other != name}
        rows.append(
            Comparison(
                name=name,
                n=n,
                unbiased=moments[name, n].scale is not None,
                more_prompts=Estimate.of(_more(of_control["step"], of["step"]), tail),
                more_completions=Estimate.of(of_run / (n * of["variance"]) - 1, tail),
                # Efficiency is ‖g‖² / (‖g‖² + what is missed), and where the signal is small it all but cancels
                over_group_mean=Estimate.of((signal + of_control["missed"]) / (signal + of["missed"]), tail),
                noise_over_group_mean=Estimate.of(of["noise"] / of_control["noise"], tail),
                cosine=Estimate.of(of["cosine"], tail),
                more_than={other: Estimate.of(_more(step, of["step"]), of_all) for other, step in others.items()},
            )
        )
    return rows


def _more(variance: Tensor, less: Tensor) -> Tensor:
    """The share of more prompts with which `variance` per prompt becomes `less`; NaN where an estimate is negative."""
    return (variance / less - 1).where((variance > 0) & (less > 0), torch.nan)


def moments_of(
    prompts: list[dict[Any, Any]], unbiased: set[str], mean_zero: bool = True
) -> dict[tuple[str, int], Moments]:
    """
    The moments of every baseline and group size, from results of [`~trl_otb.comparison.moments.prompt_moments`];
    products never share completions. `unbiased` names baselines whose expected gradient is the true one, if
    `mean_zero`: completions are untruncated samples of the differentiated policy, so that scores have mean 0.
    """
    truth = torch.stack([prompt["truth"] for prompt in prompts]).double()  # (P, 2, k)
    moments = {}
    for name, n in (key for key in prompts[0] if isinstance(key, tuple)):
        mean = torch.stack([prompt[name, n]["mean"] for prompt in prompts]).double()
        square = torch.tensor([prompt[name, n]["square"] for prompt in prompts], dtype=torch.float64)
        products = _products(mean, mean), _products(mean, truth), _products(truth, truth)
        scale = (n - 1) / n if name == "group_mean" else 1.0 if name in unbiased else None
        moments[name, n] = Moments(square, *products, scale if mean_zero else None)
    return moments


def _products(a: Tensor, b: Tensor) -> Tensor:
    """Two `(P, 2, k)` -> symmetric `(P, P)` products, which use different halves for the same prompt."""
    between = a.mean(1) @ b.mean(1).T
    within = ((a[:, 0] * b[:, 1]).sum(1) + (a[:, 1] * b[:, 0]).sum(1)) / 2
    between.diagonal().copy_(within)
    return (between + between.T) / 2
