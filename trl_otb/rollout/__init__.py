"""A generation batch, row by row: completions, rewards, energies and advantages, as text, table and picture."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from datasets.fingerprint import Hasher
from torch import Tensor

from ..baselines import Baseline, Completions, Credit, put_back, squeeze, turns_of
from ..energy import check_energies, importance_weighted
from ..figure import require


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
        scale (`torch.Tensor` of shape `(B, 1)`):
            The divisor of advantages under `scale_rewards`: 1 for `"none"`, infinite where there is no spread.
        number (`int`, *optional*, defaults to 0):
            The number of earlier rollouts in this mode.
        first_row (`int`, *optional*, defaults to 0):
            The index of the first row among the rows of all processes; a group may start on another process.
        processing_class (*optional*):
            The trainer's tokenizer or processor, to show tokens as text.

    Attributes:
        energy (`torch.Tensor` of shape `(B, T)`, *optional*):
            ρ_t² w_t; `None` if the baseline needs none, and TRL ran no forward that yields it.
        logps (`torch.Tensor` of shape `(B, T)`, *optional*):
            log π(y_t) from the same forward, at the sampling temperature.
        advantages (`torch.Tensor` of shape `(B, T)`, or `(B, 1)` under a baseline per completion):
            (G − B) / scale.
        baselines (`torch.Tensor` of the same shape):
            B, in units of the reward.
        group_mean_advantages (`torch.Tensor` of shape `(B, 1)`):
            Advantages under the group mean, for comparison.
    """

    prompt_ids: Tensor
    prompt_mask: Tensor
    completion_ids: Tensor
    completion_mask: Tensor
    mask: Tensor
    num_generations: int
    rewards: Tensor
    scale: Tensor
    number: int = 0
    first_row: int = 0
    processing_class: Any = field(default=None, compare=False)
    energy: Tensor | None = field(default=None, init=False)
    logps: Tensor | None = field(default=None, init=False)
    advantages: Tensor | None = field(default=None, init=False)
    baselines: Tensor | None = field(default=None, init=False)
    group_mean_advantages: Tensor | None = field(default=None, init=False)

    @classmethod
    def of_batch(cls, batch: dict[str, Any], num_generations: int, process: int, processing_class: Any) -> "Rollout":
        """TRL's `batch`, without rewards."""
        ids = {key: batch[key] for key in ("prompt_ids", "prompt_mask", "completion_ids", "completion_mask")}
        mask = generated_mask(batch)
        none = torch.full((len(mask),), torch.nan, device=mask.device)
        first = process * len(mask)
        return cls(**ids, mask=mask, num_generations=num_generations, rewards=none, scale=torch.ones_like(none[:, None]),
                   first_row=first, processing_class=processing_class)  # fmt: skip

    @property
    def own_rows(self) -> slice:
        """The place of these rows among those of all processes."""
        return slice(self.first_row, self.first_row + len(self))

    @property
    def holds_groups(self) -> bool:
        """Whether no group spans processes."""
        return len(self) % self.num_generations == 0

    def completions(
        self, values: Any, ratio: Tensor | None, needs: frozenset[str], prompt_key: Tensor | None
    ) -> Completions:
        """
        The argument of a baseline; stores energies and log-probs.

        Args:
            values ([`~trl_otb.seam.sampled.TokenValues`], *optional*):
                What a forward says of the tokens.
            ratio (`torch.Tensor` of shape `(B, T)` or `(B, 1)`, *optional*):
                Importance ratios ρ.
            needs (`frozenset[str]`):
                What else to include: `"completion_ids"` and `"turn"`.
            prompt_key (`torch.Tensor` of shape `(B, 1)`, *optional*):
                See [`~trl_otb.baselines.Completions`].

        Raises:
            ValueError: An energy is not finite.
        """
        more: dict[str, Any] = {}
        if values is not None:
            weights = None if ratio is None else importance_weighted(values.energy, ratio)
            self.energy, self.logps = values.energy if weights is None else weights, values.logps
            check_energies(self.energy, self.mask)
            more = {"energy": values.energy, "logps": values.logps, "states": values.states, "weights": weights}
        more["completion_ids"] = self.completion_ids if "completion_ids" in needs else None
        more["turn"] = turns_of(self.mask) if "turn" in needs else None
        more["prompt_key"] = None if prompt_key is None else prompt_key.to(self.mask.device)
        return squeeze(self.rewards, self.mask, self.num_generations, first_row=self.first_row, **more)

    def keep(self, rule: Baseline, found: Credit, of_mean: Credit) -> None:
        """Store advantages and baselines, at the places of their tokens under a baseline per token."""
        place = (lambda values: put_back(values, self.mask)) if rule.per_token else (lambda values: values)
        self.advantages, self.baselines = place(found.advantages / self.scale), place(found.baselines)
        self.group_mean_advantages = of_mean.advantages / self.scale

    def __len__(self) -> int:
        return len(self.mask)

    def __repr__(self) -> str:
        from .table import summary

        return summary(self)

    def to_pandas(self, tokenizer: Any = None, prompt: int | None = None) -> Any:
        """
        A `pandas.DataFrame` with a row per generated token; tool output is left out.

        Its columns: `prompt` (index in this rollout), `completion` (index in the group), `turn` (of the policy, from
        0), `position` (among all tokens of the completion), `token_id`, `text` (`None` without a tokenizer), `reward`
        (of the completion; NaN if it has none), `energy`, `baseline`, `advantage` and `group_mean_advantage` (NaN if
        they are not known).

        Args:
            tokenizer (*optional*):
                A tokenizer or processor; by default the trainer's.
            prompt (`int`, *optional*):
                Only this prompt's completions. Text takes 10 to 30 µs per token.

        Raises:
            ImportError: pandas is not installed.
            IndexError: There is no such prompt.
        """
        from .table import to_pandas

        return to_pandas(self, tokenizer, prompt)

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
                advantage, or the energy if there is no advantage.
            max_tokens (`int`, *optional*, defaults to 1,000):
                Tokens to show per completion.

        Raises:
            IndexError: There is no such prompt.
            ValueError: There is no such value.
        """
        from .colours import show

        show(self, prompt, tokenizer, value, max_tokens)

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
            ValueError: There is nothing to draw.
        """
        require("matplotlib.figure", "A picture of a rollout")
        from .picture import plot

        return plot(self, path, prompt, tokenizer, max_tokens, max_completions)


class Rollouts(dict[str, Rollout]):
    """The latest rollout of each mode, `"train"` and `"eval"`."""

    def __missing__(self, mode: str) -> Rollout:
        if mode not in ("train", "eval"):
            raise KeyError(f"{mode!r}: rollouts are kept for 'train' and 'eval'.")
        how = "train()" if mode == "train" else "evaluate()"
        raise KeyError(f"{mode!r}: there is no such rollout yet. Call trainer.{how} first.")


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
