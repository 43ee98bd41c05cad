"""What is compared before the first step with a TRL that was not read: log-probs, energies, advantages at the loss."""

from functools import partial
from typing import Any

import torch
from torch import Tensor
from trl import GRPOTrainer

from ..energy import TokenValues, token_energy
from ..rollout import Rollout
from .contract import incompatible_trl
from .forwards import score
from .subclasses import contract_broken, users_methods


# Mean difference of log-probs and energies from those of a softmax. The fused head's are float32, also of a model in
# bfloat16, whose logits are rounded to 3 digits; those of another token or temperature differ by about 1
TOLERANCE = {torch.float32: 0.01}
ROUNDED_TOLERANCE = 0.1
# By which a user's class may change advantages between rollout and loss
ON_THE_WAY = ("_compute_loss", "_generate_and_score_completions", "_prepare_inputs", "compute_loss", "training_step")


def unequal_advantages(order: Tensor) -> Tensor:
    """Of both signs, by the places of tokens: unequal ones for neighbours in rows and columns."""
    sizes = 1 + order * 0.618 % 1
    return sizes.where(order % 3 > 0, -sizes)


@torch.no_grad()
def check_forward(trainer: GRPOTrainer, batch: dict[str, Any], values: TokenValues | None, mask: Tensor) -> None:
    """
    Raise what [`contract_broken`] returns unless TRL's log-probs of a completion, and its `values`, are those of a
    softmax of the policy's own logits. Takes three forwards of one completion, with the longest prompt, whose positions
    do not depend on padding. With pictures, with DeepSpeed, whose ZeRO-3 fails where forwards of two kinds take turns,
    and where two forwards differ, as with dropout, nothing is compared.
    """
    if trainer.is_deepspeed_enabled or any(key in batch for key in ("pixel_values", "num_images")):
        return
    row = int(batch["prompt_mask"].sum(dim=1).argmax())
    named = {"input_ids": ("prompt_ids", "completion_ids"), "attention_mask": ("prompt_mask", "completion_mask")}
    of_row = {key: batch[key][row : row + 1] for keys in named.values() for key in keys}
    inputs = {name: torch.cat([of_row[key] for key in keys], dim=1) for name, keys in named.items()}
    device = mask.device
    with torch.random.fork_rng([device] if device.type == "cuda" else []), trainer.accelerator.autocast():
        logits, again = (trainer.model(**inputs).logits[0, -mask.size(1) - 1 : -1] for _ in range(2))
        of_trl = score(trainer, of_row, 1, partial(GRPOTrainer._get_per_token_logps_and_entropies, trainer))[0]
    limit = TOLERANCE.get(logits.dtype, ROUNDED_TOLERANCE)
    if not torch.allclose(logits, again, rtol=0, atol=limit):  # or they are NaN
        return
    logps_of_all = (logits.float() / trainer.temperature).log_softmax(-1)
    logps = logps_of_all.gather(-1, batch["completion_ids"][row].unsqueeze(-1)).squeeze(-1)
    found = [("log-probs of GRPOTrainer's forward", of_trl, logps)]
    if values is not None:
        energies = token_energy(logps, (2 * logps_of_all).logsumexp(-1))
        found += [("log-probs", values.logps[row], logps), ("energies", values.energy[row], energies)]
    generated = mask[row].bool()
    for name, of_forward, of_softmax in found:
        difference = (of_forward.float() - of_softmax).abs()[generated]
        if not difference.sum() <= limit * len(difference):  # or it is NaN
            raise contract_broken(
                trainer,
                f"the {name} of completion {row} of a rollout differ by {difference.mean().item():.3g}, on average, "
                "from those of a softmax of the policy's logits",
                "_generate_single_turn",
                "_get_per_token_logps_and_entropies",
            )


def check_rows(trainer: GRPOTrainer, inputs: dict[str, Any], rollout: Rollout | None) -> None:
    """
    Raise an `ImportError` unless each completion of a micro-batch has its advantages of the rollout. Not looked at if a
    user's class may have changed them.
    """
    if rollout is None or rollout.advantages is None or users_methods(trainer, ON_THE_WAY):
        return
    tolerance = 0.01 * rollout.advantages.abs().max()  # also of bfloat16
    for ids, advantages in zip(inputs["completion_ids"], inputs["advantages"], strict=True):
        near = (advantages.float() - rollout.advantages).abs().amax(dim=-1) <= tolerance
        if not ((ids == rollout.completion_ids).all(dim=-1) & near).any():
            raise incompatible_trl("advantages of a rollout are changed before they reach `GRPOTrainer._compute_loss`")
