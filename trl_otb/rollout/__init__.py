"""A generation batch, row by row: completions, rewards, energies and advantages, as text, table and picture."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from datasets.fingerprint import Hasher
from torch import Tensor

from ..baselines import Baseline, Completions, Credit, put_back, squeeze
from ..energy import check_energies, importance_weighted
from . import text


def generated_mask(batch: dict[str, Any]) -> Tensor:
    """`(B, T)` 1 on tokens of TRL's `batch` that the policy generated and the loss includes."""
    mask = batch["completion_mask"]
    return mask * batch["tool_mask"] if "tool_mask" in batch else mask


@dataclass
class Rollout:
    """
    A generation batch of one process: completions, rewards, energies and advantages.

    Rows are in the order of generation; the completions of a prompt are adjacent. `trainer.rollouts["train"]` and
    `trainer.rollouts["eval"]` are the latest ones.

    Args:
        prompt_ids, prompt_mask (`(B, P)`): The prompts, padded on the left.
        completion_ids, completion_mask (`(B, T)`): The completions, including tool output, padded on the right.
        mask (`(B, T)`): 1 on tokens that the policy generated and the loss includes.
        num_generations (`int`): N.
        rewards (`(B,)` or `(B, T)`): One return per completion or, if turns or tokens were rewarded, one reward per
            token. NaN if no reward function scored the completion.
        scale (`(B, 1)`): The divisor of advantages under `scale_rewards`: 1 for `"none"`, infinite without spread.
        first_row (`int`): The index of the first row among those of all processes, on which a group may begin.
        returns_of_all (`(B_all,)`): The returns of the completions of all processes.
        processing_class: The trainer's tokenizer or processor.

    Attributes:
        energy, logps (`(B, T)`, *optional*): ρ_t² w_t and log π(y_t), at the sampling temperature; `None` if the
            baseline needs none, and TRL ran no forward that yields them.
        advantages, baselines (`(B, T)`, or `(B, 1)` under a baseline per completion): (G − B) / scale, and B.
        group_mean_advantages (`(B, 1)`): Advantages under the group mean, for comparison; `None` for N = 1.
    """

    prompt_ids: Tensor
    prompt_mask: Tensor
    completion_ids: Tensor
    completion_mask: Tensor
    mask: Tensor
    num_generations: int
    rewards: Tensor
    scale: Tensor
    first_row: int = 0
    returns_of_all: Tensor = field(default_factory=lambda: torch.empty(0), compare=False)
    processing_class: Any = field(default=None, compare=False)
    energy: Tensor | None = field(default=None, init=False)
    logps: Tensor | None = field(default=None, init=False)
    advantages: Tensor | None = field(default=None, init=False)
    baselines: Tensor | None = field(default=None, init=False)
    group_mean_advantages: Tensor | None = field(default=None, init=False)

    def completions(self, values: Any, ratio: Tensor | None, prompt_key: Tensor | None) -> Completions:
        """
        The argument of a baseline, from [`~trl_otb.seam.sampled.TokenValues`], if there are, and importance ratios ρ,
        `(B, T)` or `(B, 1)`; stores energies and log-probs. A `ValueError` if an energy is not finite.
        """
        more: dict[str, Any] = {}
        if values is not None:
            weights = None if ratio is None else importance_weighted(values.energy, ratio)
            self.energy, self.logps = values.energy if weights is None else weights, values.logps
            check_energies(self.energy, self.mask)
            more = {"energy": values.energy, "logps": values.logps, "states": values.states, "weights": weights}
        more["prompt_key"] = None if prompt_key is None else prompt_key.to(self.mask.device)
        return squeeze(self.rewards, self.mask, self.num_generations, first_row=self.first_row, **more)

    def keep(self, rule: Baseline, chosen: Credit, of_mean: Credit) -> Tensor:
        """Store advantages and baselines, at the places of their tokens under a baseline per token."""
        place = (lambda values: put_back(values, self.mask)) if rule.per_token else (lambda values: values)
        self.advantages, self.baselines = place(chosen.advantages / self.scale), place(chosen.baselines)
        self.group_mean_advantages = of_mean.advantages / self.scale if self.num_generations > 1 else None
        if (~self.advantages.isfinite()).any():
            most = self.rewards.abs().nan_to_num(nan=0.0).max().item()
            raise ValueError(
                f"Advantages are not finite: sums of rewards of up to {most:.1e} overflow float32, which holds up to "
                "3.4e+38. Scale the rewards, or `reward_weights`, down."
            )
        return self.advantages

    def __len__(self) -> int:
        return len(self.mask)

    def __repr__(self) -> str:
        return text.summary(self)

    def show(self, prompt: int = 0, max_tokens: int = 1000) -> None:
        """
        Print the completions of a prompt; [`plot`] has the number of each token, as its colour.

        Args:
            prompt (`int`, *optional*, defaults to 0): Its index in this rollout; an `IndexError` if there is none.
            max_tokens (`int`, *optional*, defaults to 1,000): Tokens to show per completion.
        """
        print(text.as_text(text.read_group(self, prompt, max_tokens)))

    def plot(
        self, path: str | Path | None = None, prompt: int = 0, max_tokens: int = 100, max_completions: int = 8
    ) -> Any:
        """
        A `matplotlib` figure of a prompt's completions, with tokens coloured by energy, advantage, and the advantage
        under the group mean; the latter two share a scale. Saves it to `path`, if given, in any format of matplotlib.

        Args:
            prompt, max_tokens: As in [`show`].
            max_completions (`int`, *optional*, defaults to 8): Completions to draw, the first ones of the group.
        """
        from .picture import draw

        figure = draw(text.read_group(self, prompt, max_tokens, max_completions), self.num_generations)
        if path is not None:
            figure.savefig(path, dpi=120)
        return figure


class Rollouts(dict[str, Rollout]):
    """The latest rollout of each mode, `"train"` and `"eval"`."""

    def __missing__(self, mode: str) -> Rollout:
        raise KeyError(f"{mode!r}: there is no such rollout yet. Call trainer.train() or trainer.evaluate() first.")


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
