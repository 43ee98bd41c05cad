"""
Baselines of others from 2025 and 2026, to compare with; relatives.md has what each needs, and its noise.

    OTBGRPOConfig(baseline="recipes.studies.relatives:Tether")

Importing this module registers `tether`, `poise`, `ebpo` and `v05`. Each is this project's reading of a paper, in the
terms of `trl_otb.baselines.Completions`, in one process, and simpler than the original where the docstring says so.
"""

import torch

import trl_otb
from trl_otb.baselines import BASELINES, Completions, Value


def of_others(x: Completions) -> torch.Tensor:
    """`(B, 1)` the mean of the others' returns."""
    return x.completion_mean(torch.ones_like(x.scored), leave_one_out=True)


VALUE = {name: getattr(BASELINES["value"], name) for name in ("needs", "per_token", "scope", "unbiased")}


@trl_otb.register_baseline("tether", **VALUE)
class Tether(Value):
    """Per token: the others' mean mixed with a value, whose share is fitted to the batch before.

        B_t = (1 − ρ) b_(−i) + ρ V_t,   ρ = Σ (G − b)(V − b) / Σ (V − b)² over the tokens of a batch, for the next one

    Source: TETHER, https://arxiv.org/abs/2608.16739, with V_t = B0 + θ·φ of our `value` in the place of a critic.
    """

    def __init__(self) -> None:
        super().__init__()
        self.share = 0.0

    def _value(self, own: Completions, base: torch.Tensor) -> torch.Tensor:
        weights = self.weight, self.luck_weight
        self.weight, self.luck_weight = 1.0, 0.0
        try:
            return super().adjust(own, base).expand_as(own.mask)
        finally:
            self.weight, self.luck_weight = weights

    def adjust(self, own: Completions, base: torch.Tensor) -> torch.Tensor:
        return of_others(own) + self.share * (self._value(own, base) - of_others(own))

    def update(self, own, base, gather):
        apart = (self._value(own, base) - of_others(own)) * own.mask
        products = apart * (own.returns - of_others(own))
        dot, square = gather(torch.stack([products.sum(), apart.square().sum()]).unsqueeze(0)).sum(dim=0).tolist()
        metrics = super().update(own, base, gather)
        self.share = min(max(dot / square, 0.0), 1.0) if square > 0 else 0.0
        return metrics | {"share": self.share}


class Probe:
    """A linear prediction of returns, fitted to earlier batches, whose weights decay by 0.9; a ridge of one batch's."""

    def __init__(self) -> None:
        self.sums: list[torch.Tensor] = []
        self.theta: torch.Tensor | None = None

    def numbers(self, own: Completions) -> torch.Tensor:
        """`(B, K)` what the prediction for each completion reads."""
        return self.of_prompt(own)

    def of_prompt(self, own: Completions) -> torch.Tensor:
        """A constant, and the state that predicts the first token."""
        return torch.cat([torch.ones_like(own.scored), own.states[:, 0].float()], dim=1)

    def predicted(self, own: Completions) -> torch.Tensor:
        """`(B, 1)`; 0 before anything is learned."""
        numbers = self.numbers(own)
        return torch.zeros_like(own.scored) if self.theta is None else (numbers @ self.theta.to(numbers)).unsqueeze(1)

    def __call__(self, x: Completions) -> torch.Tensor:
        return of_others(x)

    def update(self, own, base, gather):
        numbers = self.numbers(own).double() * own.members
        new = [numbers.T @ numbers, numbers.T @ own.whole_returns.double(), own.members.sum().double()]
        new = [gather(values.unsqueeze(0)).sum(dim=0).cpu() for values in new]
        self.sums = [0.9 * old + values for old, values in zip(self.sums or [0, 0, 0], new, strict=True)]
        squares, products, count = self.sums
        ridge = torch.eye(len(squares)).double() * squares.diagonal().mean() / count.clamp(min=1)
        ridge[0, 0] = 1e-9  # the constant is free
        self.theta = torch.linalg.solve(squares + ridge * new[2], products).squeeze(1)
        return {}

    def state_dict(self):
        return dict(vars(self))

    def load_state_dict(self, state):
        vars(self).update(state)


OF_GROUPS = {"needs": {"energy", "states", "logps"}, "per_token": True}


@trl_otb.register_baseline("poise", unbiased=True, **OF_GROUPS)
class Poise(Probe):
    """Per completion: a prediction from the prompt's hidden state, and the other completions' states and surprisal.

    Source: POISE, https://arxiv.org/abs/2605.07579, which predicts a completion's reward from another rollout. Here the
    average over all others, mean surprisals in the place of entropies, and a ridge regression.
    """

    def numbers(self, own: Completions) -> torch.Tensor:
        count = own.lengths.clamp(min=1)
        mean = torch.cat([own.states.float().sum(dim=1), -own.logps.float().sum(dim=1, keepdim=True)], dim=1) / count
        others = own.grouped(mean * own.members)
        n = own.grouped(own.members)
        others = (others.sum(dim=1, keepdim=True) - others) / (n.sum(dim=1, keepdim=True) - n).clamp(min=1)
        return torch.cat([self.of_prompt(own), others.reshape(mean.shape)], dim=1)

    def adjust(self, own: Completions, base: torch.Tensor) -> torch.Tensor:
        return self.predicted(own).expand_as(own.mask)


@trl_otb.register_baseline("v05", unbiased=True, **OF_GROUPS)
class V05(Probe):
    """Per completion: the others' mean, drawn towards a prediction from the prompt unless the two disagree.

        B_i = s V + (1 − s) b_(−i),   s = v / max(v, (V − b_(−i))²),   v the variance of b_(−i)

    Source: V0.5, https://arxiv.org/abs/2603.10848: a value model's prior and the group's mean, weighted by a test of
    the prior. Here the prior is a ridge regression on the prompt's state, the mean leaves the completion out, and no
    further completions are sampled where the test fails.
    """

    def adjust(self, own: Completions, base: torch.Tensor) -> torch.Tensor:
        if self.theta is None:
            return base.expand_as(own.mask)
        mean, n = of_others(own), own.num_generations
        squares = own.grouped(own.whole_returns.square() * own.members)
        square = ((squares.sum(dim=1, keepdim=True) - squares) / max(n - 1, 1)).reshape(mean.shape)
        variance = (square - mean.square()).clamp(min=0) / max(n - 2, 1) + 1e-3  # of equal returns little is known
        prior = self.predicted(own)
        share = variance / torch.maximum(variance, (prior - mean).square())
        return (share * prior + (1 - share) * mean).expand_as(own.mask)


@trl_otb.register_baseline("ebpo", per_token=False)
class EBPO:
    """Per completion: the group's mean, shrunk towards the mean of all prompts so far.

        B = (1 − S) μ_q + S μ,   S = (σ² / N) / (σ² / N + τ²)

    σ² is the variance within groups and τ² that between prompts, over the batches before; biased by the completion's
    own return, like the group mean. Source: EBPO, https://arxiv.org/abs/2602.05165, which averages over the whole run.
    """

    def __init__(self) -> None:
        self.sums = [0.0, 0.0, 0.0, 0.0]  # of 1, group means, their squares, variances within; decayed by 0.9

    def __call__(self, x: Completions) -> torch.Tensor:
        mean = x.completion_mean(torch.ones_like(x.scored))
        if self.sums[0] == 0:
            return mean
        centre, square, within = (value / self.sums[0] for value in self.sums[1:])
        noise = within / x.num_generations
        between = max(square - centre**2 - noise, 0.0)
        return mean + noise / max(noise + between, 1e-12) * (centre - mean)

    def update(self, own, base, gather):
        returns, n = own.grouped(own.whole_returns)[..., 0], own.num_generations
        mean = returns.mean(dim=1)
        within = (returns - mean.unsqueeze(1)).square().sum(dim=1) / max(n - 1, 1)
        new = torch.stack([torch.ones_like(mean), mean, mean.square(), within]).sum(dim=1)
        new = gather(new.unsqueeze(0)).sum(dim=0).tolist()
        self.sums = [0.9 * old + value for old, value in zip(self.sums, new, strict=True)]
        return {}

    def state_dict(self):
        return {"sums": self.sums}

    def load_state_dict(self, state):
        self.sums = state["sums"]
