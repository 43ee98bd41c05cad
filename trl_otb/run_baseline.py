"""A run's baseline: what it does with a generation batch, what it has learned, and what checkpoints keep of it."""

import copy
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from .baselines import Baseline, Completions, credit, find_baseline
from .metrics import completion_statistics


class Processes(NamedTuple):
    """
    The processes that share a generation batch. Every process must call `gather`, with tensors of one shape; it
    concatenates them.
    """

    gather: Callable[[Tensor], Tensor] = lambda values: values
    number: int = 1
    rank: int = 0


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
        processes: Processes | None = None,
        *,
        b0: Float[Tensor, "B 1"] | None = None,
        returns: Float[Tensor, " B_all"] | None = None,
        learn: bool = False,
    ) -> Step:
        """
        Compute the advantages of a generation batch, compare them with a reference, and learn from it.

        The reference is the group mean; `rloo` if the baseline is unbiased; `rloo_pooled` for N = 1. A `ValueError` is
        raised if advantages are not finite, or a user's baseline returned a wrong result.

        Args:
            local: The completions of this process, with all that the baseline needs.
            scale, processes: The divisor of advantages, by default 1; by default this process alone.
            b0: B0 if it is known already: then groups need not be whole, and B0 is the reference.
            returns: Of the completions of all processes, NaN without a reward, for the running scale.
            learn: Whether it is a batch of training.
        """
        processes, n = processes or Processes(), local.num_generations
        if self.running_scale is not None and returns is not None:
            scale = scale * self.running_scale.of(returns, n, learn)
        scale = torch.as_tensor(scale, device=local.mask.device).expand(len(local), 1)
        spanning = len(local) % n > 0  # groups span processes
        rows = slice(processes.rank * len(local), (processes.rank + 1) * len(local))

        def credited(by: Baseline) -> Any:
            if b0 is not None:
                return credit(by, local, b0=b0)
            if processes.number > 1 and (by.scope == "batch" or spanning):
                return credit(by, local, lambda part, tokens: part.gathered(processes.gather, tokens), rows)
            return credit(by, local)

        chosen, group_mean = credited(self.entry), credited(find_baseline("group_mean"))
        reference = group_mean
        if b0 is None and (n == 1 or self.entry.unbiased):
            reference = credited(find_baseline("rloo_pooled" if n == 1 else "rloo"))
        advantages = chosen.advantages / scale
        if (~advantages.isfinite()).any():
            raise ValueError(
                f"Advantages are not finite: sums of rewards of up to {local.returns.abs().max().item():.1e} overflow "
                "float32, which holds up to 3.4e+38. Scale the rewards, or `reward_weights`, down."
            )
        statistics = processes.gather(completion_statistics(local, chosen, reference, scale))
        return Step(
            advantages=advantages,
            baselines=chosen.baselines,
            group_mean_advantages=group_mean.advantages / scale if n > 1 else None,
            scale=scale,
            per_token=self.entry.per_token,
            statistics=statistics,
            learned=self.learn(local, chosen.b0, processes.gather) if learn else {},
        )

    def learn(self, local: Completions, b0: Tensor, gather: Callable[[Tensor], Tensor]) -> dict[str, float]:
        """Updates a learning baseline from completions with their B0; returns its metrics."""
        if not self.entry.learns:
            return {}
        metrics = self.entry.learn(local, b0, gather)
        self.has_learned = True
        return metrics

    def copied(self) -> "RunBaseline":
        """A copy with its own learned state, which does not scale."""
        other = copy.copy(self)
        other.entry, other.running_scale = replace(self.entry, estimator=copy.deepcopy(self.entry.estimator)), None
        return other

    # In checkpoints

    @property
    def has_state(self) -> bool:
        """Whether there is anything to keep in checkpoints."""
        return self.entry.learns or self.running_scale is not None

    def state_dict(self) -> dict[str, Any]:
        """The learned state, as a checkpoint restores it."""
        state: dict[str, Any] = {} if self.running_scale is None else {"scale": self.running_scale.sums}
        return state | ({"baseline": self.entry.name, "state": self.entry.state()} if self.entry.learns else {})

    def load_state_dict(self, state: dict[str, Any]) -> bool:
        """Restore it. Returns False, and resets, if `state` is another baseline's, or none."""
        if self.running_scale is not None:
            self.running_scale.sums = tuple(state.get("scale", (0.0, 0.0)))
        if not self.entry.learns:
            return True
        if state.get("baseline") == self.entry.name:
            self.entry.estimator.load_state_dict(state["state"])
            self.has_learned = True
            return True
        self.entry, self.has_learned = replace(self.entry, estimator=type(self.entry.estimator)()), False
        return False


class RunningScale:
    """The standard deviation of returns within groups, over earlier batches; a batch ago weighs 0.9 of the present."""

    def __init__(self) -> None:
        self.sums = (0.0, 0.0)  # of the variances of groups, and of their number; groups of equal returns left out

    def of(self, returns: Float[Tensor, " B_all"], num_generations: int, learn: bool) -> float:
        """
        The scale of a batch with these returns: by earlier batches, and by its own if there are none. 1 if
        nothing varied. N = 1: the whole batch is one group.
        """
        groups = returns.view(-1, num_generations if num_generations > 1 else len(returns)).double()
        number = (~groups.isnan()).sum(dim=1)
        squares = (groups - groups.nanmean(dim=1, keepdim=True)).square().nanmean(dim=1)
        variances = (squares * (number / (number - 1))).sqrt().square()
        variances = variances[variances > 0]  # NaN is not
        new = (0.9 * self.sums[0] + variances.sum().item(), 0.9 * self.sums[1] + len(variances))
        total, count = self.sums if self.sums[1] > 0 else new
        if learn:
            self.sums = new
        return (total / count) ** 0.5 if count > 0 else 1.0
