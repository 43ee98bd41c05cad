"""
GRPOTrainer as Unsloth replaces it: its scoring forward returns no log Σπ², its loss is `compute_loss`, which takes
log-probs from no method of the trainer, and the `__init__` of its config has other defaults than TRL's. Relied on, and
checked:

- `trl.GRPOTrainer` was replaced before trl_otb was imported, and TRL is 1.15 or newer.
- The policy's backbone, by TRL's fused LM head, gives the log-probs of rows without padding on the left: in the first
  rollout they are compared with a softmax of the policy's logits and with Unsloth's own (`untried.py`).
- The loss weights each token by its own advantage: its gradient is compared before the first step.
"""

import copy
import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import fields
from typing import Any
from unittest.mock import patch

import torch
import trl
from torch import Tensor

from ..baselines import Baseline
from ..energy import TokenValues, token_energy
from ..rollout import generated_mask
from .contract import TRIED_UNSLOTH, GRPOTrainer, trl_models, unsloth_has_replaced
from .forwards import EXTRA, SAMPLED, PolicyRecorder, Recording
from .older_trl import NO_FUSED_HEAD
from .untried import unequal_advantages


REPLACED = GRPOTrainer.__name__ == "UnslothGRPOTrainer"  # when trl_otb was imported
LOSS = "UnslothGRPOTrainer.compute_loss"
SAMPLED_AND_EXTRA = f"{SAMPLED}, and one more for hidden states"
LEAST_COSINE = 0.95  # of gradients, which differ by rounding; a loss of completions' mean advantages has far less
NOT_TRIED = ("old_per_token_logps", "sampling_per_token_logps", "unsloth_sample_weight")  # which clip or weight


def check_unsloth() -> None:
    """Raise an `ImportError` if Unsloth has replaced GRPOTrainer, and trl_otb cannot train with it."""
    if unsloth_has_replaced() and not REPLACED:
        raise ImportError(
            "Unsloth has replaced trl.GRPOTrainer after trl_otb was imported, so that OTBGRPOTrainer would train "
            "Unsloth's model by TRL's loss. Import unsloth first: `from unsloth import FastLanguageModel`."
        )
    if REPLACED and NO_FUSED_HEAD:
        raise ImportError(
            f"Unsloth has replaced trl.GRPOTrainer, and trl {trl.__version__} has no fused LM head, which gives the "
            "energies then. Install trl 1.15: pip install 'trl==1.15.0'."
        )


def with_unsloths_defaults(cls: Any) -> Any:
    """
    The dataclass `cls` that derives from GRPOConfig, where Unsloth has replaced the latter: an option that is not given
    is what the `__init__` of Unsloth's config makes it, such as a learning rate of 5e-5, not the default of its field.
    """
    if not REPLACED:
        return cls
    base, plain = cls.__mro__[1], inspect.signature(cls.__init__)
    theirs = {f.name: f for f in fields(base)}
    own = {f.name: f.default for f in fields(cls) if theirs.get(f.name) is not f}

    def __init__(self: Any, *args: Any, **options: Any) -> None:
        self.own_options = own | {name: options.pop(name) for name in own.keys() & options.keys()}
        base.__init__(self, *args, **options, scale_rewards="none")  # of which Unsloth then has nothing to say

    known = plain.parameters | inspect.signature(base.__init__).parameters
    named = [of.replace(kind=of.KEYWORD_ONLY) for of in known.values() if of.kind is not of.VAR_KEYWORD]
    cls.__init__ = __init__
    cls.__init__.__signature__ = plain.replace(parameters=named)
    return cls


def check_loss(trainer: GRPOTrainer, entry: Baseline) -> None:
    """Raise a `ValueError` if a baseline per token does not go with an option of Unsloth's loss."""
    if REPLACED and entry.per_token and trainer.importance_sampling_level == "sequence":
        raise ValueError(
            f"`importance_sampling_level` is 'sequence' and `baseline` is {entry.name!r}, one per token: Unsloth's "
            "loss gives all tokens the mean advantage of the completion then. Set 'token', or choose a baseline per "
            "completion, such as 'rloo'."
        )


class UnslothRecorder(PolicyRecorder):
    """Reads the forwards that sample, and one more for what these do not tell; never those that score."""

    @contextmanager
    def scoring(self, model: torch.nn.Module) -> Iterator[Callable[[Tensor], bool]]:
        yield lambda logps: True

    def reads_sampling(self, trainer: GRPOTrainer) -> bool:
        return True

    def values_of_batch(
        self, trainer: GRPOTrainer, batch: dict[str, Any], mask: Tensor, recording: Recording
    ) -> tuple[TokenValues | None, str | None]:
        if not recording.needed:
            return None, None
        values = None if recording.turns is None else recording.turns.of_batch(batch, mask)
        if values is not None and not recording.lack_states(values):
            return values, SAMPLED
        extra = extra_forward(trainer, batch, recording.states)
        if values is None:
            return extra, EXTRA
        return values._replace(states=extra.states), SAMPLED_AND_EXTRA  # Unsloth's decoding calls no layers


def recorder_of(trainer: GRPOTrainer) -> PolicyRecorder:
    """What reads the forwards of a trainer's policy."""
    check_loss(trainer, trainer.baseline.entry)
    cls = UnslothRecorder if REPLACED else PolicyRecorder
    return cls(trainer.model, trainer.temperature, trainer.args.cast_lm_head_to_fp32)


def extra_forward(trainer: Any, batch: dict[str, Any], states: bool) -> TokenValues:
    """The values of TRL's `batch` from a forward without gradient. A `ValueError` if it has images."""
    if pictures := [name for name in ("pixel_values", "num_images", "image_grid_thw") if name in batch]:
        raise ValueError(
            f"The batch has {', '.join(pictures)}: under Unsloth trl_otb scores text alone. Train without images, or "
            "without Unsloth."
        )
    args, recorder, parts = trainer.args, trainer._trl_otb.recorder, list[list[Tensor]]()
    checkpointing = trl_models.disable_gradient_checkpointing(trainer.model, args.gradient_checkpointing_kwargs)
    rows = min(args.per_device_train_batch_size, args.per_device_eval_batch_size)
    keys = ("prompt_ids", "prompt_mask", "completion_ids", "completion_mask")
    with torch.no_grad(), checkpointing, trainer.accelerator.autocast(), recorder.reading(states) as read:
        for columns in zip(*(batch[key].split(rows) for key in keys), strict=True):
            output, at = scored(recorder.policy, *columns)
            parts.append([of.gather(1, at) for of in (output.log_probs, output.log_sum_sq_probs)])
            if states:
                of_tokens = recorder.checked(read, len(parts))[-1]
                parts[-1].append(of_tokens.gather(1, at.unsqueeze(-1).expand(-1, -1, of_tokens.size(-1))))
    logps, sums, *of_layer = (torch.cat(of) for of in zip(*parts, strict=True))
    return TokenValues(token_energy(logps, sums), logps, of_layer[0] if states else None)


def scored(policy: Any, prompt_ids: Tensor, prompt_mask: Tensor, ids: Tensor, mask: Tensor) -> tuple[Any, Tensor]:
    """
    What the fused LM head computes of rows, and where in it the completions' tokens are, `(b, T)`. Padding on the left,
    which Unsloth's attention may not mask, stands on the right there.
    """
    of_row = torch.cat([prompt_mask, mask], dim=1)
    order = (of_row == 0).int().argsort(dim=1, stable=True)
    packed, of_row = torch.cat([prompt_ids, ids], dim=1).gather(1, order), of_row.gather(1, order)
    labels = packed.masked_fill(of_row == 0, -100)
    output = policy(input_ids=packed, attention_mask=of_row, labels=labels, fused_lm_head=True)
    return output, prompt_mask.sum(dim=1, keepdim=True) - 1 + torch.arange(ids.size(1), device=ids.device)


@contextmanager
def loss_tried(trainer: Any, name: str) -> Iterator[None]:
    """
    Context in which Unsloth's `compute_loss` is tried when it is called: for advantages of both signs in one completion
    its gradient at a parameter must have the direction of that of −Σ A_t log π(y_t), or a `TypeError` is raised.
    """
    compute_loss = trainer.compute_loss

    def gradient(loss: Tensor, parameter: Tensor) -> Tensor:
        loss.backward()  # not by `torch.autograd.grad`, which Unsloth's checkpoints do not serve
        found = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad.float()
        trainer.model.zero_grad(set_to_none=True)
        return found.flatten()

    def tried(model: Any, inputs: dict[str, Any], *args: Any, **kwargs: Any) -> Any:
        mask, policy = generated_mask(inputs), trainer._trl_otb.recorder.policy
        row, order = mask.sum(dim=1).argmax(), torch.arange(mask.size(1), device=mask.device)
        mixed = torch.zeros_like(mask, dtype=torch.float32)
        mixed[row] = unequal_advantages(order) * mask[row]
        head = policy.get_output_embeddings().weight
        parameter = [of for of in policy.parameters() if of.requires_grad and of is not head][-1]
        given = {key: of for key, of in inputs.items() if key not in NOT_TRIED}

        def of_unsloth(advantages: Tensor) -> Tensor:
            return gradient(compute_loss(model, given | {"advantages": advantages}, *args, **kwargs), parameter)

        with trainer.accelerator.no_sync(model), patch.object(trainer, "_metrics", copy.deepcopy(trainer._metrics)):
            found = of_unsloth(mixed) - of_unsloth(torch.zeros_like(mixed))
            keys = ("prompt_ids", "prompt_mask", "completion_ids", "completion_mask")
            with trainer.accelerator.autocast():
                output, at = scored(policy, *(inputs[key][row : row + 1] for key in keys))
            expected = gradient(-(mixed[row] * output.log_probs.gather(1, at)).sum(), parameter)
        cosine = torch.nn.functional.cosine_similarity(found, expected, dim=0).item()
        if not cosine > LEAST_COSINE:
            raise TypeError(
                f"`{name}` does not weight each token by its own advantage: the cosine of its gradient with the "
                f"expected one is {cosine:.3g}. Choose a baseline per completion, such as 'rloo', or install the "
                f"Unsloth that was tried, {TRIED_UNSLOTH}."
            )
        trainer._trl_otb.users_loss_was_tried = True
        return compute_loss(model, inputs, *args, **kwargs)

    with patch.object(trainer, "compute_loss", tried):
        yield
