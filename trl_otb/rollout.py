"""A generation batch, row by row: completions, rewards, energies and advantages."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from . import display
from .baselines import Completions


Rows = slice | torch.Tensor  # some rows of a rollout: a slice, or their indices
EVERY_ROW = slice(None)


def generated_mask(batch: dict[str, Any]) -> torch.Tensor:
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
        prompt_ids, prompt_mask (`torch.Tensor` of shape `(B, P)`):
            The prompts, padded on the left.
        completion_ids, completion_mask (`torch.Tensor` of shape `(B, T)`):
            The completions, including tool output, padded on the right.
        mask (`torch.Tensor` of shape `(B, T)`):
            1 on tokens that the policy generated and the loss includes.
        num_generations (`int`):
            N.
        rewards (`torch.Tensor` of shape `(B,)` or `(B, T)`):
            One return per completion or, if turns or tokens were rewarded, one reward per token. NaN if no reward
            function scored the completion.
        scale (`torch.Tensor` of shape `(B,)`):
            The divisor of advantages under `scale_rewards`: 1 for `"none"`, NaN where advantages are 0 instead.
        level (`torch.Tensor` of shape `(B,)`, *optional*):
            Whether all returns that determine the completion's `scale` are equal.
        number (`int`, *optional*, defaults to 0):
            The number of earlier rollouts in this mode.
        first_row (`int`, *optional*, defaults to 0):
            The index of the first row among the rows of all processes; a group may start on another process.
        processing_class (*optional*):
            The trainer's tokenizer or processor, to show tokens as text.
        prompt_key (`torch.Tensor` of shape `(B,)`, *optional*):
            int64, the same for the same prompt in every step and run; only if the baseline reads it.

    Attributes:
        energy (`torch.Tensor` of shape `(B, T)`):
            ρ_t² w_t; NaN in rows whose forward has not run yet, `None` before the first.
        unweighted_energy (`torch.Tensor` of shape `(B, T)`):
            w_t; only if there are importance ratios.
        logps (`torch.Tensor` of shape `(B, T)`):
            log π(y_t) from the same forward, at the sampling temperature.
        states (`torch.Tensor` of shape `(B, T, k)`):
            Hidden states from the same forward, see [`~trl_otb.baselines.Groups`]; only if the baseline reads them,
            and until the rollout is measured.
        base (`torch.Tensor` of shape `(B, T)` or `(B, 1)`):
            The baseline below, if the baseline is on top of another.
        advantages (`torch.Tensor` of shape `(B, T)`, or `(B, 1)` under a baseline per completion):
            (G − B) / scale; `None` before they are first computed, NaN in rows without energies.
        baselines (`torch.Tensor` of the same shape):
            B, in units of the reward.
        compared (`Completions`, *optional*):
            The argument of a baseline with memory, until it has learned from it.
        group_mean_advantages (`torch.Tensor` of shape `(B, 1)`):
            Advantages under the group mean, for comparison.
        lone_tail_tokens (`torch.Tensor` of shape `(B, 1)`):
            Generated tokens on the lone tail.
        measured (`torch.Tensor` of shape `(B,)`):
            bool, on the CPU: whether a row has statistics.
        statistics (`torch.Tensor` of shape `(B, len(STATISTICS))`):
            Rows of [`~trl_otb.metrics.completion_statistics`], NaN until they are measured.
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
    unweighted_energy: torch.Tensor | None = field(default=None, init=False)
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
        """The number of rows without statistics."""
        return int((~self.measured).sum())

    def __len__(self) -> int:
        return len(self.mask)

    def __repr__(self) -> str:
        return display.summary(self)

    def to_pandas(self, tokenizer: Any = None, prompt: int | None = None) -> Any:
        """
        A `pandas.DataFrame` with a row per generated token; tool output is left out.

        Its columns: `prompt` (index in this rollout), `completion` (index in the group), `turn` (of the policy, from
        0), `position` (among all tokens of the completion), `token_id`, `text` (`None` without a tokenizer), `reward`
        (of the completion; NaN if it has none), `energy`, `baseline`, `advantage` and `group_mean_advantage` (NaN
        until they are computed).

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
        Show the completions of a prompt with coloured tokens: in a notebook with a switch between energy, advantage
        and the group mean's advantage; in a terminal by one of them, without colours if the output is not a terminal
        or `NO_COLOR` is set.

        Args:
            prompt (`int`, *optional*, defaults to 0):
                Its index in this rollout.
            tokenizer (*optional*):
                A tokenizer or processor; by default the trainer's.
            value (`str`, *optional*):
                `"energy"`, `"advantage"` or `"group_mean_advantage"`: the (initial) colour of tokens. By default the
                advantage, or the energy if there is no advantage yet.
            max_tokens (`int`, *optional*, defaults to 1,000):
                Tokens to show per completion.

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
        A `matplotlib` figure of a prompt's completions, with tokens coloured by energy, advantage, and the advantage
        under the group mean; the latter two share a scale. Saves it to `path`, if given.

        Args:
            path (`str` or `Path`, *optional*):
                The file to save to, in any format of matplotlib.
            prompt (`int`, *optional*, defaults to 0):
                Its index in this rollout.
            tokenizer (*optional*):
                A tokenizer or processor; by default the trainer's.
            max_tokens (`int`, *optional*, defaults to 100):
                Tokens to draw per completion; the picture says if there are more.
            max_completions (`int`, *optional*, defaults to 8):
                Completions to draw, the first ones of the group.

        Raises:
            ImportError: matplotlib is not installed.
            IndexError: There is no such prompt.
            ValueError: There is nothing to draw yet.
        """
        return display.plot(self, path, prompt, tokenizer, max_tokens, max_completions)


class Rollouts(dict[str, Rollout]):
    """The latest rollout of each mode, `"train"` and `"eval"`."""

    def __missing__(self, mode: str) -> Rollout:
        if mode not in ("train", "eval"):
            raise KeyError(f"{mode!r}: rollouts are kept for 'train' and 'eval'.")
        how = "train()" if mode == "train" else "evaluate()"
        raise KeyError(f"{mode!r}: there is no such rollout yet. Call trainer.{how} first.")


def store(rollout: Rollout, name: str, values: torch.Tensor, rows: Rows = EVERY_ROW) -> None:
    """Store `values` of some rows under `name`; rows without values are NaN, or 0 for integers."""
    if isinstance(rows, slice) and rows == EVERY_ROW:
        setattr(rollout, name, values)
        return
    if getattr(rollout, name) is None:
        missing = torch.nan if values.is_floating_point() else 0
        setattr(rollout, name, values.new_full((len(rollout), *values.shape[1:]), missing))
    getattr(rollout, name)[rows] = values
