"""What `value` reads of each token: numbers of the text before it, and how lucky its draw was."""

import math
from collections.abc import Iterator
from typing import NamedTuple

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from ..energy import prefix_sums
from .completions import Completions
from .least_squares import B0, ONE


# Tokens whose features are in memory at once, in batches of up to `MOST_BLOCKS` such blocks; larger batches have larger
# blocks. Each costs time of its own; a large one leaves the CPU's cache
MOST_BLOCKS = 256
READ_AT_ONCE, READ_AT_ONCE_ON_GPU = 2**13, 2**16
# What V is linear in, before hidden states
NUMBERS = (
    ONE, B0, "earned", "energy", "surprisal", "count", "root_energy", "root_surprisal", "root_count", "worst", "sure",
)  # fmt: skip
STATE, MEAN_STATE, PROGRESS = "state ", "mean state ", "progress "  # how the names of the other columns begin
# Hidden states are numbers of one layer, at this part of the depth: the last ones are about the next token
LAYER_DEPTH = 2 / 3
# This many random directions of a state. Few of them know little, and many fit chance while prompts are few. All
# processes know the same ones before the first batch
PROJECTED_SIZE = 32


class Prefix(NamedTuple):
    """
    Of each token; all but `luck` is known before it is drawn. Zeros where `known` is False: numbers before
    the token are not finite there.

    Args:
        known: Whether all numbers are finite.
        names: Of the numbers.
        numbers: `NUMBERS`: 1; B0, left empty here; the rewards earned; of the tokens before, sums of energy, of
            surprisal and their count, and the square roots of the three; `worst`; `sure`. Then hidden states: here, and
            their mean so far. Then the numbers of progress functions: as they are, and times √n.
        sure: σ_t = Σ_v π(v)², how sure the policy is of the token to come.
        worst: m_t, the largest σ − π(y) of the tokens before: an improbable token is often a mistake.
        root_count: √n_t, of the number of tokens before.
        earned: The rewards of the tokens before.
        luck: d_t = ρ (σ_t − π(y_t)), which has mean 0 given what precedes; see `Completions.draw_ratio` for ρ.
    """

    known: Bool[Tensor, "B T"]
    names: tuple[str, ...]
    numbers: Float[Tensor, "B T K"]
    sure: Float[Tensor, "B T"]
    worst: Float[Tensor, "B T"]
    root_count: Float[Tensor, "B T"]
    earned: Float[Tensor, "B T"]
    luck: Float[Tensor, "B T"]

    def with_b0(self, b0: Float[Tensor, "B #T"]) -> Float[Tensor, "B T K"]:
        """What V is linear in."""
        of_known = (b0 * self.known).unsqueeze(-1)
        place = self.names.index(B0)
        return torch.cat([self.numbers[..., :place], of_known, self.numbers[..., place + 1 :]], dim=-1)


def read_in_blocks(x: Completions) -> Iterator[tuple[Completions, Prefix, slice]]:
    """Blocks of rows with what precedes their tokens, and their place; a batch of a single block is read once."""
    at_once = READ_AT_ONCE_ON_GPU if x.mask.is_cuda else READ_AT_ONCE
    if x.mask.numel() <= at_once:
        yield x, x.once(read), slice(None)
        return
    tokens = max(at_once, x.mask.numel() // MOST_BLOCKS)
    rows = max(tokens // max(x.mask.size(1), 1), 1)
    for first in range(0, len(x), rows):
        at = slice(first, first + rows)
        block = x.rows(at, 1)
        yield block, read(block), at


def read(x: Completions) -> Prefix:
    """What precedes each token of `x`."""
    mask, energy, logps, states = x.mask, x.need("energy"), x.need("logps").float(), x.need("states")
    prob = logps.exp() * mask
    sure = ((energy - 1 + 2 * prob) * mask).clamp(0, 1)
    luck = (sure - prob) * mask
    totals = {"energy": before(energy), "surprisal": before(-logps).clamp(min=0), "count": before(mask)}
    columns = totals | {f"root_{name}": values.sqrt() for name, values in totals.items()}
    columns |= {ONE: torch.ones_like(mask), B0: torch.zeros_like(mask), "earned": x.returns[:, :1] - x.returns}
    columns |= {"worst": shifted(luck.nan_to_num().clamp(min=0).cummax(dim=1).values), "sure": sure}
    numbers = torch.stack([columns[name].expand_as(mask) for name in NUMBERS], dim=-1)
    mean_state = prefix_sums(states) / (columns["count"] + 1).unsqueeze(-1)
    # Times √n, too, as what a number of progress says of the reward may change along the text
    progress = () if x.progress is None else (x.progress, x.progress * columns["root_count"].unsqueeze(-1))
    numbers = torch.cat([numbers, states, mean_state, *progress], dim=-1)
    names = [f"{of}{i}" for of in (STATE, MEAN_STATE) for i in range(states.size(-1))]
    by_number = [] if x.progress is None else [*map(str, range(x.progress.size(-1)))]
    functions = by_number and (x.progress_names or by_number)
    names += [f"{PROGRESS}{function}{times}" for times in ("", " √n") for function in functions]
    known = numbers.sum(dim=-1).isfinite()
    ratio = torch.ones_like(mask) if x.draw_ratio is None else x.draw_ratio
    each = (sure, columns["worst"], columns["root_count"], columns["earned"].expand_as(mask), luck * ratio)
    sure, worst, root, earned, luck = (values.where(known & values.isfinite(), 0.0) for values in each)
    numbers = numbers.masked_fill_(~known.unsqueeze(-1), 0.0)
    return Prefix(known, (*NUMBERS, *names), numbers, sure, worst, root, earned, luck)


def projection(size: int) -> Float[Tensor, "{size} k"]:
    """The fixed random directions of hidden states, float32; their numbers are as large as those of states."""
    generator, numbers = torch.Generator().manual_seed(0), min(size, PROJECTED_SIZE)
    return torch.randn(size, numbers, generator=generator, dtype=torch.float32, device="cpu") / math.sqrt(size)


def state_layer(decoder: torch.nn.Module) -> torch.nn.Module:
    """The layer of a decoder whose output is read as hidden states; the decoder itself if it has no list of layers."""
    lists = [child for child in decoder.children() if isinstance(child, torch.nn.ModuleList) and len(child)]
    layers = max(lists, key=len, default=None)
    return decoder if layers is None else layers[math.ceil(LAYER_DEPTH * len(layers)) - 1]


def before(values: Float[Tensor, "B T"]) -> Float[Tensor, "B T"]:
    """Sums over the tokens before each."""
    return shifted(prefix_sums(values))


def later(values: Float[Tensor, "B T *more"]) -> Float[Tensor, "B T *more"]:
    """Sums over the tokens after each."""
    return shifted(prefix_sums(values.flip(1))).flip(1)


def shifted(values: Float[Tensor, "B T *more"]) -> Float[Tensor, "B T *more"]:
    """By one token: 0 for the first."""
    return torch.cat([torch.zeros_like(values[:, :1]), values[:, :-1]], dim=1)
