"""Efficiency of gradient estimators from moments of their gradients, prompt by prompt. Pure torch.

An estimator ĝ of the true gradient g of a batch has the efficiency

    e = ⟨Eĝ, g⟩² / (‖g‖² E‖ĝ‖²),

the share of the expected squared step that points along g: 1 for g itself, less with noise or bias, at any scale. On a
smooth objective it bounds the gain of one step at the best learning rate. Gradients of all prompts are summed, as in
training.
"""

import math
from dataclasses import dataclass
from typing import Any

import torch

from .estimators import CONTROL, Estimator


DRAWS = 2000  # bootstrap samples of prompts
LARGEST = 4096  # larger group sizes are written as "more than"


@dataclass
class Moments:
    """
    Unbiased estimates of the moments of one estimator at one group size, for P prompts.

    Args:
        square (`torch.Tensor` of shape `(P,)`):
            E‖ĝ_p‖² of a group's gradient.
        signal (`torch.Tensor` of shape `(P, P)`):
            ⟨Eĝ_p, Eĝ_q⟩.
        with_truth (`torch.Tensor` of shape `(P, P)`):
            ⟨Eĝ_p, g_q⟩.
        truth (`torch.Tensor` of shape `(P, P)`):
            ⟨g_p, g_q⟩.
        scale (`float`, *optional*):
            c, if Eĝ = c g is known, as for every unbiased estimator. Its noise, and its efficiency relative to another
            such estimator, can then be measured even if the signal is lost in noise.
    """

    square: torch.Tensor
    signal: torch.Tensor
    with_truth: torch.Tensor
    truth: torch.Tensor
    scale: float | None = None

    def of_batch(self, counts: torch.Tensor, size: int | None = None) -> dict[str, torch.Tensor]:
        """
        Figures for a batch of `size` similar prompts, by default as many as these, where prompt p was drawn
        `counts[..., p]` times. Noise relative to signal falls with the size of the batch.

        A prompt drawn twice represents two similar prompts, not the same one: products of different prompts are
        averaged over pairs that differ.

        Returns:
            `dict`: `signal`, ‖g‖², at least 0; `noise` of ĝ scaled to the length of g; `missed`, noise plus the effect
            of bias, so that the efficiency is signal / (signal + missed); `efficiency`, `noise_to_signal`, `cosine`
            and `length`, ‖Eĝ‖ / ‖g‖; each of shape `counts.shape[:-1]`. NaN if the estimate of a square is not
            positive; `noise` and `missed` are never NaN for estimators of known scale.
        """
        counts = counts.double()
        prompts = counts.sum(dim=-1)
        pairs = prompts.square() - counts.square().sum(dim=-1)
        of = prompts if size is None else torch.full_like(prompts, size)
        of_size = counts * (of / prompts).unsqueeze(-1)

        def total(matrix: torch.Tensor) -> torch.Tensor:
            same, own = matrix.diagonal(), counts.square()
            between = torch.einsum("...p,pq,...q->...", counts, matrix, counts) - own @ same
            return of_size @ same + of * (of - 1) * between / pairs

        signal, with_truth, truth = total(self.signal), total(self.with_truth), total(self.truth)
        noise_to_signal = of_size @ (self.square - self.signal.diagonal()) / signal
        resolved = (signal > 0) & (truth > 0) & (noise_to_signal > 0)
        efficiency = with_truth.square() / (truth * signal * (1 + noise_to_signal))
        noise, missed, known, always = truth * noise_to_signal, truth * (1 / efficiency - 1), resolved, resolved
        if self.scale is not None:
            noise = missed = of_size @ (self.square / self.scale**2 - self.truth.diagonal())
            noise_to_signal, efficiency = noise / truth, truth / (truth + noise)
            known, always = truth > 0, torch.ones_like(truth, dtype=torch.bool)

        def where(condition: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
            return torch.where(condition, value, torch.nan)

        return {
            "signal": truth.clamp(min=0),
            "noise": where(always, noise),
            "missed": where(always, missed),
            "efficiency": where(known, efficiency),
            "noise_to_signal": where(known, noise_to_signal),
            "cosine": where(resolved, with_truth / (signal * truth).sqrt()),
            "length": where((signal > 0) & (truth > 0), (signal / truth).sqrt()),
        }


def bootstrap(prompts: int, draws: int = DRAWS, seed: int = 0) -> torch.Tensor:
    """`(1 + draws, P)` how often each prompt is drawn; the first row is the original sample."""
    drawn = torch.randint(prompts, (draws, prompts), generator=torch.Generator().manual_seed(seed))
    counts = torch.zeros(draws, prompts).scatter_add_(1, drawn, torch.ones(draws, prompts))
    return torch.cat([torch.ones(1, prompts), counts])


def fit_group_mean(noise: dict[int, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    """
    a and b of the group mean's law, noise = (a + b / (N − 1)) / N, by least squares over the group sizes.

    a is the noise under a known baseline, b that of estimating it from the other N − 1 completions.

    Args:
        noise (`dict[int, torch.Tensor]`):
            Tensors of one shape by N, for at least two values of N.
    """
    sizes = torch.tensor(sorted(noise), dtype=torch.float64)
    values = torch.stack([noise[int(n)] for n in sizes], dim=-1).double()
    # Each size's error is about proportional to its value, so the equation is divided by 1 / N
    columns = torch.stack([torch.ones_like(sizes), 1 / (sizes - 1)], dim=1)
    solution = (values * sizes) @ torch.linalg.pinv(columns).T
    return solution[..., 0], solution[..., 1]


def group_mean_worth(missed: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """
    The group size at which the group mean, unbiased except for its scale, misses as much; at least 1 and at most
    `LARGEST`. NaN if it or the law is undefined.
    """
    # m N (N − 1) = a (N − 1) + b, the larger root
    middle = missed + a
    root = (middle.square() - 4 * missed * (a - b)).clamp(min=0).sqrt()
    size = ((middle + root) / (2 * missed)).clamp(1, LARGEST)
    return torch.where(missed > 0, size, torch.full_like(size, LARGEST)).where(~(missed + a + b).isnan(), torch.nan)


@dataclass
class Estimate:
    """A number with a 95 % interval by bootstrap over prompts."""

    value: float
    low: float
    high: float

    @classmethod
    def of(cls, values: torch.Tensor) -> "Estimate":
        """
        From the values of the sample (first) and of the bootstrap; NaN values count as both ends.
        """
        drawn = values[1:].double()
        lows, highs = (torch.where(drawn.isnan(), end, drawn) for end in (-torch.inf, torch.inf))
        low = lows.quantile(0.025, interpolation="lower").item()
        high = highs.quantile(0.975, interpolation="higher").item()
        return cls(values[0].item(), low, high)

    @property
    def lost(self) -> bool:
        """Whether the value, or an end of its interval, is lost in noise."""
        return math.isnan(self.value) or (self.low == -math.inf and self.high == math.inf)

    def text(self, digits: int = 2, factor: float = 1.0) -> str:
        """`"0.81 (0.77–0.85)"`; `?` for numbers lost in noise."""

        def number(x: float) -> str:
            return f"{round(factor * x, digits) + 0.0:.{digits}f}" if math.isfinite(x) else "?"  # no -0

        return f"{number(self.value)} ({number(self.low)}–{number(self.high)})"


@dataclass
class Comparison:
    """
    An estimator compared with the group mean at the same group size.

    Args:
        name, baseline, leave_one_out:
            The estimator; `name` is the baseline's, with ", one left out" if the option is set.
        n (`int`):
            Group size.
        unbiased (`bool`):
            Whether the estimator is known to be unbiased up to a factor.
        more_prompts ([`Estimate`]):
            How many more prompts per step the group mean needs to be as efficient, as a share: 0.13 for 13 % more.
        efficiency, over_group_mean ([`Estimate`]):
            The efficiency of a step, and its ratio to the group mean's.
        noise_over_group_mean ([`Estimate`]):
            Noise to signal relative to the group mean.
        cosine, length ([`Estimate`]):
            The cosine of the expected gradient to the true one, and the ratio of their lengths.
        worth ([`Estimate`]):
            The group size at which the group mean is as efficient.
    """

    name: str
    baseline: str
    leave_one_out: bool
    n: int
    unbiased: bool
    more_prompts: Estimate
    efficiency: Estimate
    over_group_mean: Estimate
    noise_over_group_mean: Estimate
    cosine: Estimate
    length: Estimate
    worth: Estimate

    @property
    def settings(self) -> str:
        """The options of a config."""
        return Estimator(self.name, self.baseline, self.leave_one_out).settings


def compare(
    moments: dict[tuple[str, int], Moments], estimators: dict[str, Estimator], prompts_per_batch: int
) -> list[Comparison]:
    """
    Compare every estimator with the group mean at each group size, for steps of `prompts_per_batch` prompts.

    Args:
        moments (`dict`):
            Moments by name and N, including those of the group mean at every N, and at two values of N at least.
        estimators (`dict[str, Estimator]`):
            Estimators by name.
        prompts_per_batch (`int`):
            Prompts per step. Efficiencies depend on it, not on the number of measured prompts.
    """
    sizes = sorted({n for name, n in moments if name == CONTROL})
    squares = moments[CONTROL, sizes[0]].square
    counts = bootstrap(len(squares))
    # Samples of a single prompt, or of prompts whose rewards do not vary, are useless
    counts = counts[((counts > 0).sum(dim=1) > 1) & (counts.double() @ squares > 0)]
    figures = {key: m.of_batch(counts, prompts_per_batch) for key, m in moments.items()}
    a, b = fit_group_mean({n: figures[CONTROL, n]["noise"] for n in sizes})
    rows = []
    for (name, n), of in figures.items():
        beside, signal = figures[CONTROL, n], of["signal"]
        rows.append(
            Comparison(
                name=name,
                baseline=estimators[name].baseline,
                leave_one_out=estimators[name].leave_one_out,
                n=n,
                unbiased=moments[name, n].scale is not None,
                more_prompts=Estimate.of(beside["missed"] / of["missed"] - 1),
                efficiency=Estimate.of(of["efficiency"]),
                # Efficiency is ‖g‖² / (‖g‖² + what is missed), and where the signal is small it all but cancels
                over_group_mean=Estimate.of((signal + beside["missed"]) / (signal + of["missed"])),
                noise_over_group_mean=Estimate.of(of["noise"] / beside["noise"]),
                cosine=Estimate.of(of["cosine"]),
                length=Estimate.of(of["length"]),
                worth=Estimate.of(group_mean_worth(of["missed"], a, b)),
            )
        )
    return rows


def moments_of(
    prompts: list[dict[Any, Any]], estimators: dict[str, Estimator], mean_zero: bool = True
) -> dict[tuple[str, int], Moments]:
    """
    The moments of every estimator and group size over these prompts; products never share completions.

    Args:
        prompts (`list[dict]`):
            Results of [`~trl_otb.comparison.moments.prompt_moments`].
        estimators (`dict[str, Estimator]`):
            Estimators by name.
        mean_zero (`bool`, *optional*, defaults to `True`):
            Whether completions are untruncated samples of the differentiated policy, so that scores have mean 0.
            Otherwise no estimator's scale is known.
    """
    truth = torch.stack([prompt["truth"] for prompt in prompts]).double()  # (P, 2, k)
    found = {}
    for name, n in (key for key in prompts[0] if isinstance(key, tuple)):
        mean = torch.stack([prompt[name, n]["mean"] for prompt in prompts]).double()
        square = torch.tensor([prompt[name, n]["square"] for prompt in prompts], dtype=torch.float64)
        products = _products(mean, mean), _products(mean, truth), _products(truth, truth)
        found[name, n] = Moments(square, *products, estimators[name].scale(n) if mean_zero else None)
    return found


def _products(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Two `(P, 2, k)` -> symmetric `(P, P)` products, which use different halves for the same prompt."""
    between = a.mean(1) @ b.mean(1).T
    within = ((a[:, 0] * b[:, 1]).sum(1) + (a[:, 1] * b[:, 0]).sum(1)) / 2
    between.diagonal().copy_(within)
    return (between + between.T) / 2
