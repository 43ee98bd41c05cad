"""A run's baseline: what it does with a generation batch, what it has learned, and what checkpoints keep of it."""

import copy
import io
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from ..baselines import Advantages, Baseline, Completions, find_baseline, gathered, subtract
from .metrics import completion_statistics
from .scale import RunningScale


STATE_FILE = "baseline.pt"  # in a checkpoint


@dataclass(frozen=True)
class BatchAdvantages:
    """What a run's baseline makes of a generation batch, for the completions of this process."""

    advantages: Float[Tensor, "B #T"]  # (G − B) / scale, by generated token, or one per completion
    baselines: Float[Tensor, "B #T"]
    b0: Float[Tensor, "B #T"]
    scale: Float[Tensor, "B 1"]
    per_token: bool
    group_mean_advantages: Float[Tensor, "B 1"] | None  # (G − group mean) / scale; None for N = 1
    statistics: Float[Tensor, "B_all S"]  # of the completions of all processes, a column for each of `STATISTICS`
    learned: dict[str, float]  # metrics of a baseline that learns
    later_luck: Float[Tensor, "B T"] | None  # the part of B that is the luck of later tokens, if parts were asked for


def reference_of(baseline: Baseline, num_generations: int) -> str:
    """The name of the baseline that a run's is compared with."""
    return "rloo_pooled" if num_generations == 1 else "rloo" if baseline.unbiased else "group_mean"


class RunBaseline:
    """A run's baseline, with what it has learned, and the running scale of advantages if there is one."""

    def __init__(self, baseline: Baseline, running_scale: bool = False) -> None:
        self.entry = baseline.instance()
        self.running_scale = RunningScale() if running_scale else None
        self.has_learned = False

    def advantages_of(
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
    ) -> BatchAdvantages:
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
            parts: Whether to return `later_luck`, which takes one more prediction.
        """
        n = local.num_generations
        if self.running_scale is not None and returns is not None:
            scale = scale * self.running_scale.of(returns, n, learn)
        scale = torch.as_tensor(scale, device=local.mask.device).expand(len(local), 1)

        def under(baseline: Baseline) -> Advantages:
            compares_others = baseline.scope == "batch" or len(local) % n > 0  # prompts, or the rest of a group
            if gather is None or b0 is not None or not compares_others:
                return subtract(baseline, local, b0=b0)
            rows = slice(first_row, first_row + len(local))
            return subtract(baseline, local, lambda part, tokens: gathered(part, gather, tokens), rows)

        chosen, group_mean, kept = under(self.entry), under(find_baseline("group_mean")), {}
        if self.entry.is_bounded and b0 is None:  # the bound takes whole groups
            keeps_b0, share = self.entry.estimator.keeps_b0(local, gather, first_row)
            baselines = chosen.b0.where(keeps_b0.unsqueeze(1), chosen.baselines)
            chosen = Advantages((local.returns - baselines) * local.mask, baselines, chosen.b0)
            kept = {f"{self.entry.name}/kept": share}
        name = "group_mean" if b0 is not None else reference_of(self.entry, n)
        reference = group_mean if name == "group_mean" else under(find_baseline(name))
        advantages = chosen.advantages / scale
        if (~advantages.isfinite()).any():
            raise ValueError(
                f"Advantages are not finite: sums of rewards of up to {local.returns.abs().max().item():.1e} overflow "
                "float32, which holds up to 3.4e+38. Scale the rewards, or `reward_weights`, down."
            )
        statistics = completion_statistics(local, chosen, reference, scale)
        luck = None
        if parts and hasattr(self.entry.estimator, "later_luck"):
            luck = self.entry.estimator.later_luck(local, chosen.b0)
            luck = luck.where(chosen.baselines != chosen.b0, 0.0)  # a prompt that keeps B0 has none
        return BatchAdvantages(
            advantages=advantages,
            baselines=chosen.baselines,
            b0=chosen.b0,
            scale=scale,
            per_token=self.entry.per_token,
            group_mean_advantages=group_mean.advantages / scale if n > 1 else None,
            statistics=statistics if gather is None else gather(statistics),
            learned=self.learn(local, chosen.b0, gather) | kept if learn else {},
            later_luck=luck,
        )

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
        """A copy with its own learned state and without a running scale."""
        other = copy.deepcopy(self)
        other.running_scale = None
        return other

    def state_dict(self) -> dict[str, Any]:
        """The learned state and the scale, as a checkpoint restores them; a `ValueError` if a state is no `dict`."""
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
