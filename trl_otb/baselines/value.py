"""A baseline that depends on the state: linear in prefix sums and hidden states, fitted to earlier batches."""

import copy
import logging
import math
from collections.abc import Callable, Iterator
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from ..energy import prefix_sums
from .completions import Completions
from .pooled import pooled


logger = logging.getLogger(__name__)

B0_COLUMN = 1  # among the features
ROUNDING = 1e-12  # of squared float32 numbers, relative
RESET_RATIO = 2.0  # of the power that B left to B0's: `value` is reset after two such batches in a row
RESET_AT_ONCE_RATIO = 100.0
FEATURE_BLOCK = 2**13  # tokens whose features, some 75 numbers each, are in memory at once, in small batches


class Value:
    """Per token: `rloo_pooled` plus a prediction from what the completion has written so far.

        B_{t,i} = B0_i + c θ·φ(x_{t,i}),   θ = argmin Σ w_t (G_t − B0 − θ·φ(x_t))²   over earlier generation batches

    Source: this project. To first order b_t adds E‖s_t‖² (G_t − b_t)² to the variance of the gradient, so the best
    baseline of a state x_t (prompt and y_<t) is E[‖s_t‖² G_t | x_t] / E[‖s_t‖² | x_t] (Greensmith, Bartlett and
    Baxter, 2004). With w_t for ‖s_t‖² this is weighted least squares, which has a closed form in a linear class.

    φ holds 1, B0 (its coefficient in B is kept between 0 and 1), the rewards earned before t, sums over the tokens
    before t (energy, surprisal, their number, and the square roots of these), and the policy's hidden states at two
    thirds of its depth, randomly projected: at the position that predicts y_t, and the mean up to it. The weight of a
    batch decays by 0.9 per batch. c, between 0 and 1, and the ridge are chosen by cross-validation over four folds of
    prompts; c is shrunk as the folds disagree (positive-part James–Stein), and has a limit, 1/4 after the first batch:
    it doubles while the decayed sum of what B gained, Σ w (G − B0)² − Σ w (G − B)² per unit of c, exceeds its standard
    error, and halves while the sum is negative. So B falls back to B0, and is B0 in the first batch. B stays within
    the range of returns seen so far.

    Assumption: what states predict about returns carries over from earlier prompts and a slightly older policy.
    `value` is reset after a batch of which B left over twice B0's power, if one of these holds: it is over twice B0's
    usual power, too; it is over 100 times B0's; it happened in the batch before.

    Bias: unbiased, since B_t depends on what precedes y_t, and θ and c on earlier batches. Importance ratios, which
    may depend on later tokens, weight what it learns from; B itself does not depend on them.

    Use it for N of 1 to 8 and 4 or more prompts per step. It gains nothing over `rloo_pooled` where
    `otb/value/explained` stays near 0.
    """

    decay_per_batch = 0.9  # of a batch's weight
    ridges = (0.01, 0.03, 0.1, 0.3, 1.0, 3.0)  # in average batches
    prompt_folds = 4
    weighted_by = "energy"  # anything else makes it an ordinary value function

    def __init__(self) -> None:
        self.theta: Tensor | None = None  # (K,)
        self.weight = 0.0  # c
        self._most_weight = 0.25
        self._gains = (0.0, 0.0)  # over c, of earlier batches: the decayed sum, and that of their squares
        self._sums: dict[str, Tensor] = {}  # over earlier batches; float64, on the CPU
        self._batches = 0.0  # the sum of their weights
        self._prompts = 0  # in all batches
        self._returns_seen = (math.inf, -math.inf)  # minimum and maximum
        self._power = 0.0  # of B0 in earlier batches, the decayed sum
        self._doubted = False  # whether B left too much of the last batch, which had little power
        self._warned = False  # that something is not finite

    def __call__(self, x: Completions) -> Float[Tensor, "B #T"]:
        """B0, `rloo_pooled`, of returns or of rewards-to-go."""
        return pooled(x, x.returns, torch.ones_like(x.scored))

    def adjust(self, local: Completions, b0: Float[Tensor, "B #T"]) -> Float[Tensor, "B #T"]:
        """B; or B0, before anything is predicted."""
        if self.theta is None or self.weight == 0.0:
            return b0
        blocks = _with_b0(local, b0)
        return torch.cat([self._baseline(b, self._predicted(self._features(x, b))) for x, b in blocks])

    def update(
        self, local: Completions, b0: Float[Tensor, "B #T"], gather: Callable[[Tensor], Tensor]
    ) -> dict[str, float]:
        """
        Learn from a generation batch. Returns `explained`, 1 − Σ w (G − B)² / Σ w (G − B0)² for the θ and c that were
        used, NaN if B0 is each return; `weight`, c; and `restarted`, 1 if it was reset.
        """
        sums = self._sums_of(local, b0)
        flat = gather(torch.cat([values.flatten() for values in sums.values()]).unsqueeze(0)).sum(dim=0)
        split = flat.cpu().double().split([values.numel() for values in sums.values()])
        new = {name: part.view_as(values) for (name, values), part in zip(sums.items(), split, strict=True)}
        power, left, squares, excluded = (new.pop(name).item() for name in ("power", "left", "squares", "excluded"))
        varies = power > ROUNDING * squares
        reset = self._needs_reset(power, left, varies)
        explained = 1 - left / power if varies else math.nan
        metrics = {"explained": explained, "weight": self.weight, "restarted": float(reset)}
        if excluded > 0 and not self._warned:
            self._warned = True
            logger.warning(
                f"Hidden states or log-probs before {int(excluded)} tokens of a generation batch are not finite: there "
                "'value' predicts nothing and learns nothing. If the model runs in float16, try bfloat16."
            )
        if new["φφ"][:, 0, 0].sum() == 0:
            return metrics  # there is no token to learn from
        if reset:
            self._reset(f"it left {left / power:.1f} times the power of 'rloo_pooled', as after a change of rewards")
        elif varies and self.weight > 0:
            self._limit_weight(power - left)

        present, returns = local.mask > 0, local.returns.expand_as(local.mask)
        ends = torch.stack([-returns.where(present, math.inf).amin(), returns.where(present, -math.inf).amax()])
        least, most = gather(ends.unsqueeze(0)).amax(dim=0).tolist()
        self._returns_seen = min(self._returns_seen[0], -least), max(self._returns_seen[1], most)
        self._prompts += int(gather(local.prompt.amax().view(1)).amax()) + 1
        if not all(values.isfinite().all() for values in new.values()):
            self._reset("a generation batch has sums that are not finite")
            return metrics
        self._batches = self.decay_per_batch * self._batches + 1
        self._power = self.decay_per_batch * self._power + power
        for name, values in new.items():
            self._sums[name] = self.decay_per_batch * self._sums.get(name, torch.zeros_like(values)) + values
        self._fit()
        return metrics

    def state_dict(self) -> dict[str, Any]:
        return copy.deepcopy({name: value for name, value in vars(self).items() if name != "_warned"})

    def load_state_dict(self, state: dict[str, Any]) -> None:
        new = {"_doubted": False, "_power": 0.0}  # since 0.4
        if (new | state).keys() != self.state_dict().keys():
            raise ValueError(
                "The state of 'value' is damaged or another version's: it holds "
                f"{', '.join(map(repr, state)) or 'nothing'}. Without the checkpoint's `baseline.pt` it starts empty."
            )
        vars(self).update(copy.deepcopy(new | state))

    def _features(self, x: Completions, b0: Float[Tensor, "B #T"]) -> Float[Tensor, "B T K"]:
        """φ, from what precedes each token, never from the token itself."""
        mask = x.mask

        def before(values: Float[Tensor, "B T"]) -> Float[Tensor, "B T"]:
            return torch.nn.functional.pad(prefix_sums(values), (1, 0))[:, :-1]

        count = before(mask)
        sums = [before(x.need("energy")), before(-x.need("logps").float()).clamp(min=0), count]
        earned = x.returns[:, :1] - x.returns
        numbers = [torch.ones_like(mask), b0, earned, *sums, *(values.sqrt() for values in sums)]
        states = x.need("states")
        mean = prefix_sums(states) / (count + 1).unsqueeze(-1)
        return torch.cat([torch.stack([x.expand_as(mask) for x in numbers], dim=-1), states, mean], dim=-1)

    def _predicted(self, features: Float[Tensor, "B T K"]) -> Float[Tensor, "B T"]:
        """θ·φ; 0 where it is not finite."""
        if self.theta is None:
            return torch.zeros_like(features[..., 0])
        if features.size(-1) != len(self.theta):
            raise ValueError(
                f"'value' has learned from {len(self.theta)} numbers per token, and here are {features.size(-1)}: its "
                "state is of another model or version. Without the checkpoint's `baseline.pt` it starts empty."
            )
        predicted = features @ self.theta.to(features)
        return predicted.where(predicted.isfinite(), 0.0)

    def _baseline(self, b0: Float[Tensor, "B #T"], predicted: Float[Tensor, "B T"]) -> Float[Tensor, "B T"]:
        """B0 + c θ·φ, clamped to the range of returns seen, extended to B0."""
        least, most = self._returns_seen
        return (b0 + self.weight * predicted).clamp(b0.clamp(max=least), b0.clamp(min=most))

    def _sums_of(self, local: Completions, b0: Float[Tensor, "B #T"]) -> dict[str, Tensor]:
        """Sums over the tokens of a generation batch, in float64 if the device supports it."""
        precise = torch.float32 if b0.device.type == "mps" else torch.float64
        total: dict[str, Tensor] = {}
        for x, b in _with_b0(local, b0):
            features = self._features(x, b)
            left = (x.returns - self._baseline(b, self._predicted(features))).to(precise)
            residual = (x.returns - b).expand_as(x.mask).to(precise)
            loss_energy = x.need("loss_energy").to(precise)
            finite = features.sum(dim=-1).isfinite()
            features = features.where(finite.unsqueeze(-1), 0.0)
            weights = (loss_energy if self.weighted_by == "energy" else x.mask.to(precise)) * finite
            columns = features.size(-1) + 1
            products = torch.zeros(self.prompt_folds, columns, columns, dtype=precise, device=b0.device)
            fold_of = ((x.prompt + self._prompts) % self.prompt_folds).tolist()
            for fold in set(fold_of):
                rows = [row for row, of_row in enumerate(fold_of) if of_row == fold]
                table = torch.cat([features[rows], residual[rows].unsqueeze(-1)], dim=-1).flatten(0, 1)
                products[fold] = (table * weights[rows].flatten().unsqueeze(1)).T @ table
            sums = {
                "φφ": products[:, :-1, :-1],
                "φ residual": products[:, :-1, -1],
                "power": (loss_energy * residual.square()).sum(),
                "left": (loss_energy * left.square()).sum(),
                "squares": (loss_energy * (x.returns.to(precise).square() + b.to(precise).square())).sum(),
                "excluded": (x.mask * ~finite).sum().to(precise),
            }
            for name, values in sums.items():
                total[name] = total[name] + values if name in total else values
        return total

    def _needs_reset(self, power: float, left: float, varies: bool) -> bool:
        """Whether what was learned is of no use any more, from the power that B0 and B left of a batch."""
        usual, lost = self._power / max(self._batches, 1.0), varies and left > RESET_RATIO * power
        # In a batch in which returns happen to be nearly equal, usual errors are large compared with B0's
        reset = lost and (self._doubted or left > min(RESET_RATIO * max(power, usual), RESET_AT_ONCE_RATIO * power))
        self._doubted = lost and not reset
        return reset

    def _limit_weight(self, gain: float) -> None:
        """Change the limit of c by how much less power B left of a batch than B0."""
        gain /= self.weight
        gains = self.decay_per_batch * self._gains[0] + gain
        squares = self.decay_per_batch**2 * self._gains[1] + gain**2
        self._gains = gains, squares
        if gains < 0:
            self._most_weight = max(self._most_weight / 2, 1 / 64)
        elif gains > math.sqrt(squares):  # never after a single batch
            self._most_weight = min(2 * self._most_weight, 1.0)

    def _fit(self) -> None:
        """Fit θ and c to the sums, with the ridge that predicts held-out prompts best."""
        squares, products = self._sums["φφ"], self._sums["φ residual"]
        without_fold = squares.sum(dim=0) - squares, products.sum(dim=0) - products
        thetas = torch.stack([self._solution(*without_fold, ridge) for ridge in self.ridges])  # (ridges, folds, K)
        of_folds = torch.einsum("rfk,fk->rf", thetas, products)
        agreement, error = of_folds.sum(dim=1), self.prompt_folds * of_folds.var(dim=1)  # the squared standard error
        size = torch.einsum("rfk,fkl,rfl->r", thetas, squares, thetas)
        trust = (1 - error / agreement.square().clamp(min=1e-300)).clamp(min=0)
        weights = trust * (agreement / size.clamp(min=1e-30)).clamp(0, 1)
        gain = 2 * weights * agreement - weights.square() * size
        best = int(gain.nan_to_num(nan=-math.inf).argmax())
        self.theta = self._solution(squares.sum(dim=0), products.sum(dim=0), self.ridges[best])
        self.weight = min(weights[best].item(), self._most_weight)
        if not (self.theta.isfinite().all() and math.isfinite(self.weight)):
            self._reset("its linear system has no finite solution")

    def _solution(
        self, squares: Float[Tensor, "*folds K K"], products: Float[Tensor, "*folds K"], ridge: float
    ) -> Float[Tensor, "*folds K"]:
        """θ; shifting or scaling features does not change the predictions."""
        diagonal, constant = squares.diagonal(dim1=-2, dim2=-1), squares[..., 0]
        varies = (diagonal - constant.square() / constant[..., :1].clamp(min=1e-30)).clamp(min=0)
        penalty = ridge / self._batches * varies + 1e-9 * diagonal
        penalty = penalty.where(diagonal > 0, 1.0)  # for a feature that is always 0
        squares = squares + torch.diag_embed(penalty)
        # The coefficient of B0 in B lies between 0 and 1. In a few batches the fit would leave that range: the others'
        # returns predict a completion's own there, since all of them have the same sum
        of_b0 = torch.linalg.solve_ex(squares, products)[0][..., B0_COLUMN].clamp(-1, 0).unsqueeze(-1)
        rest = [i for i in range(products.size(-1)) if i != B0_COLUMN]
        others = products[..., rest] - squares[..., rest, B0_COLUMN] * of_b0
        theta = torch.linalg.solve_ex(squares[..., rest, :][..., rest], others)[0]
        return torch.cat([theta[..., :B0_COLUMN], of_b0, theta[..., B0_COLUMN:]], dim=-1)

    def _reset(self, reason: str) -> None:
        logger.warning(f"The baseline 'value' discards what it has learned: {reason}. It continues as 'rloo_pooled'.")
        self.theta, self.weight, self._most_weight, self._gains = None, 0.0, 0.25, (0.0, 0.0)
        self._sums, self._batches, self._power, self._returns_seen = {}, 0.0, 0.0, (math.inf, -math.inf)


def _with_b0(local: Completions, b0: Tensor) -> Iterator[tuple[Completions, Tensor]]:
    """Blocks of rows with their B0."""
    first = 0
    for x in local.blocks(max(FEATURE_BLOCK, local.mask.numel() // 256)):
        yield x, b0[first : first + len(x)]
        first += len(x)
