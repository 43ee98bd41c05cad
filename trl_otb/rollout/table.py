"""A rollout as a table, and its repr."""

from typing import Any

import torch

from ..baselines import completion_returns, turns_of
from ..figure import require
from .group import places, rows_of_prompt, token_texts, token_values


def summary(rollout: Any) -> str:
    """A few lines on sizes, rewards, and which values are available."""
    prompts, completions, n = int(places(rollout)[0][-1]) + 1, len(rollout), rollout.num_generations
    generated, shown = int(rollout.mask.sum()), int(rollout.completion_mask.sum())
    tools = f", and {shown - generated:,} of tools" if shown > generated else ""
    returns = completion_returns(rollout.rewards).cpu()
    returns = returns[~returns.isnan()]
    mean = f"mean {returns.mean():.4g}" if len(returns) > 0 else "none"
    missing = completions - len(returns)
    without = f"; {missing} completion{_s(missing)} without" if missing > 0 else ""
    advantages = "not yet"
    if rollout.advantages is not None:
        advantages = "per completion" if rollout.advantages.size(1) == 1 else "per token"
    return "\n".join(
        [
            f"Rollout of {prompts} prompt{_s(prompts)}, N = {n}: {completions} completions, {generated:,} tokens{tools}",
            f"rewards: {mean}, {'one per completion' if rollout.rewards.dim() == 1 else 'one per token'}{without}",
            f"energies: {'none' if rollout.energy is None else 'of all tokens'}",
            f"advantages: {advantages}",
            "see show(prompt=0), plot(path), to_pandas()",
        ]
    )


def _s(count: int) -> str:
    return "" if count == 1 else "s"


def to_pandas(rollout: Any, tokenizer: Any = None, prompt: int | None = None) -> Any:
    """See [`~trl_otb.rollout.Rollout.to_pandas`]."""
    pandas = require("pandas", "A table of a rollout")
    tokenizer = rollout.processing_class if tokenizer is None else tokenizer
    rows = slice(0, len(rollout)) if prompt is None else rows_of_prompt(rollout, prompt)
    mask, ids = rollout.mask[rows].cpu().bool(), rollout.completion_ids[rows].cpu()
    row, position = mask.nonzero().unbind(dim=1)
    prompts, completions = (numbers[rows] for numbers in places(rollout))
    turns = turns_of(mask)
    values = {name: of_all[rows][mask].numpy() for name, of_all in token_values(rollout).items()}
    return pandas.DataFrame(
        {
            "prompt": prompts[row].numpy(),
            "completion": completions[row].numpy(),
            "turn": turns[mask].numpy(),
            "position": position.numpy(),
            "token_id": ids[mask].numpy(),
            "text": None if tokenizer is None else _texts(ids, rollout.completion_mask[rows].cpu(), mask, tokenizer),
            "reward": completion_returns(rollout.rewards[rows]).cpu()[row].numpy(),
            **values,
        }
    )


def _texts(ids: torch.Tensor, completion_mask: torch.Tensor, mask: torch.Tensor, tokenizer: Any) -> list[str]:
    """The text of the tokens in `mask`; tool output is decoded too, since text may depend on what precedes it."""
    found = []
    for of_row, is_token, generated in zip(ids, completion_mask.bool(), mask, strict=True):
        texts = token_texts(of_row[is_token].tolist(), tokenizer)
        found += [text for text, said in zip(texts, generated[is_token].tolist(), strict=True) if said]
    return found
