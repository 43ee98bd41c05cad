"""A generation batch, row by row: what was generated, what it earned, and what each token is credited with."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from . import display
from .baselines import Completions


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
            What `scale_rewards` divides advantages by; 1 for `"none"`, NaN where advantages are 0 instead.
        level (`torch.Tensor` of shape `(B,)`, *optional*):
            Whether all returns that the completion's `scale` was formed of are equal.
        number (`int`, *optional*, defaults to 0):
            How many rollouts the trainer made before, in this mode.
        first_row (`int`, *optional*, defaults to 0):
            The number of the first row among those of all processes; a group may begin on another process.
        processing_class (*optional*):
            The trainer's tokenizer or processor, for the text of tokens.
        prompt_key (`torch.Tensor` of shape `(B,)`, *optional*):
            int64, the same for the same prompt in every step and run; only if the baseline reads it.

    Attributes:
        energy (`torch.Tensor` of shape `(B, T)`):
            ρ_t² w_t; NaN in rows whose forward has not run yet, `None` before the first.
        logps (`torch.Tensor` of shape `(B, T)`):
            log π(y_t) of the same forward, at the sampling temperature.
        states (`torch.Tensor` of shape `(B, T, k)`):
            Hidden states of the same forward, see [`~trl_otb.baselines.Groups`]; only if the baseline reads them, and
            until the rollout is measured.
        base (`torch.Tensor` of shape `(B, T)` or `(B, 1)`):
            What the baseline stands on, if it is on top of another.
        advantages (`torch.Tensor` of shape `(B, T)`, or `(B, 1)` under a baseline per completion):
            (G − B) / scale; `None` before the first credit, NaN in rows that wait for their energies.
        baselines (`torch.Tensor` of the same shape):
            B, in units of the reward.
        compared (`Completions`, *optional*):
            What a baseline that remembers was given, until it has learnt from it.
        group_mean_advantages (`torch.Tensor` of shape `(B, 1)`):
            Advantages under the group mean, for comparison.
        lone_tail_tokens (`torch.Tensor` of shape `(B, 1)`):
            Generated tokens on the lone tail.
        measured (`torch.Tensor` of shape `(B,)`):
            bool, on the CPU: which rows have statistics.
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
    level: torch.Tensor | None = None
    number: int = 0
    first_row: int = 0
    processing_class: Any = field(default=None, compare=False)
    prompt_key: torch.Tensor | None = None
    energy: torch.Tensor | None = field(default=None, init=False)
    logps: torch.Tensor | None = field(default=None, init=False)
    states: torch.Tensor | None = field(default=None, init=False)
    base: torch.Tensor | None = field(default=None, init=False)
    advantages: torch.Tensor | None = field(default=None, init=False)
    baselines: torch.Tensor | None = field(default=None, init=False)
    compared: Completions | None = field(default=None, init=False, compare=False)
    group_mean_advantages: torch.Tensor | None = field(default=None, init=False)
    lone_tail_tokens: torch.Tensor | None = field(default=None, init=False)
    statistics: torch.Tensor | None = field(default=None, init=False)
    measured: torch.Tensor = field(init=False, compare=False)

    def __post_init__(self) -> None:
        self.measured = torch.zeros(len(self.mask), dtype=torch.bool)

    @property
    def unmeasured(self) -> int:
        """How many rows have no statistics yet."""
        return int((~self.measured).sum())

    def __len__(self) -> int:
        return len(self.mask)

    def __repr__(self) -> str:
        return display.summary(self)

    def to_pandas(self, tokenizer: Any = None, prompt: int | None = None) -> Any:
        """
        A `pandas.DataFrame` with a row per generated token; what a tool said has none.

        Its columns: `prompt` (its number in this rollout), `completion` (its number within the group), `turn` (of the
        policy, from 0), `position` (among all tokens of the completion), `token_id`, `text` (`None` without a
        tokenizer), `reward` (of the whole completion; NaN if it could not be scored), `energy`, `baseline`,
        `advantage` and `group_mean_advantage` (NaN where they have not come yet).

        Args:
            tokenizer (*optional*):
                A tokenizer or processor; by default the trainer's.
            prompt (`int`, *optional*):
                Only this prompt's completions. Text takes 10 to 30 µs per token.

        Raises:
            ImportError: pandas is not installed.
            IndexError: There is no such prompt.
        """
        return display.to_pandas(self, tokenizer, prompt)

    def show(self, prompt: int = 0, tokenizer: Any = None, value: str | None = None, max_tokens: int = 1000) -> None:
        """
        Show the completions of a prompt with their tokens coloured: in a notebook with a switch between energy,
        advantage and the group mean's advantage, in a terminal by one of them, without colours where the output is
        no terminal or `NO_COLOR` is set.

        Args:
            prompt (`int`, *optional*, defaults to 0):
                Its number in this rollout.
            tokenizer (*optional*):
                A tokenizer or processor; by default the trainer's.
            value (`str`, *optional*):
                `"energy"`, `"advantage"` or `"group_mean_advantage"`: what colours tokens, at first. By default the
                advantage, or the energy while there is none.
            max_tokens (`int`, *optional*, defaults to 1,000):
                Of each completion that are shown.

        Raises:
            IndexError: There is no such prompt.
            ValueError: There is no such value, or not yet.
        """
        display.show(self, prompt, tokenizer, value, max_tokens)

    def plot(
        self,
        path: str | Path | None = None,
        prompt: int = 0,
        tokenizer: Any = None,
        max_tokens: int = 100,
        max_completions: int = 8,
    ) -> Any:
        """
        A `matplotlib` figure of a prompt's completions, their tokens coloured by energy, by advantage, and by the
        advantage that the group mean gives, the latter two on one scale. It is saved under `path`, if that is given.

        Args:
            path (`str` or `Path`, *optional*):
                Of a picture, in any format that matplotlib writes.
            prompt (`int`, *optional*, defaults to 0):
                Its number in this rollout.
            tokenizer (*optional*):
                A tokenizer or processor; by default the trainer's.
            max_tokens (`int`, *optional*, defaults to 100):
                Of each completion that are drawn; the picture says so where there are more.
            max_completions (`int`, *optional*, defaults to 8):
                That are drawn, the first ones of the group.

        Raises:
            ImportError: matplotlib is not installed.
            IndexError: There is no such prompt.
            ValueError: There is nothing to draw yet.
        """
        return display.plot(self, path, prompt, tokenizer, max_tokens, max_completions)


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
