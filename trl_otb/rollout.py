"""What a generation batch knows, row by row. Pure torch; the notation is that of `trl_otb.energy`."""

from dataclasses import dataclass, field
from typing import Any

import torch

from .baselines import assign_credit
from .baselines.advantages import rows_compared
from .baselines.groups import scorable_rows
from .blocks import by_blocks
from .metrics import completion_statistics


_CREDITED = ("advantages", "baselines", "group_mean_advantages", "lone_tail_tokens")


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
    _asked_of: torch.Tensor | None = field(default=None, init=False, repr=False, compare=False)
    _answer: bool = field(default=False, init=False, repr=False, compare=False)

    def __post_init__(self):
        self.unmeasured = len(self.mask)

    def __len__(self) -> int:
        return len(self.mask)

    @property
    def rows(self) -> torch.Tensor:
        """`(B,)` the numbers of all rows."""
        return torch.arange(len(self), device=self.mask.device)

    def hear(self, rows: torch.Tensor, energy: torch.Tensor, logps: torch.Tensor | None = None) -> None:
        """Take what a forward over these `rows` yielded, each `(b, T)`."""
        self._fill("energy", rows, energy)
        if logps is not None:
            self._fill("logps", rows, logps.detach())

    def credit(self, rows: torch.Tensor, **options) -> None:
        """
        Form the advantages of these `rows`, which hold whole groups, with `options` of
        [`~trl_otb.baselines.assign_credit`]. A baseline that reads energies needs theirs; one that compares prompts
        needs all rows.
        """
        mask, rewards, scale = self._take(rows, "mask", "rewards", "scale")
        energy = torch.zeros_like(mask, dtype=torch.float32) if self.energy is None else self._take(rows, "energy")[0]
        # A group too small for a standard deviation has a NaN scale: no signal, as in TRL.
        scale = scale.nan_to_num(nan=torch.inf).unsqueeze(1)

        def credit_of(block: slice) -> tuple[torch.Tensor, ...]:
            inputs = rewards[block], energy[block], mask[block], self.num_generations
            credit, group_mean = assign_credit(*inputs, **options), assign_credit(*inputs, baseline="group_mean")
            return (
                credit.advantages / scale[block],
                credit.returns - credit.advantages,
                group_mean.advantages / scale[block],
                credit.lone_tail_tokens,
            )

        together = rows_compared(options.get("baseline", "otb"), mask, self.num_generations)
        for name, values in zip(_CREDITED, by_blocks(credit_of, mask, together), strict=True):
            self._fill(name, rows, values)

    def take_credit_from(self, whole: "Rollout", rows: slice) -> None:
        """Take what `whole`, in which this rollout is `rows`, was credited with; its rows may be longer."""
        for name in _CREDITED:
            setattr(self, name, getattr(whole, name)[rows, : self.mask.size(1)])

    def advantages_of(self, rows: torch.Tensor) -> torch.Tensor:
        """`(b, T)`, or `(b,)` under a baseline per completion, as GRPOTrainer has it."""
        advantages = self.advantages[rows]
        return advantages.squeeze(1) if advantages.size(1) == 1 else advantages

    def measure(self, rows: torch.Tensor) -> None:
        """Record these rows' statistics, once they have energies and advantages."""
        energy, mask, rewards = self._take(rows, "energy", "mask", "rewards")
        advantages, baselines, group_mean_advantages, lone_tail_tokens = self._take(rows, *_CREDITED)
        statistics = completion_statistics(
            energy,
            mask * scorable_rows(rewards).unsqueeze(1),
            advantages,
            group_mean_advantages,
            baselines,
            lone_tail_tokens,
        )
        self._fill("statistics", rows, statistics)
        self.unmeasured -= len(rows)

    def _are_all(self, rows: torch.Tensor) -> bool:
        if rows is not self._asked_of:  # a GPU's answer has to be waited for: once for each tensor of rows
            self._asked_of = rows
            self._answer = len(rows) == len(self) and bool((rows == self.rows).all())
        return self._answer

    def _take(self, rows: torch.Tensor, *names: str) -> list[torch.Tensor]:
        """These rows of what `names` name, not copied where they are all rows."""
        every = self._are_all(rows)
        return [getattr(self, name) if every else getattr(self, name)[rows] for name in names]

    def _fill(self, name: str, rows: torch.Tensor, values: torch.Tensor) -> None:
        if self._are_all(rows):
            setattr(self, name, values)
            return
        if getattr(self, name) is None:
            missing = torch.nan if values.is_floating_point() else 0
            setattr(self, name, values.new_full((len(self), *values.shape[1:]), missing))
        getattr(self, name)[rows] = values
