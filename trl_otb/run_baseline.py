"""A run's baseline: what it does with a generation batch, what it has learned, and what checkpoints keep of it."""

import copy
import io
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from .baselines import Baseline, Completions, Credit, credit, find_baseline
from .baselines.value import ROUNDING, VARIES_NOT_RATIO
from .metrics import completion_statistics


WORSE_RATIO = 1.5  # of the power that B leaves in other prompts to B0's: then a prompt keeps B0
WORSE_RATIO_OF_HALF = 2.0  # the same for N = 1, where half of the batch decides


@dataclass(frozen=True)
class Step:
    """What a run's baseline makes of a generation batch, for the completions of this process."""

    advantages: Float[Tensor, "B #T"]  # (G − B) / scale, by generated token, or one per completion
    baselines: Float[Tensor, "B #T"]
    group_mean_advantages: Float[Tensor, "B 1"] | None  # (G − group mean) / scale; None for N = 1
    scale: Float[Tensor, "B 1"]
    per_token: bool
    statistics: Float[Tensor, "B_all S"]  # of the completions of all processes, a column for each of `STATISTICS`
    learned: dict[str, float]  # metrics of a baseline that learned
    # Of `value`, if parts were asked for: B0, and the luck of later tokens
    b0: Float[Tensor, "B #T"] | None = None
    later_luck: Float[Tensor, "B T"] | None = None


class RunBaseline:
    """A run's baseline, with what it has learned, and the running scale of advantages if there is one."""

    def __init__(self, baseline: Baseline, running_scale: bool = False) -> None:
        self.entry = baseline.instance()
        self.running_scale = RunningScale() if running_scale else None
        self.has_learned = False

    def step(
        self,
        local: Completions,
        scale: Float[Tensor, "B 1"] | float = 1.0,
        *,
        gather: Callable[[Tensor], Tensor] | None = None,
        first_row: int = 0,
        b0: Float[Tensor, "B 1"] | None = None,
        returns: Float[Tensor, " B_all"] | None = None,
        learn: bool = False,
        parts: bool = False,
    ) -> Step:
        """
        Compute the advantages of a generation batch, compare them with a reference, and learn from it.

        The reference is the group mean; `rloo` if the baseline is unbiased; `rloo_pooled` for N = 1. A `ValueError` is
        raised if advantages are not finite, or a user's baseline returned a wrong result.

        Args:
            local: The completions of this process, with all that the baseline needs.
            scale: The divisor of advantages.
            gather: With several processes, concatenates their tensors of one shape; all must call it.
            first_row: The place of `local` among the completions of all processes.
            b0: B0 if it is known already: then groups need not be whole, and B0 is the reference.
            returns: Of the completions of all processes, NaN without a reward, for the running scale.
            learn: Whether it is a batch of training.
            parts: Whether to tell what B is made of, which takes one more prediction.
        """
        n = local.num_generations
        if self.running_scale is not None and returns is not None:
            scale = scale * self.running_scale.of(returns, n, learn)
        scale = torch.as_tensor(scale, device=local.mask.device).expand(len(local), 1)

        def credit_by(baseline: Baseline) -> Credit:
            spanning = len(local) % n > 0  # groups span processes
            if b0 is not None or gather is None or not (baseline.scope == "batch" or spanning):
                return credit(baseline, local, b0=b0)
            rows = slice(first_row, first_row + len(local))
            return credit(baseline, local, lambda part, tokens: part.gathered(gather, tokens), rows)

        chosen, group_mean = credit_by(self.entry), credit_by(find_baseline("group_mean"))
        kept = {}
        if self.entry.built_in and self.entry.adjusts and b0 is None:
            chosen, share = self._kept_where_worse(chosen, local, gather, first_row)
            kept = {f"{self.entry.name}/kept": share}
        reference = group_mean
        if b0 is None and (n == 1 or self.entry.unbiased):
            reference = credit_by(find_baseline("rloo_pooled" if n == 1 else "rloo"))
        advantages = chosen.advantages / scale
        if (~advantages.isfinite()).any():
            raise ValueError(
                f"Advantages are not finite: sums of rewards of up to {local.returns.abs().max().item():.1e} overflow "
                "float32, which holds up to 3.4e+38. Scale the rewards, or `reward_weights`, down."
            )
        statistics = completion_statistics(local, chosen, reference, scale)
        luck: Tensor | None = None
        if parts and hasattr(self.entry.estimator, "later_luck"):
            luck = self.entry.estimator.later_luck(local, chosen.b0)
            luck = luck.where(chosen.baselines != chosen.b0, 0.0)  # a prompt that keeps B0 has none
        return Step(
            advantages=advantages,
            baselines=chosen.baselines,
            group_mean_advantages=group_mean.advantages / scale if n > 1 else None,
            scale=scale,
            per_token=self.entry.per_token,
            statistics=statistics if gather is None else gather(statistics),
            learned=self.learn(local, chosen.b0, gather) | kept if learn else {},
            b0=None if luck is None else chosen.b0,
            later_luck=luck,
        )

    def _kept_where_worse(
        self, chosen: Credit, local: Completions, gather: Callable[[Tensor], Tensor] | None, first_row: int
    ) -> tuple[Credit, float]:
        """
        The credit with B0 in the place of B for each prompt if B leaves more than 1.5 times B0's power in the other
        prompts of the batch, as where rewards jump; and the share of completions for which that is so.

        The other prompts are measured with the B0 of their own group, which takes two completions. If none of their
        returns vary, B0's power is 0, and B may leave half of the power that B0 left in earlier batches. For N = 1 each
        half of the batch is measured with the B0 of that half, and decides for the other, if B leaves more than twice
        B0's power. So no decision depends on the completions that it is made for.
        """
        n, energy = local.num_generations, local.need("loss_energy")
        own = slice(first_row, first_row + len(local))

        def parts(rows: int) -> Tensor:
            """The groups, or random halves, which are the same on all processes."""
            if n > 1:
                return torch.arange(rows) // n
            return torch.randperm(rows, generator=torch.Generator().manual_seed(0)) % 2

        x, at = local, slice(None)
        if gather is not None and (n == 1 or len(local) % n > 0):  # parts span processes
            x, at = local.gathered(gather, tokens=False), own
        if n > 1:
            b0 = x.weighted_mean(x.members.expand_as(x.returns), x.returns, x.members, leave_one_out=True)
        else:
            half = parts(len(x)).to(x.members.device)
            others = (half == half.unsqueeze(1)).float().fill_diagonal_(0.0)
            b0 = others @ (x.members * x.returns) / (others @ x.members).clamp(min=1)
        b0 = b0[at][:, : local.mask.size(1)]
        left = credit(self.entry, local, b0=b0).advantages
        powers = [(energy * of.square()).sum(dim=1) for of in (left, local.returns - b0, local.returns)]
        sums = torch.stack([*powers, energy.sum(dim=1), local.members.flatten()], dim=1)
        sums = (sums if gather is None else gather(sums)).cpu().double()
        part = parts(len(sums))
        of_parts = sums.new_zeros(int(part.max()) + 1, 5).index_add(0, part, sums)
        left, of_b0, squares, energies, members = of_parts.unbind(dim=1)
        # Beyond rounding; of a single completion nothing is known
        measured = [power.where((power > ROUNDING * squares) & (members > 1), 0.0) for power in (left, of_b0)]
        of_parts = torch.stack([*measured, energies * (members > 1)], dim=1)
        others = (1 - torch.eye(len(of_parts), dtype=sums.dtype)) @ of_parts  # the sum less own would cancel
        allowed = (WORSE_RATIO if n > 1 else WORSE_RATIO_OF_HALF) * others[:, 1]
        usual = VARIES_NOT_RATIO * self.entry.estimator.usual_power * others[:, 2]
        worse = (others[:, 0] > allowed.where(others[:, 1] > 0, usual))[part]
        baselines = chosen.b0.where(worse[own].unsqueeze(1).to(local.mask.device), chosen.baselines)
        chosen = chosen._replace(advantages=(local.returns - baselines) * local.mask, baselines=baselines)
        return chosen, worse.float().mean().item()

    def learn(
        self, local: Completions, b0: Tensor, gather: Callable[[Tensor], Tensor] | None = None
    ) -> dict[str, float]:
        """Updates a learning baseline from completions with their B0; returns its metrics as `name/…`."""
        if not self.entry.learns:
            return {}
        local = local if self.entry.per_token else local.totals()
        metrics = self.entry.estimator.update(local, b0, gather or (lambda values: values))
        if not isinstance(metrics, dict | None):
            raise ValueError(
                f"The baseline {self.entry.name!r} returned {metrics!r} from `update`: give a `dict` of numbers."
            )
        self.has_learned = True
        return {f"{self.entry.name}/{name}": float(value) for name, value in (metrics or {}).items()}

    def copied(self) -> "RunBaseline":
        """A copy with its own learned state, which does not scale."""
        other = copy.deepcopy(self)
        other.running_scale = None
        return other

    def state_dict(self) -> dict[str, Any]:
        """What checkpoints keep, as one restores it, or nothing; a `ValueError` if what was learned is no `dict`."""
        state: dict[str, Any] = {}
        if self.running_scale is not None:
            state = {"scale": self.running_scale.sums, "scale_shrunk": self.running_scale.shrunk}
        if not self.entry.learns:
            return state
        learned, file = self.entry.estimator.state_dict(), io.BytesIO()
        try:
            torch.save(learned, file)
            file.seek(0)
            learned = dict(torch.load(file, weights_only=True, map_location="cpu"))
        except Exception as error:  # of pickle, of all kinds
            raise ValueError(
                f"The baseline {self.entry.name!r} returned a {type(learned).__name__} from `state_dict`, which no "
                f"checkpoint would give back ({type(error).__name__}): it must return a `dict` of tensors, numbers and "
                "text."
            ) from error
        return state | {"baseline": self.entry.name, "state": learned}

    def load_state_dict(self, state: dict[str, Any]) -> bool:
        """Restore it. Returns False, and resets, if `state` is another baseline's, or none."""
        if self.running_scale is not None:
            self.running_scale.sums = tuple(state.get("scale", (0.0, 0.0)))
            self.running_scale.shrunk = tuple(state.get("scale_shrunk", (0.0, 0.0, 0)))
        if not self.entry.learns:
            return True
        if state.get("baseline") == self.entry.name:
            self.entry.estimator.load_state_dict(state["state"])
            self.has_learned = True
            return True
        self.entry, self.has_learned = replace(self.entry, estimator=type(self.entry.estimator)()), False
        return False


class RunningScale:
    """
    The standard deviation of returns within groups, over earlier batches; a batch ago weighs 0.9 of the present.

    It is between a tenth of the batch's own deviation and ten times it, so that advantages are neither beyond some
    tens nor all but 0 where rewards suddenly change; in such a batch alone it depends on the batch's own returns, which
    biases a little. After 20 batches in a row whose own deviation was less than half of it, only these count: with
    rare successes beside a small dense reward, as with half of the batches without a success, fewer happen by chance.
    Rounding is no variance.
    """

    shrunk_batches = 20

    def __init__(self) -> None:
        self.sums = (0.0, 0.0)  # of the variances of groups, and of their number; groups of equal returns left out
        self.shrunk = (0.0, 0.0, 0)  # the same of the last batches in a row with less than half of it; their number

    def of(self, returns: Float[Tensor, " B_all"], num_generations: int, learn: bool) -> float:
        """By earlier batches, or by these returns if there are none; 1 if nothing varied. For N = 1 one group."""
        groups = returns.cpu().double().view(-1, num_generations if num_generations > 1 else len(returns))
        number = (~groups.isnan()).sum(dim=1)
        squares = (groups - groups.nanmean(dim=1, keepdim=True)).square().nanmean(dim=1)
        variances = (squares * (number / (number - 1))).sqrt().square()
        variances = variances[variances > 1e-12 * groups.square().nanmean(dim=1)]  # of float32 returns; NaN is not
        if len(variances) == 0:
            usual = _mean(self.sums) ** 0.5 if self.sums[1] > 0 else 1.0
            self.sums = (0.9 * self.sums[0], 0.9 * self.sums[1]) if learn else self.sums
            return usual
        batch = variances.sum().item(), float(len(variances))
        own = _mean(batch) ** 0.5
        usual = _mean(self.sums) ** 0.5 if self.sums[1] > 0 else own
        if learn:
            self.sums = 0.9 * self.sums[0] + batch[0], 0.9 * self.sums[1] + batch[1]
            total, count, batches = self.shrunk
            longer = (0.9 * total + batch[0], 0.9 * count + batch[1], batches + 1)
            self.shrunk = longer if usual > 2 * own else (0.0, 0.0, 0)
            if self.shrunk[2] == self.shrunk_batches:
                self.sums, self.shrunk = self.shrunk[:2], (0.0, 0.0, 0)
        return min(max(usual, own / 10), 10 * own)


def _mean(sums: tuple[float, float]) -> float:
    return sums[0] / sums[1]
