"""Whether tokens were drawn from the distribution that energies and log-probs are of, and their ratio if not."""

from typing import Any

import torch
from accelerate.logging import get_logger
from torch import Tensor
from trl import GRPOTrainer

from ..run.sampler import changed_distribution, dropout_of
from .forwards import SAMPLED, policy_of


logger = get_logger(__name__)


def draw_ratio(
    trainer: GRPOTrainer, batch: dict[str, Any], source: str | None, logps: Tensor, processor: str | None
) -> Tensor | None:
    """
    `Completions.draw_ratio` for TRL's `batch`, whose values, such as `logps`, come from `source`; 0, with a warning,
    where the distribution that was sampled from is not recorded. `processor` is one that `generate` had.
    """
    args, of_sampler = trainer.args, batch.get("sampling_per_token_logps")
    corrected = trainer.use_vllm and args.vllm_importance_sampling_correction
    unknown = changed_distribution(args)
    if unknown is None and processor is not None:
        unknown = f"tokens were sampled with {processor}"
    of_server = trainer.use_vllm and args.vllm_mode == "server"
    if unknown is None and of_server and not corrected and trainer.temperature != 1:  # as TRL advises if raw
        unknown = "log-probs of a vLLM server may be of temperature 1 without `vllm_importance_sampling_correction`"
    if unknown is None and of_sampler is not None:
        by_completion = corrected and trainer.vllm_importance_sampling_mode.startswith("sequence")
        return None if by_completion else torch.exp(logps - of_sampler)
    if unknown is None and not (source or "").startswith(SAMPLED):
        if trainer.rollout_func is not None:
            unknown = "`rollout_func` returns no log-probs"
        elif dropout_of(policy_of(trainer.model)):  # in eval mode, too: a comparison is of a run that trains
            unknown = "tokens were sampled with another dropout mask"
        elif batch.get("old_per_token_logps") is None:
            unknown = "the forwards that sampled could not be read"
    if unknown is None:
        return None
    logger.warning_once(f"Later luck is not subtracted: {unknown}.")
    return torch.zeros_like(logps)
