"""A generation batch, row by row: completions, rewards, energies and advantages."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from datasets.fingerprint import Hasher
from torch import Tensor

from .baselines import Completions, put_back, squeeze
from .energy import TokenValues, check_energies, importance_weighted
from .run.baseline import BatchAdvantages


def generated_mask(batch: dict[str, Any]) -> Tensor:
    """`(B, T)` 1 on tokens of TRL's `batch` that the policy generated and the loss includes."""
    mask = batch["completion_mask"]
    return mask * batch["tool_mask"] if "tool_mask" in batch else mask


@dataclass(frozen=True)
class Shown:
    """What only the display reads of a rollout."""

    processing_class: Any = None  # the trainer's tokenizer or processor
    step: int = 0  # the optimizer step that it is sampled for; 0 without training
    baseline_name: str = ""
    rewards_per_func: Tensor | None = None  # (B, F) each function's rewards, NaN without one
    reward_names: tuple[str, ...] = ()
    columns: tuple[dict[str, Any], ...] = ()  # of the data set, beside prompt and images; by row
    learned: dict[str, float] = field(default_factory=dict)  # metrics of a baseline that learns
    # The parts of `value`, in steps that are recorded
    b0: Tensor | None = None  # (B, T) or (B, 1)
    later_luck: Tensor | None = None  # (B, T)


@dataclass(frozen=True)
class Rollout:
    """
    A generation batch of one process: completions, rewards, energies and advantages.

    Rows are in the order of generation; the completions of a prompt are adjacent. `trainer.rollouts["train"]` and
    `trainer.rollouts["eval"]` are the latest ones, each a [`~trl_otb.display.shown.ShownRollout`].
    """

    prompt_ids: Tensor  # (B, P), padded on the left
    prompt_mask: Tensor
    completion_ids: Tensor  # (B, T), including tool output, padded on the right
    completion_mask: Tensor
    mask: Tensor  # (B, T) 1 on tokens that the policy generated and the loss includes
    num_generations: int  # N
    rewards: Tensor  # (B,), or (B, T) if turns or tokens were rewarded; NaN if no reward function scored the completion
    scale: Tensor  # (B, 1) the divisor of advantages under `scale_rewards`: 1 for "none", infinite without spread
    first_row: int = 0  # the index of the first row among those of all processes, on which a group may begin
    returns_of_all: Tensor = field(default_factory=lambda: torch.empty(0), compare=False)  # (B_all,), of all processes
    # (B, T) w_t, ρ_t² w_t and log π(y_t), at the sampling temperature; `None` if the baseline needs none, and TRL runs
    # no forward that yields them
    energy: Tensor | None = None
    loss_energy: Tensor | None = None
    logps: Tensor | None = None
    advantages: Tensor | None = None  # (B, T), or (B, 1) under a baseline per completion: (G − B) / scale
    baselines: Tensor | None = None  # B
    group_mean_advantages: Tensor | None = None  # (B, 1) under the group mean, for comparison; `None` for N = 1
    shown: Shown = field(default_factory=Shown, compare=False)

    def with_values(self, values: TokenValues | None, ratio: Tensor | None) -> "Rollout":
        """With energies and log-probs, and ratios ρ, `(B, T)` or `(B, 1)`; a `ValueError` if one is not finite."""
        if values is None:
            return self
        energy = values.energy.where(self.mask.bool(), 0.0)  # which padding has in TRL from 1.15 on
        loss_energy = energy if ratio is None else importance_weighted(energy, ratio)
        check_energies(loss_energy, self.mask)
        return replace(self, energy=energy, loss_energy=loss_energy, logps=values.logps)

    def completions(
        self,
        states: Tensor | None = None,
        prompt_key: Tensor | None = None,
        draw_ratio: Tensor | None = None,
        progress: Tensor | None = None,
        progress_names: Sequence[str] = (),
    ) -> Completions:
        """What a baseline is computed from. `progress` may lack columns at the end, of padding to a multiple."""
        if progress is not None:
            progress = torch.nn.functional.pad(progress, (0, 0, 0, self.mask.size(1) - progress.size(1)))
        return squeeze(
            self.rewards,
            self.mask,
            self.num_generations,
            first_row=self.first_row,
            prompt_key=None if prompt_key is None else prompt_key.to(self.mask.device),
            energy=self.energy,
            loss_energy=None if self.loss_energy is self.energy else self.loss_energy,
            logps=self.logps,
            states=states,
            progress=progress,
            progress_names=tuple(progress_names),
            draw_ratio=draw_ratio,
        )

    def with_advantages(self, found: BatchAdvantages, trl_advantages: Tensor | None = None) -> "Rollout":
        """With what a baseline made of it, at the places of the tokens, or with `trl_advantages`, `(B,)`."""
        values = found.advantages if trl_advantages is None else trl_advantages.unsqueeze(1)
        shown = replace(self.shown, learned=found.learned)
        if found.later_luck is not None:
            b0 = found.b0 if found.b0.size(1) == 1 else put_back(found.b0, self.mask)
            shown = replace(shown, b0=b0, later_luck=put_back(found.later_luck, self.mask))
        return replace(
            self,
            scale=found.scale,
            advantages=put_back(values, self.mask) if found.per_token else values,
            baselines=put_back(found.baselines, self.mask) if found.per_token else found.baselines,
            group_mean_advantages=found.group_mean_advantages,
            shown=shown,
        )

    def __len__(self) -> int:
        return len(self.mask)


class Rollouts(dict[str, Rollout]):
    """The latest rollout of each mode, `"train"` and `"eval"`."""

    def __missing__(self, mode: str) -> Rollout:
        call = {"train": "train()", "eval": "evaluate()"}.get(mode, "train() or trainer.evaluate()")
        raise KeyError(f"{mode!r}: there is no such rollout yet. Call trainer.{call} first.")


def prompt_keys(inputs: list[dict[str, Any]]) -> Tensor:
    """`(B, 1)` int64 hash of each example's prompt and images, the same in every run."""
    known: dict[tuple[int, ...], int] = {}  # by identity, since the completions of a prompt often share it
    keys = []
    for example in inputs:
        columns = [example.get(name) for name in ("prompt", "image", "images")]
        same = tuple(map(id, columns))
        if same not in known:
            known[same] = int(Hasher.hash(columns)[:15], 16)
        keys.append([known[same]])
    return torch.tensor(keys)


def data_columns(inputs: list[dict[str, Any]]) -> tuple[dict[str, Any], ...]:
    """What the examples hold beside prompt and images, such as the right answer."""
    left_out = {"prompt", "image", "images", "completion", "completion_ids"}
    return tuple({name: value for name, value in of.items() if name not in left_out} for of in inputs)
