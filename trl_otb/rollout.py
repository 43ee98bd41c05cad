"""A generation batch, row by row: what was generated, what it earned, and what each token is credited with."""

from dataclasses import dataclass, field
from typing import Any

import torch


Rows = slice | torch.Tensor  # some rows of a rollout: a slice, or their numbers
EVERY_ROW = slice(None)


def generated_mask(batch: dict[str, Any]) -> torch.Tensor:
    """`(B, T)` 1 on tokens of TRL's `batch` that the policy generated and the loss sees."""
    mask = batch["completion_mask"]
    return mask * batch["tool_mask"] if "tool_mask" in batch else mask


@dataclass
class Rollout:
    """
    A generation batch of one process: what was generated, what it earned, and what each token is credited with.

    Rows are in the order of generation, the completions of a prompt adjacent. `trainer.rollouts["train"]` and
    `trainer.rollouts["eval"]` are the last ones.

    Args:
        prompt_ids, prompt_mask (`torch.Tensor` of shape `(B, P)`):
            The prompts, padded on the left.
        completion_ids, completion_mask (`torch.Tensor` of shape `(B, T)`):
            The completions, tool output included, padded on the right.
        mask (`torch.Tensor` of shape `(B, T)`):
            1 on tokens that the policy generated and the loss sees.
        num_generations (`int`):
            N.
        rewards (`torch.Tensor` of shape `(B,)` or `(B, T)`):
            One return per completion or, where single turns or tokens were rewarded, one reward per token. NaN where
            no reward function could score the completion.
        scale (`torch.Tensor` of shape `(B,)`):
            What `scale_rewards` divides advantages by; 1 for `"none"`.

    Attributes:
        energy (`torch.Tensor` of shape `(B, T)`):
            ρ_t² w_t; NaN in rows whose forward has not run yet, `None` before the first.
        logps (`torch.Tensor` of shape `(B, T)`):
            log π(y_t) of the same forward, at the sampling temperature.
        advantages (`torch.Tensor` of shape `(B, T)`, or `(B, 1)` under a baseline per completion):
            (G − B) / scale; `None` before the first credit, NaN in rows that wait for their energies.
        baselines (`torch.Tensor` of the same shape):
            B, in units of the reward.
        group_mean_advantages (`torch.Tensor` of shape `(B, 1)`):
            Advantages under the group mean, for comparison.
        lone_tail_tokens (`torch.Tensor` of shape `(B, 1)`):
            Generated tokens on the lone tail.
        unmeasured (`int`):
            Rows that have no statistics yet.
        statistics (`torch.Tensor` of shape `(B, len(STATISTICS))`):
            Rows of [`~trl_otb.metrics.completion_statistics`], NaN where they are not measured yet.
    """

    prompt_ids: torch.Tensor
    prompt_mask: torch.Tensor
    completion_ids: torch.Tensor
    completion_mask: torch.Tensor
    mask: torch.Tensor
    num_generations: int
    rewards: torch.Tensor
    scale: torch.Tensor
    energy: torch.Tensor | None = field(default=None, init=False)
    logps: torch.Tensor | None = field(default=None, init=False)
    advantages: torch.Tensor | None = field(default=None, init=False)
    baselines: torch.Tensor | None = field(default=None, init=False)
    group_mean_advantages: torch.Tensor | None = field(default=None, init=False)
    lone_tail_tokens: torch.Tensor | None = field(default=None, init=False)
    statistics: torch.Tensor | None = field(default=None, init=False)
    unmeasured: int = field(init=False)

    def __post_init__(self) -> None:
        self.unmeasured = len(self.mask)

    def __len__(self) -> int:
        return len(self.mask)


class Rollouts(dict[str, Rollout]):
    """The last rollout of each mode, `"train"` and `"eval"`."""

    def __missing__(self, mode: str) -> Rollout:
        if mode not in ("train", "eval"):
            raise KeyError(f"{mode!r}: rollouts are kept for 'train' and 'eval'.")
        how = "train()" if mode == "train" else "evaluate()"
        raise KeyError(f"{mode!r}: there is no such rollout yet. Call trainer.{how} first.")


def store(rollout: Rollout, name: str, values: torch.Tensor, rows: Rows = EVERY_ROW) -> None:
    """Put `values` of some rows under `name`; rows that nothing was stored for are NaN, or 0 of whole numbers."""
    if isinstance(rows, slice) and rows == EVERY_ROW:
        setattr(rollout, name, values)
        return
    if getattr(rollout, name) is None:
        missing = torch.nan if values.is_floating_point() else 0
        setattr(rollout, name, values.new_full((len(rollout), *values.shape[1:]), missing))
    getattr(rollout, name)[rows] = values
