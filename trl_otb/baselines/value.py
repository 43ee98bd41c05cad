"""A baseline that predicts returns from the text so far, and subtracts the luck of later tokens."""

import logging
import math
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any, ClassVar

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from .bound import ROUNDING, VARIES_NOT_RATIO, worse_than_b0
from .completions import NOT_ZERO, Completions
from .least_squares import TARGET, Sums, confidences, products, solution
from .luck import COLUMNS, LuckCheck, measured
from .pooled import pooled
from .prefix import MEAN_STATE, PROGRESS, STATE, Prefix, later, read_in_blocks
from .transport import numbered
from .value_columns import PHI, PSI, columns_of
from .value_metrics import KNOWING, KNOWING_SLOPE, BatchSums, by_prompt, slope_within
from .value_state import load_state, saved_state


logger = logging.getLogger(__name__)

# What other values of constants leave is a table of recipes/studies/ablations.md, by their names

# B lost a batch if it left more than this many times B0's power. By chance it leaves a little more; without any limit
# what was learned before a jump of rewards would stay in use
RESET_RATIO = 2.0
# `value` is reset after two or more lost batches in a row that hold this many prompts in all: one prompt may happen to
# vary little, one batch may be an exception, and with many prompts a reset would come late
RESET_PROMPTS = 4
# Times the ridge of V's other numbers, with progress functions: they tell what the text is worth, so that states, which
# are many, mostly fit chance. Infinite, states would add nothing
STATES_RIDGE_FACTOR = 4


class Value:
    """Per token: `rloo_pooled`, plus a prediction from what is written so far, plus the luck of later tokens.

        B_t = B0 + c₁ θ·φ(x_t) + c₂ Σ_{t'>t} d_t' Γ·ψ(x_t')
        d_t = Σ_v π(v|x_t)² − π(y_t|x_t)
        (θ, Γ) = argmin Σ w_t (G_t − B_t)² with c = 1, and a ridge, over earlier generation batches

    Source: this project. Σ w (G − B)² is the gradient's noise to first order (Greensmith, Bartlett and Baxter, 2004).
    d_t', negative where the policy drew a token that it favours, positive where it did not, has mean 0 given what
    precedes it: a control variate, as in AIVAT for poker (Burch et al., 2018).

    1. V, the return that is to be expected, is fitted to numbers of the text so far ([`~trl_otb.baselines.prefix`]),
       all tokens alike. With progress functions hidden states have more ridge than its other numbers.
    2. φ and ψ are made of V (`PARTS`); θ and Γ are fitted to them, with a V that was fitted to other prompts.
    3. c₁ and c₂ are cross-validated over folds of prompts, and at most P / 16 after P prompts.

    A batch's weight decays per batch. V and B0 + c₁ θ·φ stay within the returns seen so far, Γ·ψ within their width.

    A prompt keeps B0 where B leaves too much power in the other prompts of a batch ([`~trl_otb.baselines.bound`]); not
    so in asynchronous training, whose batches hold few whole groups. `value` is reset after two or more batches in a
    row, with four prompts or more in all, in which B left over twice B0's power, or, where no return varies, over half
    of B0's usual power.

    Unbiased, since B_t depends on what precedes y_t, and on sums of later terms whose mean is 0 given what precedes
    them; θ, Γ and c on earlier batches. Where tokens are drawn from a distribution that is not recorded, later luck is
    left out (`Completions.draw_ratio`), and from the next batch on where it is measured that its mean is not 0
    ([`~trl_otb.baselines.luck`]). Importance ratios of the loss weight only what it learns from; where they are cut, as
    completions by `sequence_mask`, no baseline is unbiased.
    """

    decay_per_batch = 0.9  # of a batch's weight: at 1 the policy of the beginning would count, at 0 few batches
    prompt_folds = 4  # of which all but one teach the V and c that the last is used with
    prompts_enough = 16  # for c = 1: what few prompts say of the next ones cannot be cross-validated
    _warned: ClassVar[set[str]] = set()  # of what is said once

    def __init__(self) -> None:
        self.eta: Tensor | None = None  # (K,) of V
        self.theta: Tensor | None = None  # of `PHI`
        self.gamma: Tensor | None = None  # of `PSI`
        self.weight = self.luck_weight = 0.0  # c₁, c₂
        self.value_sums: Sums | None = None  # over earlier batches; float64, on the CPU
        self.sums: Sums | None = None  # the same by fold, of `PHI`, `PSI` and the target
        self.tokens = 0.0  # the same of tokens
        self.prompts = 0  # in all batches
        self.returns_seen = (math.inf, -math.inf)  # minimum and maximum
        self.doubted = 0  # prompts in the latest batches in a row in which B left too much
        self.knew = 0  # batches in a row in which it knew what rewards would be
        self.luck_check = LuckCheck()

    # The baseline

    def __call__(self, x: Completions) -> Float[Tensor, "B #T"]:
        """B0, `rloo_pooled`, of returns or of rewards-to-go; for N = 1 the mean of the other prompts'."""
        return pooled(x, x.returns, torch.ones_like(x.scored))

    def adjust(self, local: Completions, b0: Float[Tensor, "B #T"]) -> Float[Tensor, "B #T"]:
        """B; or B0, before anything is predicted."""
        if self.theta is None or max(self.weight, self.luck_weight) == 0.0:
            return b0
        return torch.cat([self.baseline_parts(of, b0[rows])[1] for _, of, rows in read_in_blocks(local)])

    def baseline_parts(
        self, of: Prefix, b0: Float[Tensor, "B #T"]
    ) -> tuple[Float[Tensor, "B T"], Float[Tensor, "B T"]]:
        """B without later luck, and B."""
        if self.eta is None or self.theta is None or self.gamma is None:
            return (b0.expand_as(of.sure),) * 2
        v = self.centred_v(of, b0, self._eta_of(of.names))
        phi, psi = columns_of(of, b0, v)
        least, most = self.returns_seen
        predicted = b0 + self.weight * (phi @ self.theta.to(phi))
        state = predicted.clamp(b0.clamp(max=least), b0.clamp(min=most))
        # Known before the draw, so that it may be limited; the sum may not, or its mean would not be 0
        per_draw = (psi @ self.gamma.to(psi)).clamp(least - most, most - least)
        return state, state + later(self.luck_weight * of.luck * per_draw)

    def _eta_of(self, names: tuple[str, ...]) -> Tensor:
        """V's coefficients of these columns. It is fitted anew if they were others, as by other progress functions."""
        assert self.eta is not None and self.value_sums is not None
        if self.value_sums.names != (*names, TARGET):
            self.value_sums = self.value_sums.of((*names, TARGET))
            self.eta = self._fitted_v(self.value_sums)
        return self.eta

    def centred_v(self, of: Prefix, b0: Tensor, eta: Tensor) -> Float[Tensor, "B T"]:
        """
        V less the middle of the returns seen, by coefficients `(K,)` or, for each row, `(B, K)`. It decides what the
        ridge does to V's square and products.
        """
        least, most = self.returns_seen
        predicted = (of.with_b0(b0) @ eta.to(of.numbers).unsqueeze(-1)).squeeze(-1)
        return (b0 + predicted).clamp(least, most) - (least + most) / 2

    def later_luck(self, local: Completions, b0: Float[Tensor, "B #T"]) -> Float[Tensor, "B T"]:
        """The part of B that is the luck of later tokens, to show it."""
        parts = (self.baseline_parts(of, b0[rows]) for _, of, rows in read_in_blocks(local))
        return torch.cat([whole - state for state, whole in parts])

    def keeps_b0(
        self, local: Completions, gather: Callable[[Tensor], Tensor] | None, first_row: int
    ) -> tuple[Bool[Tensor, " B"], float]:
        """Which completions are to keep B0, and their share in the batch of all processes: [`worse_than_b0`]."""
        return worse_than_b0(partial(self.adjust, local), local, self.usual_power, gather, first_row)

    @property
    def usual_power(self) -> float:
        """What B0 left in earlier batches, per energy."""
        if self.sums is None:
            return 0.0
        sums = self.sums.total().values
        return (sums[-1, -1] / sums[0, 0].clamp(min=NOT_ZERO)).item()

    # Learning from a batch

    def update(
        self, local: Completions, b0: Float[Tensor, "B #T"], gather: Callable[[Tensor], Tensor]
    ) -> dict[str, float]:
        """
        Learn from a generation batch. Returns, for the B of before, and NaN if no return varies:

        - `explained`, 1 − Σ w (G − B)² / Σ w (G − B0)², also where a prompt kept B0; `explained_by_state`, the same
          without later luck
        - `weight` and `luck_weight`, c₁ and c₂; `restarted`, 1 if it was reset
        - `r2_at_end`, 1 − Σ (G − V)² / Σ (G − mean of G)² at the last tokens of completions, NaN before V is fitted
        - `slope_at_start`, of the advantage without later luck on the return, at the first tokens of a prompt's
          completions; for N = 1 of the batch's
        - those of [`LuckCheck.add`]
        """
        prompt, size, prompts = numbered(local, gather)
        fold = (prompt + self.prompts) % self.prompt_folds
        names, *local_sums, at_start, largest_ratio = self._measure(local, b0, fold)
        local_sums.append(by_prompt(at_start, prompt if local.num_generations > 1 else 0 * prompt, size))
        of_value, of_batch, of_draws, of_starts = _summed(local_sums, gather)
        batch = BatchSums(*of_batch.tolist())
        allowed = RESET_RATIO * batch.power if batch.varies else VARIES_NOT_RATIO * self.usual_power * batch.energy
        reset = self._count_lost(batch.left > max(allowed, ROUNDING * batch.squares), prompts)
        metrics = batch.metrics() | {"weight": self.weight, "luck_weight": self.luck_weight, "restarted": float(reset)}
        metrics["r2_at_end"] = math.nan if self.eta is None else batch.r2_at_end()
        metrics["slope_at_start"] = slope_within(of_starts)
        self._warn_of_knowing(metrics["slope_at_start"], local.num_generations)
        tokens = "all" if batch.tokens == 0 else str(int(batch.excluded))
        kind = "all" if batch.tokens == 0 else "some"  # are not finite
        if batch.excluded > 0 and kind not in self._warned:
            self._warned.add(kind)
            logger.warning(
                f"Hidden states or log-probs before {tokens} tokens of a generation batch are not finite: there "
                "'value' predicts nothing, subtracts no later luck and learns nothing. If the model runs in float16, "
                "try bfloat16."
            )
        if batch.tokens == 0:
            return metrics | {"luck_left_out": 1.0}
        if reset:
            what = "power where no return varied"
            if batch.varies:
                what = f"{batch.left / batch.power:.1f} times the power of 'rloo_pooled'"
            self.reset(f"it left {what}, as after a change of rewards")

        present, returns = local.mask > 0, local.returns.expand_as(local.mask)
        ends = [-returns.where(present, math.inf).amin(), returns.where(present, -math.inf).amax(), largest_ratio]
        least, most, largest = gather(torch.stack(ends).unsqueeze(0)).amax(dim=0).tolist()
        metrics |= self.luck_check.add(of_draws, largest)
        self.returns_seen = min(self.returns_seen[0], -least), max(self.returns_seen[1], most)
        self.prompts += prompts
        new = Sums((*names, TARGET), of_value)
        whole = new.total().after(self.value_sums, self.decay_per_batch)
        v_of_others = self._fitted_v(replace(new, values=whole.values - new.values))
        (of_both,) = _summed([self._sums_of(local, b0, fold, v_of_others)], gather)
        self.value_sums, self.eta = whole, self._fitted_v(whole)
        self.sums = Sums((*PHI, *PSI, TARGET), of_both).after(self.sums, self.decay_per_batch)
        self.tokens = self.decay_per_batch * self.tokens + batch.tokens
        self._fit()
        return metrics

    def _warn_of_knowing(self, slope: float, n: int) -> None:
        """Where what is subtracted before first tokens tells completions' rewards, in two batches in a row."""
        self.knew = self.knew + 1 if slope < KNOWING_SLOPE and n > 1 else 0
        if self.knew == 2:
            logger.warning(KNOWING.format(slope=slope))

    def _count_lost(self, lost: bool, prompts: int) -> bool:
        """Counts the prompts of lost batches in a row; whether to reset."""
        again = lost and self.doubted > 0
        self.doubted = self.doubted + prompts if lost else 0
        return again and self.doubted >= RESET_PROMPTS

    def _measure(self, local: Completions, b0: Tensor, fold: Tensor) -> list[Any]:
        """
        The names of V's columns; sums that it is fitted to, by fold; the power that B0 and B leave, with what else a
        batch tells; the sums that [`measured`] returns; of first tokens whether they are known, G, and A without later
        luck; the largest ratio.
        """
        sums, total = b0.new_zeros(1), b0.new_zeros(len(BatchSums._fields))
        of_draws, largest, at_start = b0.new_zeros(len(COLUMNS)), b0.new_ones(()), []
        for x, of, rows in read_in_blocks(local):
            b = b0[rows]
            target, weights = (x.returns - b).expand_as(x.mask), x.need("loss_energy")
            state, whole = (x.returns - values for values in self.baseline_parts(of, b))
            present = x.mask * of.known  # tokens alike
            power, left, left_by_state = ((weights * of_b.square()).sum() for of_b in (target, whole, state))
            squares = (weights * (x.returns.square() + b.square())).sum()
            counts = x.mask.sum() - present.sum(), present.sum(), weights.sum()
            block = BatchSums(power, left, left_by_state, squares, *counts, *self._at_end(x, of, b))
            total += torch.stack([*block])
            columns = torch.cat([of.with_b0(b), target.unsqueeze(-1)], dim=-1)
            sums = sums + products(columns, present, fold[rows], self.prompt_folds)
            of_block, largest_of_block = measured(of, x)
            of_draws, largest = of_draws + of_block, torch.maximum(largest, largest_of_block)
            at_start.append(torch.stack([present[:, 0], x.returns[:, 0], state[:, 0]], dim=1))
        return [of.names, sums, total, of_draws, torch.cat(at_start), largest]

    def _at_end(self, x: Completions, of: Prefix, b0: Tensor) -> list[Tensor]:
        """Of the last tokens: their number, and the sums of G, G² and (G − V)²."""
        last = x.mask * (x.mask.cumsum(dim=1) == x.mask.sum(dim=1, keepdim=True)) * of.known
        returns = left = x.returns.expand_as(last)
        if self.eta is not None:
            left = returns - self.centred_v(of, b0, self._eta_of(of.names)) - sum(self.returns_seen) / 2
        return [(last * values).sum() for values in (torch.ones_like(last), returns, returns.square(), left.square())]

    def _sums_of(self, local: Completions, b0: Tensor, fold: Tensor, etas: Tensor) -> Tensor:
        """Sums that θ and Γ are fitted to, by fold, with V of the other folds' prompts."""
        sums = b0.new_zeros(1)
        for x, of, rows in read_in_blocks(local):
            b = b0[rows]
            target, weights = (x.returns - b).expand_as(x.mask), x.need("loss_energy")
            v = self.centred_v(of, b, etas[fold[rows]])
            phi, psi = columns_of(of, b, v)
            columns = torch.cat([phi, later(of.luck.unsqueeze(-1) * psi), target.unsqueeze(-1)], dim=-1)
            sums = sums + products(columns, weights * of.known, fold[rows], self.prompt_folds)
        return sums

    def _fit(self) -> None:
        """Fit θ and Γ to the sums; each c by how well its part predicts folds that it was not fitted to."""
        assert self.sums is not None
        sums = self.sums.without(PSI) if self.luck_check.luck_left_out else self.sums
        both, sizes = solution(sums.total(), self.ridge), [len(PHI), len(PSI)]
        if not both.isfinite().all():
            return self.reset("its linear system has no finite solution")
        self.theta, self.gamma = both.split(sizes)
        most = min(1.0, self.prompts / self.prompts_enough)
        self.weight, self.luck_weight = confidences(sums, self.ridge, sizes).clamp(max=most).tolist()

    def _fitted_v(self, sums: Sums) -> Float[Tensor, "*folds K"]:
        """The coefficients of V."""
        names = sums.names[:-1]
        ridge = sums.values.new_full((len(names),), self.ridge_of_v)
        progress, states = (
            torch.tensor([name.startswith(of) for name in names]) for of in (PROGRESS, (STATE, MEAN_STATE))
        )
        if (sums.values.diagonal(dim1=-2, dim2=-1)[..., :-1][..., progress] > 0).any():
            ridge[states] *= STATES_RIDGE_FACTOR
        return solution(sums, ridge)

    @property
    def ridge_of_v(self) -> float:
        """
        The ridge of V, as a part of each number's variation. It falls with the prompts, since the text of one prompt
        says little about the next.
        """
        return 4 / max(self.prompts, 1)

    @property
    def ridge(self) -> float:
        """
        The ridge of θ and Γ, as a part of each column's variation: few prompts, and few tokens, are two reasons to
        distrust what was found.
        """
        assert self.sums is not None
        return max(0.5 / self.prompts, len(self.sums.names) / self.tokens)

    def reset(self, reason: str) -> None:
        logger.warning(f"The baseline 'value' discards what it has learned: {reason}. It continues as 'rloo_pooled'.")
        luck_check = self.luck_check  # of which rewards say nothing
        Value.__init__(self)
        self.luck_check = luck_check

    # Checkpoints

    def state_dict(self) -> dict[str, Any]:
        return saved_state(self)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        load_state(self, state)


def _summed(parts: list[Tensor], gather: Callable[[Tensor], Tensor]) -> list[Tensor]:
    """The sums of all processes; float64, on the CPU."""
    flat = gather(torch.cat([values.flatten() for values in parts]).unsqueeze(0)).sum(dim=0).cpu().double()
    split = flat.split([values.numel() for values in parts])
    return [part.view_as(values) for part, values in zip(split, parts, strict=True)]
