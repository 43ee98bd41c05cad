"""Work through the rows of a batch in blocks that fit a processor's cache: there, fresh memory is what costs."""

from collections.abc import Callable

import torch


TOKENS = 2**18  # whose intermediate results a processor core can keep in its cache


def by_blocks(
    function: Callable[[slice], tuple[torch.Tensor, ...]], mask: torch.Tensor, rows_together: int = 1
) -> tuple[torch.Tensor, ...]:
    """
    `function` of all rows, called for one block of rows after another where `mask` is on a CPU.

    Args:
        function (`Callable`):
            From a slice of rows to tensors with these rows.
        mask (`torch.Tensor` of shape `(B, T)`):
            Of all rows.
        rows_together (`int`, *optional*, defaults to 1):
            Rows that must stay in one block.
    """
    rows = max(TOKENS // max(mask.size(1), 1) // rows_together, 1) * rows_together
    if mask.device.type != "cpu" or len(mask) <= rows:
        return function(slice(0, len(mask)))
    whole = None
    for first in range(0, len(mask), rows):
        block = slice(first, first + rows)
        part = function(block)
        if whole is None:
            whole = tuple(values.new_empty(len(mask), *values.shape[1:]) for values in part)
        for values, of_part in zip(whole, part, strict=True):
            values[block] = of_part
    return whole
