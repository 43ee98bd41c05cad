"""Pools of completions of fixed prompts, and the gradients of their groups under every estimator."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from transformers import TrainerCallback

from trl_otb.baselines import assign_credit, find_baseline
from trl_otb.rollout import Rollout


@dataclass(frozen=True)
class Estimator:
    """A baseline with its options, or none at all."""

    name: str
    baseline: str | None = None
    leave_one_out: bool = False
    alignment: str = "generated"
    zero_tail: bool = True

    @property
    def per_token(self) -> bool:
        return self.baseline is not None and find_baseline(self.baseline).per_token

    @property
    def options(self) -> str | None:
        """What a config says for it; `None` where it cannot."""
        if self.baseline is None:
            return None
        return f"baseline: {self.baseline}" + (", leave_one_out: true" if self.leave_one_out else "")

    def advantages(self, rollout: Rollout, rows: torch.Tensor, n: int) -> torch.Tensor:
        """`(b, T)`, or `(b, 1)` for one number per completion, of whole groups of `n`."""
        if self.baseline is None:
            return rollout.rewards[rows].unsqueeze(1)
        inputs = rollout.rewards[rows], rollout.energy[rows], rollout.mask[rows]
        options = {"alignment": self.alignment, "zero_tail": self.zero_tail, "leave_one_out": self.leave_one_out}
        return assign_credit(*inputs, n, baseline=self.baseline, **options).advantages


def estimators(baselines: list[str], alignment: str = "generated", zero_tail: bool = True) -> list[Estimator]:
    """
    None at all, and every baseline, those that read energies also with one left out; the group mean always.

    `alignment` and `zero_tail` are given to the baselines that look at them.
    """
    found = [Estimator("none"), Estimator("group_mean", "group_mean")]
    for name in baselines:
        entry = find_baseline(name)
        options = {"alignment": alignment} if entry.per_token else {}
        options |= {"zero_tail": zero_tail} if entry.zero_tail else {}
        if name != "group_mean":
            found.append(Estimator(name, name, **options))
        if entry.uses_energy:
            found.append(Estimator(f"{name}, one left out", name, leave_one_out=True, **options))
    return found


class KeepPools(TrainerCallback):
    """In an evaluation with one prompt per batch, hands every rollout to `keep`."""

    def __init__(self, keep: Callable[[Rollout], None]):
        self.keep = keep
        self.trainer = None

    def on_prediction_step(self, args, state, control, **kwargs):
        self.keep(self.trainer.rollouts["eval"])


class Projection:
    """
    A random projection of gradients that keeps inner products: a count sketch, seeded, with nothing stored.

    ⟨Πa, Πb⟩ is unbiased for ⟨a, b⟩, with a standard error of at most ‖a‖ ‖b‖ √(2 / dimension); where there are no more
    parameters than that, Π is the identity.

    Args:
        sizes (`list[int]`):
            Numbers of elements of the parameters.
        dimension (`int`):
            Of the result.
    """

    def __init__(self, sizes: list[int], dimension: int, seed: int = 0):
        self.exact = sum(sizes) <= dimension
        self.dimension = sum(sizes) if self.exact else dimension
        self.seed = seed

    def __call__(self, gradients: list[torch.Tensor]) -> torch.Tensor:
        """`(dimension,)` float32, on the CPU."""
        if self.exact:
            return torch.cat([gradient.flatten().float() for gradient in gradients]).cpu()
        device = gradients[0].device
        result = torch.zeros(self.dimension, device=device)
        for i, gradient in enumerate(gradients):
            random = torch.Generator(device=device).manual_seed(self.seed * 1_000_003 + i)
            place = torch.randint(2 * self.dimension, (gradient.numel(),), generator=random, device=device)
            sign = 1 - 2 * (place % 2)  # its parity
            result.index_add_(0, place // 2, gradient.flatten().float() * sign)
        return result.cpu()


class GradientOf:
    """
    The gradient of Σ A log π / N for rows of a rollout, in the parameters that are studied.

    Args:
        model (`torch.nn.Module`):
            The policy.
        temperature (`float`):
            It is sampled at.
        parameters (`list[torch.nn.Parameter]`):
            Those that are studied.
        projection ([`Projection`]):
            Applied to every gradient.
    """

    def __init__(self, model, temperature: float, parameters: list[torch.nn.Parameter], projection: Projection):
        self.model, self.temperature, self.parameters, self.projection = model, temperature, parameters, projection

    def __call__(self, rollout: Rollout, rows: torch.Tensor, advantages: torch.Tensor) -> tuple[torch.Tensor, float]:
        """The projected gradient, and ‖·‖² of the exact one. `advantages` has one row per row of `rows`."""
        length = int(rollout.completion_mask[rows].sum(dim=1).max())
        first = int((1 - rollout.prompt_mask[rows]).sum(dim=1).min())
        ids = torch.cat([rollout.prompt_ids[rows, first:], rollout.completion_ids[rows, :length]], dim=1)
        attention = torch.cat([rollout.prompt_mask[rows, first:], rollout.completion_mask[rows, :length]], dim=1)
        with torch.enable_grad():
            logits = self.model(input_ids=ids, attention_mask=attention, logits_to_keep=length + 1).logits
            logps = (logits[:, :-1].float() / self.temperature).log_softmax(dim=-1)
            logps = logps.gather(2, ids[:, -length:].unsqueeze(2)).squeeze(2)
            weights = (advantages * rollout.mask[rows])[:, :length] / len(rows)
            gradients = torch.autograd.grad((logps * weights).sum(), self.parameters, allow_unused=True)
        found = [torch.zeros_like(p) if g is None else g for g, p in zip(gradients, self.parameters, strict=True)]
        square = sum(g.float().square().sum() for g in found).item()
        return self.projection(found), square


def prompt_moments(
    rollout: Rollout,
    gradient_of: GradientOf,
    studied: dict[int, list[Estimator]],
    deals: int = 20,
    seed: int = 0,
) -> dict:
    """
    The moments of a prompt's gradient, from a pool of its completions, for the estimators studied at each group size.

    The pool's halves are never mixed in a group, so that what is multiplied later comes from completions that are not
    shared. Estimators with one number per completion are combinations of the completions' own gradients, and so come
    for many deals into groups; those with one per token take a backward pass per group, for one deal.

    Returns:
        `dict`: `truth`, `(2, k)`: the gradient by each half, taken as one group under `ogb` with one left out, which
        has no bias and little noise; and for each `(name, N)` its `square`, the mean of ‖ĝ‖², and `mean`, `(2, k)`,
        the mean of ĝ by half.
    """
    rng = torch.Generator().manual_seed(seed)
    halves = rollout.rows.chunk(2)
    ones = torch.ones(1, 1, device=rollout.mask.device)
    own, squares = zip(*(gradient_of(rollout, row.view(1), ones) for row in rollout.rows), strict=True)
    own = torch.stack(own)  # (M, k) a completion's S_i
    gram = own.double() @ own.double().T
    gram.diagonal().copy_(torch.tensor(squares))

    found = {
        "truth": torch.stack([
            _combination(own, half, Estimator("truth", "ogb", leave_one_out=True).advantages(rollout, half, len(half)))
            for half in halves
        ])
    }  # fmt: skip
    for n, of_size in studied.items():
        dealt = [[_deal(half, n, rng) for half in halves] for _ in range(deals)]
        for estimator in of_size:
            if estimator.per_token:
                parts = [_by_backward(rollout, gradient_of, estimator, rows, n) for rows in dealt[0]]
            else:
                parts = [
                    _by_combination(rollout, own, gram, estimator, [deal[half] for deal in dealt], n)
                    for half in (0, 1)
                ]
            square = sum(square for square, _ in parts) / 2
            found[estimator.name, n] = {"square": square, "mean": torch.stack([mean for _, mean in parts])}
    return found


def _deal(half: torch.Tensor, n: int, rng: torch.Generator) -> torch.Tensor:
    """Rows of a half in random order, whole groups only."""
    return half[torch.randperm(len(half), generator=rng)[: len(half) // n * n]]


def _combination(own: torch.Tensor, rows: torch.Tensor, advantages: torch.Tensor) -> torch.Tensor:
    return (advantages[:, :1].cpu() * own[rows.cpu()]).sum(dim=0) / len(rows)


def _by_combination(rollout, own, gram, estimator, deals, n) -> tuple[float, torch.Tensor]:
    square, mean = 0.0, 0.0
    for rows in deals:
        groups = rows.view(-1, n).cpu()
        weights = estimator.advantages(rollout, rows, n)[:, 0].view(-1, n).double().cpu() / n
        within = gram[groups.unsqueeze(2), groups.unsqueeze(1)]  # (groups, N, N)
        square += torch.einsum("gi,gij,gj->", weights, within, weights).item() / len(groups) / len(deals)
        mean = mean + (weights.flatten().float().unsqueeze(1) * own[groups.flatten()]).sum(0) / len(groups) / len(
            deals
        )
    return square, mean


def _by_backward(rollout, gradient_of, estimator, rows, n) -> tuple[float, torch.Tensor]:
    advantages = estimator.advantages(rollout, rows, n)
    groups = [gradient_of(rollout, rows[i : i + n], advantages[i : i + n]) for i in range(0, len(rows), n)]
    return sum(square for _, square in groups) / len(groups), torch.stack([g for g, _ in groups]).mean(dim=0)
