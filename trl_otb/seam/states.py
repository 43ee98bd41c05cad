"""Records hidden states of the policy in the forwards that TRL runs anyway, projected to a few numbers."""

import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch


NUMBERS = 32  # per token
DEPTH = 2 / 3  # of the recorded layer


class StateRecorder:
    """
    Records the output of a layer at two thirds of the policy's depth, with a fixed random projection.

    If the decoder has no list of layers, its output is recorded instead.

    Args:
        policy:
            The model, without what PEFT wraps it in.
    """

    def __init__(self, policy: Any) -> None:
        self._chunks: list[torch.Tensor] | None = None  # recording while this is a list
        self._projection: torch.Tensor | None = None
        decoder = (policy.get_decoder() if hasattr(policy, "get_decoder") else None) or policy.base_model
        layers = _layers_of(decoder)
        layer = decoder if layers is None else layers[math.ceil(DEPTH * len(layers)) - 1]
        self._heard = f"{type(layer).__name__} of {type(decoder).__name__}"
        self._hook = layer.register_forward_hook(self._record)

    @contextmanager
    def recording(self) -> Iterator[list[torch.Tensor]]:
        """Context in which each call of the layer appends its states, `(b, P + T, k)`, to the yielded list."""
        chunks: list[torch.Tensor] = []
        self._chunks = chunks
        try:
            yield chunks
        finally:
            self._chunks = None

    def check(self, chunks: list[torch.Tensor], forwards: int) -> None:
        """
        Raises:
            ValueError: The layer was not heard once in each of the policy's forwards, or yields no `(b, P + T, d)`.
        """
        instead = "Choose a baseline that reads no states, such as 'rloo_pooled'."
        if len(chunks) != forwards:
            raise ValueError(
                f"Hidden states are heard where the policy calls a {self._heard}, which it did {len(chunks)} times in "
                f"{forwards} forwards: this model keeps its layers elsewhere, or uses one several times. {instead}"
            )
        if odd := [tuple(chunk.shape) for chunk in chunks if chunk.dim() != 3]:
            raise ValueError(
                f"A {self._heard} yields hidden states of shape {odd[0]}, projected to {odd[0][-1]} numbers, and not "
                f"one per token: (rows, tokens, numbers). {instead}"
            )

    def remove(self) -> None:
        """Remove the hook from the policy."""
        self._hook.remove()

    def _record(self, module: Any, args: Any, output: Any) -> None:
        if self._chunks is None:
            return
        if not isinstance(output, torch.Tensor):
            output = output[0]
        states = output.detach().float()
        if self._projection is None:
            size = states.size(-1)
            random = torch.randn(size, min(size, NUMBERS), generator=torch.Generator().manual_seed(0))
            self._projection = (random / math.sqrt(size)).to(states.device)
        with torch.autocast(states.device.type, enabled=False):
            self._chunks.append(states @ self._projection)


def _layers_of(decoder: Any) -> torch.nn.ModuleList | None:
    """The longest list of modules among the decoder's own."""
    lists = [child for child in decoder.children() if isinstance(child, torch.nn.ModuleList) and len(child)]
    return max(lists, key=len, default=None)
