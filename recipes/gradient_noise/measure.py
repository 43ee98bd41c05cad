"""Efficiency of gradient estimators from moments of their gradients, prompt by prompt. Pure torch.

An estimator ĝ of the true gradient g of a batch has the efficiency

    e = ⟨Eĝ, g⟩² / (‖g‖² E‖ĝ‖²),

the share of the expected squared step that points along g: 1 for g itself, less with noise and with bias, whatever the
scale. On a smooth objective it bounds what one step can gain at the best learning rate. Gradients of all prompts are
summed, as training sums them.
"""

import math
from dataclasses import dataclass

import torch


DRAWS = 2000  # of the bootstrap over prompts
CLOSE = 0.15  # efficiencies closer than this are called so, rather than asked about further
LARGEST = 4096  # group sizes beyond this are written as "more than"


@dataclass
class Moments:
    """
    Moments of one estimator at one group size, for P prompts; each estimated without bias.

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
            c where Eĝ = c g is known, as of every estimator without bias. Its noise can then be told although the
            signal is lost in it, and so can its efficiency over that of another such estimator.
    """

    square: torch.Tensor
    signal: torch.Tensor
    with_truth: torch.Tensor
    truth: torch.Tensor
    scale: float | None = None

    def of_batch(self, counts: torch.Tensor, size: int | None = None) -> dict[str, torch.Tensor]:
        """
        Figures of a batch of `size` prompts like these, by default of as many, of which prompt p was drawn
        `counts[..., p]` times. The larger a batch, the less noise beside its signal.

        A prompt that is drawn twice stands for two prompts like it, not for the same one: products of different
        prompts are averaged over pairs that differ.

        Returns:
            `dict`: `signal`, ‖g‖², at least 0; `noise` of ĝ scaled to the length of g; `missed`, noise with what bias
            adds, so that the efficiency is signal / (signal + missed); `efficiency`, `noise_to_signal` and `cosine`;
            each of shape `counts.shape[:-1]`. NaN where noise leaves a square without a positive estimate: `noise`
            and `missed` of an estimator whose scale is known are always there.
        """
        counts = counts.double()
        prompts = counts.sum(dim=-1)
        pairs = prompts.square() - counts.square().sum(dim=-1)
        size = prompts if size is None else torch.full_like(prompts, size)
        of_size = counts * (size / prompts).unsqueeze(-1)

        def total(matrix):
            same, own = matrix.diagonal(), counts.square()
            between = torch.einsum("...p,pq,...q->...", counts, matrix, counts) - own @ same
            return of_size @ same + size * (size - 1) * between / pairs

        signal, with_truth, truth = total(self.signal), total(self.with_truth), total(self.truth)
        noise_to_signal = of_size @ (self.square - self.signal.diagonal()) / signal
        resolved = (signal > 0) & (truth > 0) & (noise_to_signal > 0)
        efficiency = with_truth.square() / (truth * signal * (1 + noise_to_signal))
        noise, missed, known, always = truth * noise_to_signal, truth * (1 / efficiency - 1), resolved, resolved
        if self.scale is not None:
            noise = missed = of_size @ (self.square / self.scale**2 - self.truth.diagonal())
            noise_to_signal, efficiency = noise / truth, truth / (truth + noise)
            known, always = truth > 0, torch.ones_like(truth, dtype=torch.bool)

        def where(condition, value):
            return torch.where(condition, value, torch.nan)

        return {
            "signal": truth.clamp(min=0),
            "noise": where(always, noise),
            "missed": where(always, missed),
            "efficiency": where(known, efficiency),
            "noise_to_signal": where(known, noise_to_signal),
            "cosine": where(resolved, with_truth / (signal * truth).sqrt()),
        }


def bootstrap(prompts: int, draws: int = DRAWS, seed: int = 0) -> torch.Tensor:
    """`(1 + draws, P)` how often each prompt is drawn; the first row is the sample itself."""
    drawn = torch.randint(prompts, (draws, prompts), generator=torch.Generator().manual_seed(seed))
    counts = torch.zeros(draws, prompts).scatter_add_(1, drawn, torch.ones(draws, prompts))
    return torch.cat([torch.ones(1, prompts), counts])


def fit_group_mean(noise: dict[int, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    """
    a and b of the group mean's law, noise = (a + b / (N − 1)) / N, by least squares over the group sizes.

    a is the noise that a known baseline would leave, b that of estimating it from the other N − 1 completions.

    Args:
        noise (`dict[int, torch.Tensor]`):
            By N, at least two of them, tensors of one shape.
    """
    sizes = torch.tensor(sorted(noise), dtype=torch.float64)
    values = torch.stack([noise[int(n)] for n in sizes], dim=-1).double()
    # Each size's error is about proportional to its value, so the equation is divided by 1 / N
    columns = torch.stack([torch.ones_like(sizes), 1 / (sizes - 1)], dim=1)
    solution = (values * sizes) @ torch.linalg.pinv(columns).T
    return solution[..., 0], solution[..., 1]


def group_mean_worth(missed: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """
    The group size at which the group mean, which has no bias but its scale, misses as much. NaN where it or the law
    is undefined; at least 1, at most `LARGEST`.
    """
    low, high = torch.full_like(missed, 1.0 + 1e-6), torch.full_like(missed, float(LARGEST))
    for _ in range(60):  # the law falls with N: bisection
        middle = (low * high).sqrt()
        too_noisy = (a + b / (middle - 1)) / middle > missed
        low, high = torch.where(too_noisy, middle, low), torch.where(too_noisy, high, middle)
    return torch.where(missed.isnan() | a.isnan() | b.isnan(), torch.nan, high)


@dataclass
class Estimate:
    """A number with its 95 % interval by bootstrap over prompts."""

    value: float
    low: float
    high: float

    @classmethod
    def of(cls, values: torch.Tensor) -> "Estimate":
        """
        From the value of the sample, first, and of the bootstrap's draws; draws without a value count as both ends.
        """
        drawn = values[1:].double()
        low, high = (torch.where(drawn.isnan(), end, drawn) for end in (-torch.inf, torch.inf))
        low = low.quantile(0.025, interpolation="lower").item()
        high = high.quantile(0.975, interpolation="higher").item()
        return cls(values[0].item(), low, high)

    @property
    def lost(self) -> bool:
        """Whether noise leaves no value, or an interval without ends."""
        return math.isnan(self.value) or (self.low == -math.inf and self.high == math.inf)

    def text(self, digits: int = 2) -> str:
        def number(x):
            return "?" if x != x or abs(x) == torch.inf else f"{x:.{digits}f}"

        return f"{number(self.value)} ({number(self.low)}–{number(self.high)})"


@dataclass
class Comparison:
    """An estimator at one group size beside the group mean at the same size."""

    name: str
    n: int
    efficiency: Estimate
    over_group_mean: Estimate
    noise_over_group_mean: Estimate
    cosine: Estimate
    worth: Estimate
    options: str | None = None  # what a config says for it, if it can
    unbiased: bool = False


def compare(
    moments: dict[tuple[str, int], Moments],
    options: dict[str, str] | None = None,
    control: str = "group_mean",
    batch: int | None = None,
) -> list[Comparison]:
    """
    Every estimator and group size beside `control` at the same size.

    Args:
        moments (`dict`):
            By name and N; `control` must be there at every N, and at two of them at least.
        options (`dict`, *optional*):
            By name, what a config says for the estimator; by default its name.
        batch (`int`, *optional*):
            Prompts per step, by default as many as were measured. Efficiencies depend on it: they are comparable
            between measurements for one batch alone.
    """
    sizes = sorted({n for name, n in moments if name == control})
    squares = moments[control, sizes[0]].square
    counts = bootstrap(len(squares))
    # Draws of one prompt alone, or of prompts whose rewards do not vary, say nothing
    counts = counts[((counts > 0).sum(dim=1) > 1) & (counts.double() @ squares > 0)]
    figures = {key: m.of_batch(counts, batch) for key, m in moments.items()}
    a, b = fit_group_mean({n: figures[control, n]["noise"] for n in sizes})
    rows = []
    for (name, n), of in figures.items():
        beside, signal = figures[control, n], of["signal"]
        rows.append(
            Comparison(
                name=name,
                n=n,
                efficiency=Estimate.of(of["efficiency"]),
                # Efficiency is ‖g‖² / (‖g‖² + what is missed), and where the signal is small it all but cancels
                over_group_mean=Estimate.of((signal + beside["missed"]) / (signal + of["missed"])),
                noise_over_group_mean=Estimate.of(of["noise"] / beside["noise"]),
                cosine=Estimate.of(of["cosine"]),
                worth=Estimate.of(group_mean_worth(of["missed"], a, b)),
                unbiased=moments[name, n].scale is not None,
                options=(options or {name: name}).get(name) if name != control else None,
            )
        )
    return rows


def verdict(
    rows: list[Comparison], n: int, prompts: int, control: str = "group_mean", batch: int | None = None
) -> str:
    """In words, for group size `n`: the options that are worth most, or that they are not told apart."""
    said = f"On these {prompts} prompts"
    here = [row for row in rows if row.n == n and row.options and not row.over_group_mean.lost]
    if not here:
        return f"{said} nothing can be said at N = {n}: the signal is lost in noise. Give more prompts or completions."
    lost = sum(row.n == n and row.over_group_mean.lost for row in rows)
    kind = " and that have no bias" if lost and all(row.unbiased for row in here) else ""
    among = f"the best of the {len(here)} that an option chooses{kind}"
    if lost:
        among += f"; the signal is lost in noise, so that of the other {lost} nothing can be said"
    # The best of those that are shown to be better, if there are any
    best = max(here, key=lambda row: (row.over_group_mean.low > 1, row.over_group_mean.value))
    ratio = best.over_group_mean
    steps = f" in steps of {batch} prompts" if batch else ""
    efficiency = f"{ratio.text()} times its efficiency{steps}, {among}"
    if ratio.low > 1:
        worth = f"{_size(best.worth.value)} ({_size(best.worth.low)}–{_size(best.worth.high)})"
        few = "; so few prompts make intervals too narrow" if prompts < 30 else ""
        return f"{said} `{best.options}` at N = {n} is worth the {control} at N = {worth}: {efficiency}{few}."
    said = f"{said} no baseline at N = {n} is shown to beat the {control}: `{best.options}` has {efficiency}"
    if ratio.high < 1:
        return f"{said}."
    apart = max(ratio.high - 1, 1 / ratio.low - 1) if ratio.low > 0 else math.inf
    if apart < CLOSE:
        return f"{said}; by these intervals they differ by {100 * apart:.0f} % at most."
    if ratio.value <= 1 or apart == math.inf:
        return f"{said}; more prompts are needed."
    # An interval's width on a logarithmic scale falls with the root of the number of prompts. The width is itself
    # uncertain, so at least half as many again are asked for
    needed = prompts * (math.log(ratio.value / ratio.low) / math.log(ratio.value)) ** 2
    return f"{said}; {math.ceil(max(needed - prompts, prompts / 2))} more prompts may do."


def _size(value: float) -> str:
    if value != value or abs(value) == torch.inf:
        return "?"
    return f"over {LARGEST}" if value >= LARGEST else f"{value:.0f}" if value >= 10 else f"{value:.1f}"
