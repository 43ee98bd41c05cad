"""Where a prediction is worse than B0: measured on the other prompts of a batch, so that nothing is biased."""

from collections.abc import Callable

import torch
from jaxtyping import Float
from torch import Tensor

from .completions import Completions
from .transport import gathered


ROUNDING = 1e-12  # of squared float32 numbers, relative
# A prompt keeps B0 if in the other prompts B leaves more than this many times B0's power: with 1 many would by chance,
# and without a bound what was learned before a jump of rewards would be used once more. What other values of these
# constants leave is a table of recipes/studies/ablations.md, by their names
WORSE_RATIO = 1.5
# Where returns do not vary B0 leaves nothing: then B may leave this share of B0's usual power. With 0 it could leave
# none, so that rare successes would be predicted in no batch
VARIES_NOT_RATIO = 0.5


def worse_than_b0(
    predict: Callable[[Float[Tensor, "B #T"]], Float[Tensor, "B #T"]],
    local: Completions,
    usual_power: float,
    gather: Callable[[Tensor], Tensor] | None = None,
    first_row: int = 0,
) -> tuple[Tensor, float]:
    """
    Which completions are to keep B0, `(B,)` bool; and the share of such completions in the batch of all processes.

    A prompt keeps B0 if in the other prompts of the batch B leaves more than 1.5 times the power that B0 leaves there,
    as after a jump of rewards. Other prompts are measured with the B0 of their own group, which takes two completions.
    If none of their returns vary, B0 leaves nothing; then B may leave half of B0's usual power. For N = 1 each half of
    the batch is measured with the B0 of that half, and decides for the other half. So no decision depends on the
    completions that it is made for.

    Args:
        predict: B from B0, for the completions of `local`.
        local: The completions of this process.
        usual_power: What B0 left in earlier batches, per energy.
        gather: With several processes, concatenates their tensors of one shape; all must call it.
        first_row: The place of `local` among the completions of all processes.
    """
    n, energy = local.num_generations, local.need("loss_energy")
    local_rows = slice(first_row, first_row + len(local))

    def parts(rows: int) -> Tensor:
        """The groups, or random halves, which are the same on all processes."""
        if n > 1:
            return torch.arange(rows) // n
        return torch.randperm(rows, generator=torch.Generator().manual_seed(0)) % 2

    x, at = local, slice(None)
    if gather is not None and (n == 1 or len(local) % n > 0):  # parts span processes
        x, at = gathered(local, gather, tokens=False), local_rows
    if n > 1:
        b0 = x.weighted_mean(x.members.expand_as(x.returns), x.returns, x.members, leave_one_out=True)
    else:
        half = parts(len(x)).to(x.members.device)
        same_half = (half == half.unsqueeze(1)).float().fill_diagonal_(0.0)
        b0 = same_half @ (x.members * x.returns) / (same_half @ x.members).clamp(min=1)
    b0 = b0[at][:, : local.mask.size(1)]
    left = (local.returns - predict(b0)) * local.mask
    powers = [(energy * of.square()).sum(dim=1) for of in (left, local.returns - b0, local.returns)]
    of_rows = torch.stack([*powers, energy.sum(dim=1), local.members.flatten()], dim=1)
    of_rows = (of_rows if gather is None else gather(of_rows)).cpu().double()
    part = parts(len(of_rows))
    of_parts = of_rows.new_zeros(int(part.max()) + 1, 5).index_add(0, part, of_rows)
    by_b, by_b0, squares, energies, members = of_parts.unbind(dim=1)
    # Beyond rounding; of a single completion nothing is known
    measured = [power.where((power > ROUNDING * squares) & (members > 1), 0.0) for power in (by_b, by_b0)]
    measured.append(energies * (members > 1))
    # Of the other parts, for each; the sum of all less a part would cancel
    other_parts = (1 - torch.eye(len(of_parts), dtype=of_rows.dtype)) @ torch.stack(measured, dim=1)
    others_by_b, others_by_b0, others_energy = other_parts.unbind(dim=1)
    allowed = (WORSE_RATIO * others_by_b0).where(others_by_b0 > 0, VARIES_NOT_RATIO * usual_power * others_energy)
    worse = (others_by_b > allowed)[part]
    return worse[local_rows].to(local.mask.device), worse.float().mean().item()
