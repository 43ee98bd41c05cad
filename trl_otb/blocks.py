"""Processes the rows of a batch in blocks, to keep intermediate results small."""

from collections.abc import Callable, Iterator

import torch


LEAST = 2**15  # tokens per block: smaller blocks cost time and save no memory
MOST_ON_CPU = 2**18  # tokens per block whose intermediate results fit into a core's cache
BLOCKS = 8  # the least number of blocks of a large batch: intermediate results take up to 60 bytes per token


def by_blocks(
    function: Callable[[slice], tuple[torch.Tensor, ...]], mask: torch.Tensor, rows_together: int = 1, finer: int = 1
) -> tuple[torch.Tensor, ...]:
    """
    The result of `function` for all rows, called block by block.

    Args:
        function (`Callable`):
            A function from a slice of rows to tensors with these rows.
        mask (`torch.Tensor` of shape `(B, T)`):
            The mask of all rows.
        rows_together (`int`, *optional*, defaults to 1):
            Number of adjacent rows that must stay in one block.
        finer (`int`, *optional*, defaults to 1):
            The factor by which to shrink blocks, for a function with larger intermediate results.
    """
    whole: tuple[torch.Tensor, ...] = ()
    for block in blocks_of_rows(mask, rows_together, finer):
        part = function(block)
        if block.stop - block.start == len(mask):
            return part
        if not whole:
            whole = tuple(values.new_empty(len(mask), *values.shape[1:]) for values in part)
        for values, of_part in zip(whole, part, strict=True):
            values[block] = of_part
    return whole


def blocks_of_rows(mask: torch.Tensor, rows_together: int = 1, finer: int = 1) -> Iterator[slice]:
    """The rows of `mask`, `(B, T)`, in blocks of whole sets of `rows_together`; one empty block if there are none."""
    tokens = max(mask.numel() // BLOCKS, LEAST)
    if mask.device.type == "cpu":
        tokens = min(tokens, MOST_ON_CPU)
    rows = max(tokens // finer // max(mask.size(1), 1) // rows_together, 1) * rows_together
    for first in range(0, max(len(mask), 1), rows):
        yield slice(first, min(first + rows, len(mask)))
