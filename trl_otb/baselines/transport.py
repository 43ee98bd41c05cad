"""Completions of several processes or batches: sent, padded and joined."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from jaxtyping import Int
from torch import Tensor

from .completions import UNSENT, Completions


OF_TOKENS = ("mask", "energy", "loss_energy", *UNSENT)


def gathered(local: Completions, gather: Callable[[Tensor], Tensor], tokens: bool) -> Completions:
    """
    The rows of all processes: `gather` concatenates their tensors, which have one shape; all must call it. Mask and
    energies are sent if the baseline compares `tokens`; `UNSENT`, such as states, never is.
    """
    sizes = torch.tensor([[local.mask.size(1), local.returns.size(1)]], device=local.mask.device)
    length, of_returns = gather(sizes).amax(dim=0).tolist()
    sent = only_compared(local, tokens)
    sent = replace(sent, energy=None) if sent.energy is sent.loss_energy else sent
    sent = padded(sent, length, of_returns > 1)
    batch = {name: gather(x) for name, x in sent.tensors().items() if tokens or name != "mask"}
    batch.setdefault("mask", batch["scored"] * (batch["lengths"] > 0))
    of_all: dict[str, Any] = {"energy": batch.get("loss_energy"), **batch}
    return replace(sent, **of_all)


def only_compared(x: Completions, tokens: bool) -> Completions:
    """Without `UNSENT`, and without energies unless the baseline compares `tokens`."""
    unsent = UNSENT + (() if tokens else ("energy", "loss_energy"))
    none: dict[str, Any] = dict.fromkeys(unsent)
    return replace(x, **none)


def padded(x: Completions, length: int, returns_of_tokens: bool) -> Completions:
    """The same completions with T = `length`, with a return per token if asked for; the last value is repeated."""
    more, more_returns = length - x.mask.size(1), length - x.returns.size(1)
    tensors: dict[str, Any] = {
        name: torch.nn.functional.pad(values, (0, 0) * (values.dim() - 2) + (0, more))
        for name, values in x.tensors().items()
        if name in OF_TOKENS and more > 0
    }
    if returns_of_tokens and more_returns > 0:
        tensors["returns"] = torch.cat([x.returns, x.returns[:, -1:].expand(-1, more_returns)], dim=1)
    return replace(x, **tensors)


def joined(parts: list[Completions]) -> Completions:
    """Completions of several batches, with what all of them hold, padded to the longest."""
    if any(x.draw_ratio is not None for x in parts):  # without one it is 1
        parts = [x if x.draw_ratio is not None else replace(x, draw_ratio=torch.ones_like(x.mask)) for x in parts]
    length = max(x.mask.size(1) for x in parts)
    returns_of_tokens = any(x.returns.size(1) > 1 for x in parts)
    tensors = [padded(x, length, returns_of_tokens).tensors() for x in parts]
    names = set.intersection(*({*of} for of in tensors))
    none: dict[str, Any] = dict.fromkeys({*parts[0].tensors()} - names)
    found: dict[str, Any] = {name: torch.cat([of[name] for of in tensors]) for name in names}
    return replace(parts[0], **none | found)


def batch_of_groups(groups: list[Completions]) -> Completions:
    """A generation batch of groups of N completions, each of a prompt of its own."""
    numbers = torch.arange(len(groups)).repeat_interleave(groups[0].num_generations)
    return replace(joined(groups), prompt=numbers)


def numbered(local: Completions, gather: Callable[[Tensor], Tensor]) -> tuple[Int[Tensor, " B"], int, int]:
    """Each row's prompt, counted from the first of all processes, on the CPU; their number; how many have tokens."""
    ends = torch.nn.functional.pad(torch.stack([-local.prompt, local.prompt]), (0, 1), value=-(2**62)).amax(dim=1)
    first, last = gather(ends.unsqueeze(0)).amax(dim=0).tolist()
    seen = local.prompt.new_zeros(1, max(last + first + 1, 1))
    seen[0].scatter_reduce_(0, local.prompt + first, local.mask.any(dim=1).long(), "amax")
    return local.prompt.cpu() + first, seen.size(1), max(int(gather(seen).amax(dim=0).sum()), 1)
