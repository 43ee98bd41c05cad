"""Pools of completions from a trainer, and its training forward; the trainer's state is restored."""

import copy
import random
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from transformers import set_seed

from ..rollout import Rollout
from .contract import FORWARD_KWARGS, trl_utils
from .states import StateRecorder
from .trainer import EnergyGRPOTrainer


# State that sampling changes, in addition to random states and the modes of modules
_RECORDS = ("_metrics", "_logs", "_pending_extra_logs", "_pending_metrics")


@contextmanager
def left_as_it_was(trainer: EnergyGRPOTrainer) -> Iterator[None]:
    """Context in which `trainer` samples in eval mode; its state is restored afterwards."""
    records = {name: getattr(trainer, name) for name in _RECORDS}
    generations, tokens_seen = trainer.num_generations_eval, trainer.state.num_input_tokens_seen
    modes = {module: module.training for module in trainer.model.modules()}
    python, numpy = random.getstate(), np.random.get_state()
    device = trainer.accelerator.device
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        trainer.model.eval()
        for name, record in records.items():
            setattr(trainer, name, _copied(record))
        try:
            with trainer.accelerator.autocast():
                yield
        finally:
            for module, training in modes.items():
                module.training = training
            random.setstate(python)
            np.random.set_state(numpy)
            trainer.num_generations_eval, trainer.state.num_input_tokens_seen = generations, tokens_seen
            for name, record in records.items():
                setattr(trainer, name, record)


def rows_at_once(trainer: EnergyGRPOTrainer) -> int:
    """The number of completions that fit into one forward of a process."""
    return max(trainer.args.per_device_train_batch_size, trainer.args.per_device_eval_batch_size)


def sample_pool(
    trainer: EnergyGRPOTrainer, example: dict[str, Any], completions: int, at_once: int, seed: int
) -> list[tuple[Rollout, dict[str, Any]]]:
    """
    Sample completions of one example as in an evaluation, with rewards and energies, `at_once` at a time.

    Returns:
        `list`: the rollout and TRL's batch of each part.
    """
    set_seed(seed)
    parts = []
    for first in range(0, completions, at_once):
        parts.append(_sample(trainer, [example], min(at_once, completions - first)))
    return parts


def sample_batch(
    trainer: EnergyGRPOTrainer, examples: list[dict[str, Any]], completions: int, seed: int
) -> list[Rollout]:
    """So many completions of each example, as in an evaluation, with rewards and energies, in order."""
    set_seed(seed)
    prompts = max(1, rows_at_once(trainer) // completions)
    parts = range(0, len(examples), prompts)
    return [_sample(trainer, examples[first : first + prompts], completions)[0] for first in parts]


def _sample(
    trainer: EnergyGRPOTrainer, examples: list[dict[str, Any]], completions: int
) -> tuple[Rollout, dict[str, Any]]:
    """Sample this number of completions for each example, all at once."""
    trainer.num_generations_eval = completions
    rollout, batch = trainer.collect([dict(example) for example in examples for _ in range(completions)])
    if rollout.energy is None:
        trainer.set_energies_of(rollout, trainer.extra_forward(batch))
    if rollout.unweighted_energy is not None:  # the gradients of a comparison have no importance ratios
        rollout.energy, rollout.unweighted_energy = rollout.unweighted_energy, None
    return rollout, batch


@contextmanager
def recording_states(trainer: EnergyGRPOTrainer) -> Iterator[None]:
    """Context in which forwards yield hidden states, even if the trainer's baseline does not read them."""
    before = trainer._state_recorder
    recorder = StateRecorder(trainer.policy) if before is None else before
    trainer._state_recorder = recorder
    try:
        yield
    finally:
        trainer._state_recorder = before
        if before is None:
            recorder.remove()


def single_rows(batch: dict[str, Any]) -> list[dict[str, Any]]:
    """The rows of TRL's `batch` one by one, each without the padding after its completion."""
    rows = trl_utils.split_tensor_dict(trl_utils.split_pixel_values_by_grid(batch), len(batch["completion_ids"]))
    found = []
    for row in map(trl_utils.unsplit_pixel_values_by_grid, rows):
        length, padded = int(row["completion_mask"].sum()), row["completion_ids"].size(1)
        for key in ("completion_ids", "completion_mask", "token_type_ids", "mm_token_type_ids"):
            if row.get(key) is not None:
                row[key] = row[key][:, : row[key].size(1) - padded + length]
        found.append(row)
    return found


def logps_and_states(
    trainer: EnergyGRPOTrainer, row: dict[str, Any]
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """
    The training forward with gradient for one of [`single_rows`], cut before the LM head.

    Returns:
        `tuple`: log π(y_t), `(1, T)`, whose graph ends at the second value; the head's input `(1, P + T, d)`, a leaf;
        and the same values with the graph of the model's body.
    """
    states: list[torch.Tensor] = []

    def cut(module: Any, args: Any, output: Any) -> Any:
        body = output.last_hidden_state
        states.extend([body.detach().requires_grad_(), body])
        output.last_hidden_state = states[-2]
        return output

    hook = trainer.policy.base_model.register_forward_hook(cut)
    try:
        with torch.enable_grad():
            logps, *_ = trainer._get_per_token_logps_and_entropies(
                trainer.model,
                input_ids=torch.cat([row["prompt_ids"], row["completion_ids"]], dim=1),
                attention_mask=torch.cat([row["prompt_mask"], row["completion_mask"]], dim=1),
                logits_to_keep=row["completion_ids"].size(1),
                batch_size=1,
                **{key: row[key] for key in FORWARD_KWARGS if key in row},
            )
    finally:
        hook.remove()
    leaf, body = states
    return logps, leaf, body


def training_examples(trainer: EnergyGRPOTrainer) -> Any:
    """The training data as the trainer's dataloader reads it."""
    data = trainer.train_dataset
    if hasattr(data, "column_names") and trainer.args.remove_unused_columns and data.column_names is not None:
        data = trainer._remove_unused_columns(data, description="training")
    return data


def _copied(record: Any) -> Any:
    """A copy of nested containers that shares their elements."""
    if isinstance(record, dict):
        found = copy.copy(record)  # a defaultdict stays one
        for key, value in record.items():
            found[key] = _copied(value)
        return found
    return copy.copy(record) if isinstance(record, list | deque) else record
