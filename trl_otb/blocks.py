"""Work through the rows of a batch in blocks, so that intermediate results stay small beside what is kept."""

from collections.abc import Callable, Iterator

import torch


LEAST = 2**15  # tokens of a block: smaller ones cost time and save nothing
MOST_ON_CPU = 2**18  # whose intermediate results a processor core can keep in its cache
BLOCKS = 8  # that a large batch is split into at least: intermediate results take up to 60 bytes per token


def by_blocks(
    function: Callable[[slice], tuple[torch.Tensor, ...]], mask: torch.Tensor, rows_together: int = 1, finer: int = 1
) -> tuple[torch.Tensor, ...]:
    """
    `function` of all rows, called for one block of rows after another.

    Args:
        function (`Callable`):
            From a slice of rows to tensors with these rows.
        mask (`torch.Tensor` of shape `(B, T)`):
            Of all rows.
        rows_together (`int`, *optional*, defaults to 1):
            Rows that must stay in one block.
        finer (`int`, *optional*, defaults to 1):
            How many times smaller blocks should be, for a function with larger intermediate results.
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
    """The rows of `mask`, `(B, T)`, in blocks of whole sets of `rows_together`; without rows, one empty block."""
    tokens = max(mask.numel() // BLOCKS, LEAST)
    if mask.device.type == "cpu":
        tokens = min(tokens, MOST_ON_CPU)
    rows = max(tokens // finer // max(mask.size(1), 1) // rows_together, 1) * rows_together
    for first in range(0, max(len(mask), 1), rows):
        yield slice(first, min(first + rows, len(mask)))
