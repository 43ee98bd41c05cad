"""A baseline that predicts returns from the text so far, and subtracts the luck of later tokens."""

import copy
import logging
import math
from collections.abc import Callable
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from .completions import Completions
from .pooled import pooled
from .value_parts import OF_LUCK, Reading, blocks, features, later, products, read, solution


logger = logging.getLogger(__name__)

ROUNDING = 1e-12  # of squared float32 numbers, relative
RESET_RATIO = 2.0  # of the power that B left to B0's: `value` is reset after two such batches in a row
RESET_AT_ONCE_RATIO = 100.0


class Value:
    """Per token: `rloo_pooled`, plus a prediction from what is written so far, plus the luck of later tokens.

        B_t = B0 + c₁ θ·φ(x_t) + c₂ Σ_{t'>t} d_t' Γ·ψ(x_t'),   d_t = Σ_v π(v|x_t)² − π(y_t|x_t)
        (θ, Γ) = argmin Σ w_t (G_t − B0 − θ·φ − Γ·Σ d ψ)²   over earlier generation batches

    Source: this project. Σ w (G − B)² is the gradient's noise to first order (Greensmith, Bartlett and Baxter, 2004).
    d_t', how lucky the draw of y_t' was, has mean 0 given what precedes it: a control variate, as in AIVAT for poker
    (Burch et al., 2018). V, a value of the state, is fitted first, by plain least squares on sums over the prefix,
    hidden states, σ = Σ_v π(v)² and m, the largest d so far, of other prompts than those that θ and Γ are then fitted
    to. φ and ψ are products of (1, √n, V, V², m, V m, V √n) with powers of σ, n the number of tokens before; φ also
    holds the sums.

    A batch's weight decays by 0.9 per batch. c₁, c₂ and the ridge are cross-validated over four folds of prompts; c is
    shrunk as the folds disagree (positive-part James–Stein), and limited while prompts or tokens are few. B0 + c₁ θ·φ
    stays within the returns seen so far, Γ·ψ within their width. What was learned is discarded after a batch of which
    B left over twice B0's power, if that is over twice B0's usual power, too, or over 100 times B0's, or happened in
    the batch before. In OTBGRPOTrainer a prompt keeps B0 where B leaves too much power in the other prompts of a batch
    ([`~trl_otb.run_baseline.RunBaseline`]); asynchronous batches have no such bound.

    Unbiased, since B_t depends on what precedes y_t, and on sums of later terms whose mean is 0 given what precedes
    them; θ, Γ and c on earlier batches. Where tokens are drawn from a distribution that is not recorded, later luck is
    left out (`Completions.draw_ratio`). Importance ratios of the loss weight only what it learns from.
    """

    decay_per_batch = 0.9  # of a batch's weight
    ridges = (0.001, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0)  # in average batches
    prompt_folds = 4
    prompts_enough, tokens_enough = 16, 16  # for c = 1 after the first batch: prompts, and tokens per feature
    weighted_by = "energy"  # anything else makes it an ordinary value function

    def __init__(self) -> None:
        self.eta: Tensor | None = None  # (K,) of V
        self.theta: Tensor | None = None  # (k,)
        self.gamma: Tensor | None = None  # (l,)
        self.weight = self.luck_weight = 0.0  # c₁, c₂
        self._value_sums: Tensor | None = None  # over earlier batches; float64, on the CPU
        self._sums: Tensor | None = None  # the same by fold
        self._batches = self._tokens = 0.0  # the sums of their weights
        self._prompts, self._prompts_before = 0, 0  # in all batches, and before the last reset
        self._returns_seen = (math.inf, -math.inf)  # minimum and maximum
        self._power = 0.0  # of B0 in earlier batches, the decayed sum
        self._doubted = False  # whether B left too much of the last batch, which had little power
        self._warned = False  # that something is not finite

    def __call__(self, x: Completions) -> Float[Tensor, "B #T"]:
        """B0, `rloo_pooled`, of returns or of rewards-to-go."""
        return pooled(x, x.returns, torch.ones_like(x.scored))

    def adjust(self, local: Completions, b0: Float[Tensor, "B #T"]) -> Float[Tensor, "B #T"]:
        """B; or B0, before anything is predicted."""
        if self.theta is None or max(self.weight, self.luck_weight) == 0.0:
            return b0
        return torch.cat([self._baseline(read(x, b), b)[1] for x, b, _ in blocks(local, b0)])

    def update(
        self, local: Completions, b0: Float[Tensor, "B #T"], gather: Callable[[Tensor], Tensor]
    ) -> dict[str, float]:
        """
        Learn from a generation batch. Returns `explained`, 1 − Σ w (G − B)² / Σ w (G − B0)² for what was used, NaN if
        B0 is each return; `explained_by_state`, the same without later luck; `weight` and `luck_weight`, c₁ and c₂;
        and `restarted`, 1 if it was reset.
        """
        fold = ((local.prompt + self._prompts) % self.prompt_folds).tolist()
        of_value, measured = _gathered(self._measure(local, b0, fold), gather)
        power, left, left_by_state, squares, excluded, tokens = measured.tolist()
        varies = power > ROUNDING * squares
        reset = self._needs_reset(power, left, varies)
        shares = [1 - part / power if varies else math.nan for part in (left, left_by_state)]
        metrics = dict(zip(("explained", "explained_by_state"), shares, strict=True))
        metrics |= {"weight": self.weight, "luck_weight": self.luck_weight, "restarted": float(reset)}
        if excluded > 0 and not self._warned:
            self._warned = True
            logger.warning(
                f"Hidden states or log-probs before {int(excluded)} tokens of a generation batch are not finite: there "
                "'value' predicts nothing and learns nothing. If the model runs in float16, try bfloat16."
            )
        if of_value[:, 0, 0].sum() == 0:
            return metrics  # there is no token to learn from
        if reset:
            self._reset(f"it left {left / power:.1f} times the power of 'rloo_pooled', as after a change of rewards")

        present, returns = local.mask > 0, local.returns.expand_as(local.mask)
        ends = [-returns.where(present, math.inf).amin(), returns.where(present, -math.inf).amax()]
        numbers, some = local.prompt.float(), present.any(dim=1)
        ends += [-numbers.where(some, math.inf).amin(), numbers.where(some, -math.inf).amax()]
        least, most, *prompts = gather(torch.stack(ends).unsqueeze(0)).amax(dim=0).tolist()
        self._returns_seen = min(self._returns_seen[0], -least), max(self._returns_seen[1], most)
        self._prompts += int(sum(prompts)) + 1
        whole = of_value.sum(dim=0) + (0 if self._value_sums is None else self.decay_per_batch * self._value_sums)
        ridge = 0.02 + 4 / (self._prompts - self._prompts_before)
        (of_both,) = _gathered([self._sums_of(local, b0, fold, solution(whole - of_value, ridge))], gather)
        if not (whole.isfinite().all() and of_both.isfinite().all()):
            self._reset("a generation batch has sums that are not finite")
            return metrics
        self.eta = solution(whole, ridge)
        self._value_sums = whole
        self._sums = of_both if self._sums is None else self.decay_per_batch * self._sums + of_both
        self._batches = self.decay_per_batch * self._batches + 1
        self._tokens = self.decay_per_batch * self._tokens + tokens
        self._power = self.decay_per_batch * self._power + power
        self._fit()
        return metrics

    def state_dict(self) -> dict[str, Any]:
        return copy.deepcopy({name: value for name, value in vars(self).items() if name != "_warned"})

    def load_state_dict(self, state: dict[str, Any]) -> None:
        kept = self.state_dict().keys()
        if not kept <= state.keys():
            raise ValueError(
                "The state of 'value' is damaged, or of a release before 0.8, which predicted from other numbers: it "
                f"holds {', '.join(map(repr, state)) or 'nothing'}. Without the checkpoint's `baseline.pt` it starts "
                "empty."
            )
        vars(self).update({name: copy.deepcopy(state[name]) for name in kept})

    def _features(self, of: Reading, v: Float[Tensor, "B T"]) -> tuple[Float[Tensor, "B T k"], Float[Tensor, "B T l"]]:
        """φ and ψ; studies leave out some."""
        return features(of, v)

    def _centred_v(self, of: Reading, b0: Tensor, eta: Tensor | None) -> Float[Tensor, "B T"]:
        """V less the middle of the returns seen, by coefficients `(K,)` or, for each row, `(B, K)`; 0 without any."""
        if eta is None:
            return torch.zeros_like(of.sure)
        if of.numbers.size(-1) != eta.size(-1):
            raise ValueError(
                f"'value' has learned from {eta.size(-1)} numbers per token, and here are {of.numbers.size(-1)}: its "
                "state is of another model or version. Without the checkpoint's `baseline.pt` it starts empty."
            )
        least, most = self._returns_seen
        predicted = (of.numbers @ eta.to(of.numbers).unsqueeze(-1)).squeeze(-1)
        return (b0 + predicted).clamp(least, most) - (least + most) / 2

    def _baseline(self, of: Reading, b0: Float[Tensor, "B #T"]) -> tuple[Float[Tensor, "B T"], Float[Tensor, "B T"]]:
        """B without later luck, and B."""
        if self.theta is None or self.gamma is None:
            return (b0.expand_as(of.sure),) * 2
        phi, psi = self._features(of, self._centred_v(of, b0, self.eta))
        least, most = self._returns_seen
        predicted = b0 + self.weight * (phi @ self.theta.to(phi))
        state = predicted.clamp(b0.clamp(max=least), b0.clamp(min=most))
        # Known before the draw, so that it may be bounded; the sum may not, or its mean would not be 0
        per_draw = (psi @ self.gamma.to(psi)).clamp(least - most, most - least)
        return state, state + self.luck_weight * later(of.luck * per_draw)

    def _measure(self, local: Completions, b0: Tensor, fold: list[int]) -> list[Tensor]:
        """Sums that V is fitted to, by fold; and the power that B0 and B leave, with what else a batch tells."""
        precise = _precise(b0)
        sums, total = b0.new_zeros(1, dtype=precise), b0.new_zeros(6, dtype=precise)
        for x, b, rows in blocks(local, b0):
            of = read(x, b)
            target = (x.returns - b).expand_as(x.mask)
            loss_energy = x.need("loss_energy").to(precise)
            state, whole = (x.returns - values for values in self._baseline(of, b))
            powers = [(loss_energy * left.to(precise).square()).sum() for left in (target, whole, state)]
            squares = (loss_energy * (x.returns.to(precise).square() + b.to(precise).square())).sum()
            excluded = (x.mask * ~of.known).sum()
            present = (x.mask * of.known).to(precise)
            total += torch.stack([*powers, squares, excluded.to(precise), present.sum()])
            columns = torch.cat([of.numbers, target.unsqueeze(-1)], dim=-1)
            sums = sums + products(columns, present, fold[rows], self.prompt_folds)
        return [sums, total]

    def _sums_of(self, local: Completions, b0: Tensor, fold: list[int], etas: Tensor) -> Tensor:
        """Sums that θ and Γ are fitted to, by fold, with V of the other folds' prompts."""
        precise = _precise(b0)
        sums = b0.new_zeros(1, dtype=precise)
        for x, b, rows in blocks(local, b0):
            of = read(x, b)
            phi, psi = self._features(of, self._centred_v(of, b, etas[fold[rows]]))
            target = (x.returns - b).expand_as(x.mask)
            weights = x.need("loss_energy") if self.weighted_by == "energy" else x.mask
            columns = torch.cat([phi, later(of.luck.unsqueeze(-1) * psi), target.unsqueeze(-1)], dim=-1)
            sums = sums + products(columns, (weights * of.known).to(precise), fold[rows], self.prompt_folds)
        return sums

    def _needs_reset(self, power: float, left: float, varies: bool) -> bool:
        """Whether what was learned is of no use any more, from the power that B0 and B left of a batch."""
        usual, lost = self._power / max(self._batches, 1.0), varies and left > RESET_RATIO * power
        # In a batch in which returns happen to be nearly equal, usual errors are large compared with B0's
        reset = lost and (self._doubted or left > min(RESET_RATIO * max(power, usual), RESET_AT_ONCE_RATIO * power))
        self._doubted = lost and not reset
        return reset

    def _fit(self) -> None:
        """Fit θ, Γ and c to the sums, with the ridge that predicts held-out prompts best."""
        assert self._sums is not None
        whole, size = self._sums.sum(dim=0), self._sums.size(-1)
        enough = self.prompts_enough, self.tokens_enough * size
        known = (self._prompts - self._prompts_before) / enough[0], self._tokens / enough[1]
        most = min(1.0, *known)
        # In parts of the whole; never less than features over tokens
        ridges = {max(ridge / self._batches, size / max(self._tokens, 1.0)) for ridge in self.ridges}
        choices = [(*self._weights(solution(whole - self._sums, ridge)), ridge) for ridge in sorted(ridges)]
        _, weight, luck_weight, ridge = max(choices)
        both = solution(whole, ridge)
        self.theta, self.gamma = both[:-OF_LUCK], both[-OF_LUCK:]
        self.weight, self.luck_weight = min(weight, most), min(luck_weight, most)
        if not both.isfinite().all():
            self._reset("its linear system has no finite solution")

    def _weights(self, without_fold: Float[Tensor, "folds K"]) -> tuple[float, float, float]:
        """For (θ, Γ) fitted without each fold: what c₁ and c₂ gain in the folds, and these, each given the other."""
        assert self._sums is not None
        parts = without_fold.clone(), without_fold.clone()
        parts[0][:, -OF_LUCK:] = 0
        parts[1][:, :-OF_LUCK] = 0
        both = torch.stack(parts, dim=1)  # (folds, 2, K)
        agreement = torch.einsum("fpk,fk->fp", both, self._sums[:, :-1, -1])
        squares = torch.einsum("fpk,fkl,fql->fpq", both, self._sums[:, :-1, :-1], both)
        c = torch.ones(2, dtype=squares.dtype)
        for part in (0, 1) * 3:
            left = agreement[:, part] - c[1 - part] * squares[:, 0, 1]
            error = self.prompt_folds * left.var()  # the squared standard error of the sum
            trust = (1 - error / left.sum().square().clamp(min=1e-300)).clamp(min=0)
            c[part] = trust * (left.sum() / squares[:, part, part].sum().clamp(min=1e-30)).clamp(0, 1)
        gain = 2 * c @ agreement.sum(dim=0) - c @ squares.sum(dim=0) @ c
        return gain.nan_to_num(nan=-math.inf).item(), *c.nan_to_num().tolist()

    def _reset(self, reason: str) -> None:
        logger.warning(f"The baseline 'value' discards what it has learned: {reason}. It continues as 'rloo_pooled'.")
        prompts, warned = self._prompts, self._warned
        Value.__init__(self)
        self._prompts = self._prompts_before = prompts
        self._warned = warned


def _precise(of: Tensor) -> torch.dtype:
    """float64 if the device supports it."""
    return torch.float32 if of.device.type == "mps" else torch.float64


def _gathered(parts: list[Tensor], gather: Callable[[Tensor], Tensor]) -> list[Tensor]:
    """The sums of all processes; float64, on the CPU."""
    flat = gather(torch.cat([values.flatten() for values in parts]).unsqueeze(0)).sum(dim=0).cpu().double()
    split = flat.split([values.numel() for values in parts])
    return [part.view_as(values) for part, values in zip(split, parts, strict=True)]
