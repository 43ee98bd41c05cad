"""Whether tokens were drawn from the distribution that energies and log-probs are of, and their ratio if not."""

from typing import Any

import torch
from torch import Tensor
from trl import GRPOTrainer

from ..sampler import changed_distribution, dropout_of
from .forwards import SAMPLED, policy_of


def draw_ratio(
    trainer: GRPOTrainer, batch: dict[str, Any], source: str | None, logps: Tensor, processor: str | None
) -> tuple[Tensor | None, str | None]:
    """
    `Completions.draw_ratio` for TRL's `batch`, whose values, such as `logps`, come from `source`; and, where it is 0
    since the distribution that was sampled from is not recorded, the reason. `processor` is one that `generate` had.
    """
    unknown, of_sampler = changed_distribution(trainer.args), batch.get("sampling_per_token_logps")
    if unknown is None and processor is not None:
        unknown = f"tokens were sampled with {processor}"
    corrected = trainer.use_vllm and trainer.args.vllm_importance_sampling_correction
    of_server = trainer.use_vllm and trainer.args.vllm_mode == "server"
    if unknown is None and of_server and not corrected and trainer.temperature != 1:  # as TRL advises if raw
        unknown = "log-probs of a vLLM server may be of temperature 1 without `vllm_importance_sampling_correction`"
    if unknown is None and of_sampler is not None:
        by_completion = corrected and trainer.vllm_importance_sampling_mode.startswith("sequence")
        return None if by_completion else torch.exp(logps - of_sampler), None
    if unknown is None and source != SAMPLED:
        if trainer.rollout_func is not None:
            unknown = "`rollout_func` returns no log-probs"
        elif dropout_of(policy_of(trainer.model)):  # in eval mode, too: a comparison is of a run that trains
            unknown = "tokens were sampled with another dropout mask"
        elif batch.get("old_per_token_logps") is None:
            unknown = "the forwards that sampled could not be read"
    return (None, None) if unknown is None else (torch.zeros_like(logps), unknown)
