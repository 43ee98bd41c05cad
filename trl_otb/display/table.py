"""A rollout as a table."""

from typing import TYPE_CHECKING, Any

import torch

from ..baselines.groups import completion_returns, turns_of
from ..optional import require
from .group import places, rows_of_prompt, token_texts, token_values


if TYPE_CHECKING:
    from ..rollout import Rollout


def to_pandas(rollout: "Rollout", tokenizer: Any = None, prompt: int | None = None) -> Any:
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
