"""Energies, log-probs and hidden states of what `generate` samples, matched by their ids."""

from typing import Any

import torch
from torch import Tensor

from ..energy import TokenValues, token_energy


class SampledTurn:
    """What the forwards of one `generate` compute for each position's distribution, before any processor of logits."""

    def __init__(self, temperature: float) -> None:
        self.temperature, self.calls = temperature, 0
        self._prompt: Tensor | None = None  # (b, P), what the first forward read
        self._before: Tensor | None = None  # (b, V) probabilities at the last position
        self._values: list[tuple[Tensor, Tensor, Tensor]] = []  # tokens, energies, log-probs, each (b,)

    def on_forward(self, module: Any, args: Any, kwargs: dict[str, Any], output: Any) -> None:
        """A forward hook of the policy."""
        read, logits = kwargs.get("input_ids"), getattr(output, "logits", None)
        if read is None or logits is None:
            self._prompt = None
            return
        if self.calls == 0:
            self._prompt = read
        else:
            self._drawn(read[:, -1])
        self.calls += 1
        last = logits[:, -1].detach().float()
        self._before = torch.softmax(last if self.temperature == 1 else last / self.temperature, dim=-1)

    def _drawn(self, tokens: Tensor) -> None:
        if self._before is None or len(tokens) != len(self._before):
            self._prompt = None  # another kind of generation, such as beam search
            return
        probs = self._before.gather(1, tokens.to(self._before.device).unsqueeze(1)).squeeze(1)
        # Less work than log_softmax and logsumexp. 2e-38 is a normal number, whose logarithm is finite
        norm, logps = torch.linalg.vector_norm(self._before, dim=-1), probs.clamp(min=2e-38).log()
        self._values.append((tokens, token_energy(logps, 2 * norm.log()), logps))

    def rows(
        self, prompt_ids: list[list[int]], completion_ids: list[list[int]], states: list[Tensor] | None
    ) -> list[TokenValues | None]:
        """
        The values of each completion's tokens, `(T,)`; `None` where what was recorded is not of these ids. `states`
        are those at the last position of each forward, `(b, 1, k)`.
        """
        if self._prompt is None or len(self._prompt) != len(prompt_ids):
            return [None] * len(prompt_ids)
        at = len(self._values)  # of the token that no forward has read
        self._drawn(
            torch.tensor([ids[at] if len(ids) > at else 0 for ids in completion_ids], device=self._prompt.device)
        )
        self._before = None
        tokens, energy, logps = (torch.stack(of, dim=1) for of in zip(*self._values, strict=True))
        of_all = None if states is None else torch.cat(states, dim=1)
        read, drawn, result = self._prompt.tolist(), tokens.tolist(), []
        for row, (prompt, ids) in enumerate(zip(prompt_ids, completion_ids, strict=True)):
            n = len(ids)
            same = read[row][-len(prompt) :] == prompt and drawn[row][:n] == ids
            of_row = TokenValues(energy[row, :n], logps[row, :n], None if of_all is None else of_all[row, :n])
            result.append(of_row if same else None)
        return result


class SampledTurns:
    """The turns of a generation batch, matched by their ids."""

    def __init__(self) -> None:
        self._turns: dict[tuple[int, ...], list[tuple[list[int], TokenValues]]] = {}
        self._calls: list[list[TokenValues | None]] = []

    def add(self, rows: list[TokenValues | None], prompt_ids: list[list[int]], completion_ids: list[list[int]]) -> None:
        """Keep what was recorded in one `generate`."""
        self._calls.append(rows)
        for prompt, ids, values in zip(prompt_ids, completion_ids, rows, strict=True):
            if values is not None:
                self._turns.setdefault(tuple(prompt), []).append((ids, values))

    def of_batch(self, batch: dict[str, Any], mask: Tensor) -> TokenValues | None:
        """
        The values of TRL's `batch`; `None` unless every token of `mask`, `(B, T)`, was recorded. With images, which ids
        do not show, completions of one call are taken row by row.
        """
        images = any(key in batch for key in ("pixel_values", "num_images"))
        if images and (len(self._calls) != 1 or len(self._calls[0]) != len(mask)):
            return None
        generated, ids = mask.bool().cpu(), batch["completion_ids"].cpu()
        prompts = [
            of[m.bool()].tolist() for of, m in zip(batch["prompt_ids"].cpu(), batch["prompt_mask"].cpu(), strict=True)
        ]
        result: list[Tensor | None] = []
        for row in range(len(mask)):
            completion = ids[row].tolist()
            for start, end in _stretches(generated[row]):
                turn = completion[start:end]
                values = self._calls[0][row] if images else self._find((*prompts[row], *completion[:start]), turn)
                if values is None or len(values.energy) < end - start:
                    return None
                if result and (result[-1] is None) != (values.states is None):
                    return None  # another turn was sampled in another way
                result = result or _zeros_like(values, mask)
                for to, of in zip(result, values, strict=True):
                    if to is not None and of is not None:
                        to[row, start:end] = of[: end - start]
        if not result:  # nothing was generated
            recorded = next((of for rows in self._calls for of in rows if of is not None), None)
            if recorded is None:
                return None
            result = _zeros_like(recorded, mask)
        energy, logps, states = (None if of is None else of.to(mask.device) for of in result)
        assert energy is not None and logps is not None
        return TokenValues(energy, logps, states)

    def _find(self, before: tuple[int, ...], turn: list[int]) -> TokenValues | None:
        turns = self._turns.get(before, [])
        at = next((i for i, (ids, _) in enumerate(turns) if ids[: len(turn)] == turn), None)
        if at is None:
            return None
        # Rows with the same ids have values of their own where there is dropout
        turns.append(turns.pop(at))
        return turns[-1][1]


def _zeros_like(values: TokenValues, mask: Tensor) -> list[Tensor | None]:
    """For the tokens of `mask`, `(B, T)`."""
    return [None if of is None else of.new_zeros(*mask.shape, *of.shape[1:]) for of in values]


def _stretches(generated: Tensor) -> list[tuple[int, int]]:
    """The ranges of a row in which all is generated."""
    edges = torch.nn.functional.pad(generated.int(), (1, 1)).diff().nonzero().flatten().tolist()
    return list(zip(edges[::2], edges[1::2], strict=True))
