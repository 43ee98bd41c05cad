"""Completions from a trainer whose state is restored, and its training forward, for the comparison of baselines."""

import copy
import random
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from transformers import set_seed

from ..baselines import Completions, joined
from ..progress import Progress
from ..seam.contract import trl_utils
from ..seam.forwards import policy_of, score
from ..trainer import OTBGRPOTrainer, collect


@contextmanager
def at_rest(trainer: OTBGRPOTrainer, needs: frozenset[str], progress: Progress | None = None) -> Iterator[None]:
    """
    Context in which `trainer` samples in eval mode what baselines need, with `progress` if it has none of its own; its
    state is restored afterwards.
    """
    names, of = ("_metrics", "_logs", "_pending_extra_logs", "_pending_metrics"), trainer._trl_otb
    kept = {name: getattr(trainer, name) for name in (*names, "num_generations_eval")}
    private = of.needs, of.energy_source, of.progress
    tokens_seen = trainer.state.num_input_tokens_seen
    modes = {module: module.training for module in trainer.model.modules()}
    python, numpy = random.getstate(), np.random.get_state()
    device = trainer.accelerator.device
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        trainer.model.eval()
        of.needs, of.progress = of.needs | needs, of.progress.for_comparison() if of.progress else progress
        for name in names:
            setattr(trainer, name, copy.deepcopy(kept[name]))
        try:
            with trainer.accelerator.autocast():
                yield
        finally:
            for module, training in modes.items():
                module.training = training
            random.setstate(python)
            np.random.set_state(numpy)
            trainer.state.num_input_tokens_seen = tokens_seen
            for name, value in kept.items():
                setattr(trainer, name, value)
            of.needs, of.energy_source, of.progress = private


Pool = tuple[Completions, list[dict[str, Any]]]  # of one example, with the rows of TRL's batch one by one


def sample(trainer: OTBGRPOTrainer, examples: list[dict[str, Any]], completions: int, seed: int) -> list[Pool]:
    """So many completions of each example, as in an evaluation; the record is on the CPU."""
    set_seed(seed % 2**32)
    at_once = max(trainer.args.per_device_train_batch_size, trainer.args.per_device_eval_batch_size)
    together = max(1, at_once // completions)  # examples
    parts: list[list[Pool]] = [[] for _ in examples]
    for first in range(0, completions, at_once):
        n = trainer.num_generations_eval = min(at_once, completions - first)
        for start in range(0, len(examples), together):
            some = examples[start : start + together]
            _, record, batch = collect(trainer, [dict(example) for example in some for _ in range(n)])
            record, rows = record.to("cpu"), single_rows(batch)
            for i, part in enumerate(parts[start : start + together]):
                part.append((record.rows(slice(i * n, i * n + n)), rows[i * n : i * n + n]))
    wholes = [joined([record for record, _ in part]) for part in parts]
    # Gradients of a comparison have no importance ratios
    pools = [replace(whole, loss_energy=whole.energy, num_generations=completions) for whole in wholes]
    return [(pool, [row for _, rows in part for row in rows]) for pool, part in zip(pools, parts, strict=True)]


def single_rows(batch: dict[str, Any]) -> list[dict[str, Any]]:
    """The rows of TRL's `batch` one by one, each without the padding after its completion."""
    rows = trl_utils.split_tensor_dict(trl_utils.split_pixel_values_by_grid(batch), len(batch["completion_ids"]))
    result = []
    for row in map(trl_utils.unsplit_pixel_values_by_grid, rows):
        length, padded = int(row["completion_mask"].sum()), row["completion_ids"].size(1)
        for key in ("completion_ids", "completion_mask", "tool_mask", "token_type_ids", "mm_token_type_ids"):
            if row.get(key) is not None:
                row[key] = row[key][:, : row[key].size(1) - padded + length]
        result.append(row)
    return result


def logps_and_states(trainer: OTBGRPOTrainer, row: dict[str, Any]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """
    The training forward with gradient for one of [`single_rows`], cut before the LM head: log π(y_t), `(1, T)`, whose
    graph ends at the second value; the head's input `(1, P + T, d)`, a leaf; and the same with the graph of the body.
    """
    leaf = body = torch.empty(0)

    def cut(module: Any, args: Any, output: Any) -> Any:
        nonlocal leaf, body
        body = output.last_hidden_state
        output.last_hidden_state = leaf = body.detach().requires_grad_()
        return output

    hook = policy_of(trainer.model).base_model.register_forward_hook(cut)
    try:
        with torch.enable_grad():
            return score(trainer, row, batch_size=1), leaf, body
    finally:
        hook.remove()


def training_examples(trainer: OTBGRPOTrainer) -> Any:
    """The training data as the trainer's dataloader reads it."""
    data = trainer.train_dataset
    if hasattr(data, "column_names") and trainer.args.remove_unused_columns and data.column_names is not None:
        data = trainer._remove_unused_columns(data, description="training")
    return data
