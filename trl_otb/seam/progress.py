"""A trainer's progress functions: given to it, and called on what it sampled before anything is rewarded."""

import inspect
import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch
from accelerate.logging import get_logger
from trl import GRPOConfig, GRPOTrainer
from trl.chat_template_utils import parse_response

from ..progress import PROGRESS_PLACES, Progress, Sampled, copied, functions_by_name, unique_name
from .parts import PROGRESS
from .subclasses import contract_broken


logger = get_logger(__name__)

TAKES_TOOLS = "tools" in inspect.signature(parse_response).parameters  # from trl 1.16 on
NOT_COLUMNS = ("prompt", "completion", "completion_ids")  # of examples, as TRL gives reward functions the others


def given_functions(functions: Any, args: GRPOConfig) -> Any:
    """`progress_funcs` of the trainer or, without them, of its config."""
    named = getattr(args, "progress_funcs", None)
    if functions is not None and named is not None:
        raise ValueError(
            f"`progress_funcs` is set in {type(args).__name__} ({named!r}) and given to the trainer, too: choose one "
            "of them."
        )
    return named if functions is None else functions


def set_up_progress(trainer: GRPOTrainer, functions: Any) -> None:
    """Give the trainer its [`~trl_otb.progress.Progress`], if there are functions."""
    of, by_name = trainer._trl_otb, functions_by_name(functions, rewards_of(trainer))
    if not by_name:
        return
    PROGRESS.check()
    PROGRESS.check_attributes("GRPOTrainer", trainer)
    PROGRESS.warn_if_changed()
    if "progress" not in of.needs:
        logger.warning_once(
            f"`progress_funcs` has no effect: `baseline={trainer.baseline.entry.name!r}` does not read progress. "
            "'value' does."
        )
    places = getattr(trainer.args, "progress_places", PROGRESS_PLACES)
    of.progress = Progress(by_name, called_rewards(trainer), places, trainer.max_completion_length)


def rewards_of(trainer: GRPOTrainer) -> list[tuple[str, Any, float]]:
    """Name, function and weight of each of the run's rewards."""
    weights = trainer.reward_weights.tolist()
    return [*zip(trainer.reward_func_names, trainer.reward_funcs, weights, strict=True)]


def called_rewards(trainer: GRPOTrainer) -> dict[str, Any]:
    """Those that are no models, by name."""
    result: dict[str, Any] = {}
    for name, function, _ in rewards_of(trainer):
        if not isinstance(function, torch.nn.Module):
            result[unique_name(name, result)] = function
    return result


@contextmanager
def progress_of(trainer: GRPOTrainer, inputs: list[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """
    Context in which the run's progress functions are called on each batch that is sampled, as soon as it is; the
    yielded dict gets their numbers, `(B, T, F)`, and names. `inputs` are read before anything is sampled.
    """
    of, found = trainer._trl_otb, dict[str, Any]()
    if of.progress is None or "progress" not in of.needs:
        yield found
        return
    columns = {key: [copied(row[key]) for row in inputs] for key in inputs[0] if key not in NOT_COLUMNS}
    training, generate = trainer.model.training, trainer._generate

    def generate_and_call(prompts: list[Any], *args: Any, **kwargs: Any) -> Any:
        asked = copied(prompts)  # with what an environment's `reset` returned
        sampled = generate(prompts, *args, **kwargs)
        prompt_ids, completion_ids, tool_mask, completions, *_ = sampled
        ids = [[*of_row] for of_row in completion_ids]
        masks = tool_mask if tool_mask is not None else [[1] * len(of_row) for of_row in ids]
        if [*map(len, masks)] != [*map(len, ids)]:
            raise contract_broken(trainer, "`_generate` returns a mask that does not fit the completions", "_generate")
        generated = [[column for column, one in enumerate(of_row) if one] for of_row in masks]
        written = _Written(trainer, asked, prompt_ids, ids)
        numbers = of.progress.measure(
            Sampled(asked, columns, copied(completions), ids, generated, written),
            trainer.state,
            getattr(trainer, "async_loop", None),
        )
        found.update(progress=numbers.to(trainer.accelerator.device), progress_names=of.progress.names)
        lengths = torch.tensor([*map(len, generated)], device=trainer.accelerator.device)
        lengths = trainer.accelerator.gather(lengths)
        if training or of.progress.sees_evaluations:
            of.progress.saw(lengths.tolist())
            if training and not math.isnan(of.progress.time_share):
                trainer._metrics["train"]["otb/progress/time_share"].append(of.progress.time_share)
        return sampled

    with patch.object(trainer, "_generate", generate_and_call):
        yield found


class _Written:
    """What TRL would make of unfinished turns: text, or a message, parsed where TRL parses."""

    def __init__(self, trainer: GRPOTrainer, prompts: list[Any], prompt_ids: list[list[int]], ids: list[list[int]]):
        self.trainer, self.prompt_ids, self.ids = trainer, prompt_ids, ids
        self.chat = not isinstance(prompts[0], str)
        tokenizer = trainer._tokenizer
        templates = (getattr(tokenizer, name, None) for name in ("response_template", "response_schema"))
        self.parses = self.chat and any(of is not None for of in templates)

    def __call__(self, turns: list[tuple[int, int, int]]) -> list[Any]:
        if self.parses:
            return [self._parsed(*turn) for turn in turns]
        texts = self.trainer.processing_class.batch_decode(
            [self.ids[row][start:end] for row, start, end in turns], skip_special_tokens=True
        )
        return [{"role": "assistant", "content": text} for text in texts] if self.chat else texts

    def _parsed(self, row: int, start: int, end: int) -> dict[str, Any]:
        trainer, tools = self.trainer, {}
        if start == end:  # which TRL never parses
            return {"role": "assistant", "content": ""}
        if TAKES_TOOLS:
            of_environments = getattr(trainer, "_env_tools", None)
            tools = {"tools": of_environments[trainer._batch_environments[row]] if of_environments else trainer.tools}
        prefix = [*self.prompt_ids[row], *self.ids[row][:start]]
        return parse_response(trainer._tokenizer, self.ids[row][start:end], prefix=prefix, **tools)
