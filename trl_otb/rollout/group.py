"""The completions of one prompt, token by token, as text and numbers."""

import math
from dataclasses import dataclass
from typing import Any

import torch

from ..baselines import completion_returns


# What tokens can be coloured by, and how it is called
VALUES = {
    "energy": "energy",
    "advantage": "advantage",
    "group_mean_advantage": "the group mean's advantage",
}
IMPROBABLE = "energy above 1: another token was more than twice as likely"  # for ρ = 1


@dataclass
class Token:
    """A token to show; `values` has the names of [`VALUES`], and is empty for tool output."""

    text: str
    generated: bool
    values: dict[str, float]

    @property
    def improbable(self) -> bool:
        return self.values.get("energy", 0.0) > 1


@dataclass
class ShownCompletion:
    """The first tokens of a completion; `left_out` more are not shown."""

    reward: float
    tokens: list[Token]
    left_out: int

    @property
    def label(self) -> str:
        return "no reward" if math.isnan(self.reward) else f"reward {self.reward:.3g}"


@dataclass
class Group:
    """The completions of prompt number `number`; `values` are the names of the available values."""

    number: int
    prompt: str
    completions: list[ShownCompletion]
    values: list[str]

    def largest(self, value: str) -> float:
        """The largest absolute `value`; both kinds of advantage share one scale."""
        names = ["energy"] if value == "energy" else ["advantage", "group_mean_advantage"]
        tokens = [token for completion in self.completions for token in completion.tokens]
        sizes = [abs(token.values[name]) for token in tokens for name in names if name in token.values]
        return max(sizes, default=0.0) or 1.0


def read_group(
    rollout: Any, prompt: int, tokenizer: Any, max_tokens: int, max_completions: int | None = None
) -> Group:
    """
    The completions of prompt number `prompt`, at most `max_completions` of them with `max_tokens` tokens each.

    Raises:
        IndexError: There is no such prompt.
        ValueError: A limit is below 1.
    """
    for name, limit in (("max_tokens", max_tokens), ("max_completions", max_completions)):
        if limit is not None and limit < 1:
            raise ValueError(f"`{name}` is {limit}: give 1 or more.")
    tokenizer = rollout.processing_class if tokenizer is None else tokenizer
    rows = rows_of_prompt(rollout, prompt)
    columns = {name: values[rows] for name, values in token_values(rollout).items() if name in VALUES}
    values = [name for name, of_rows in columns.items() if not of_rows.isnan().all()]
    rewards = completion_returns(rollout.rewards[rows]).tolist()
    completions = []
    for i, row in enumerate(range(rows.start, rows.stop)[:max_completions]):
        ids = rollout.completion_ids[row][rollout.completion_mask[row].bool()].tolist()
        generated = rollout.mask[row, : len(ids)].bool().tolist()
        shown = min(len(ids), max_tokens)
        numbers = {name: columns[name][i, :shown].tolist() for name in values}
        tokens = [
            Token(text, said, {name: of[t] for name, of in numbers.items() if said and not math.isnan(of[t])})
            for t, (text, said) in enumerate(zip(token_texts(ids[:shown], tokenizer), generated, strict=False))
        ]
        completions.append(ShownCompletion(rewards[i], tokens, len(ids) - shown))
    prompt_ids = rollout.prompt_ids[rows.start][rollout.prompt_mask[rows.start].bool()].tolist()
    return Group(prompt, _prompt_text(prompt_ids, tokenizer), completions, values)


def places(rollout: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """`(B,)` index of each row's prompt in this rollout, and `(B,)` its index in the group."""
    rows = rollout.first_row + torch.arange(len(rollout))
    prompts = rows // rollout.num_generations
    return prompts - prompts[0], rows % rollout.num_generations


def rows_of_prompt(rollout: Any, prompt: int) -> slice:
    """
    The rows of prompt number `prompt`.

    Raises:
        IndexError: There is no such prompt.
    """
    prompts, _ = places(rollout)
    count = int(prompts[-1]) + 1
    if prompt not in range(count):
        numbers = "number 0 alone" if count == 1 else f"numbers 0 to {count - 1}"
        raise IndexError(f"`prompt` is {prompt!r}, and this rollout has {count} prompt{'s'[: count - 1]}: {numbers}.")
    at = (prompts == prompt).nonzero().flatten().tolist()
    return slice(at[0], at[-1] + 1)


def token_values(rollout: Any) -> dict[str, torch.Tensor]:
    """`(B, T)` float32 energies, baselines and advantages on the CPU; NaN until they are computed."""
    found = {
        "energy": rollout.energy,
        "baseline": rollout.baselines,
        "advantage": rollout.advantages,
        "group_mean_advantage": rollout.group_mean_advantages,
    }
    shape = rollout.mask.shape
    return {
        name: torch.full(shape, torch.nan) if values is None else values.detach().float().cpu().expand(shape)
        for name, values in found.items()
    }


def token_texts(ids: list[int], tokenizer: Any) -> list[str]:
    """
    The text that each token adds, from `tokenizer` or processor; without one, its id.

    Of several tokens that form one character, the last adds all of it.
    """
    if tokenizer is None:
        return [f"{token} " for token in ids]
    texts, start, done = [], 0, 0  # a token's text may depend on the one before it: decoding begins there
    for end in range(1, len(ids) + 1):
        before, now = _decode(tokenizer, ids[start:done]), _decode(tokenizer, ids[start:end])
        if now.endswith("�") and end < len(ids):
            texts.append("")
            continue
        texts.append(now[len(before) :])
        start, done = done, end
    return texts


def visible(text: str) -> str:
    """`text` with symbols for line breaks and tabs; other unprintable characters are escaped."""
    signs = {"\n": "↵", "\t": "⇥", "\r": "␍"}
    return "".join(signs.get(c, c if c.isprintable() else ascii(c)[1:-1]) for c in text) or "·"


def _decode(tokenizer: Any, ids: list[int]) -> str:
    return tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)


def _prompt_text(ids: list[int], tokenizer: Any) -> str:
    """The text without special tokens, such as the placeholders of images."""
    if tokenizer is None:
        return f"{len(ids)} tokens"
    return tokenizer.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)
