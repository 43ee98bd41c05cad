"""The columns of φ and ψ, which `value` predicts with, and their names."""

from collections.abc import Callable

import torch
from jaxtyping import Float
from torch import Tensor

from .least_squares import B0, ONE
from .prefix import Prefix


# What φ and ψ are made of, from V less the middle of the returns seen, and numbers of the text so far: each of these
# times 1, σ and, in φ, σ². Another one is a line here
PARTS: dict[str, Callable[[Prefix, Tensor], Tensor]] = {
    ONE: lambda of, v: torch.ones_like(v),
    "√n": lambda of, v: of.root_count,
    "V": lambda of, v: v,
    "V²": lambda of, v: v.square(),
    "m": lambda of, v: of.worst,
    "V m": lambda of, v: v * of.worst,
    "V √n": lambda of, v: v * of.root_count,
}
EARNED = "earned"  # the rewards earned so far
PHI = (ONE, B0, *[*PARTS][1:], *(f"{power} {part}" for power in ("σ", "σ²") for part in PARTS), EARNED)
PSI = (*(f"luck {part}" for part in PARTS), *(f"luck σ {part}" for part in PARTS))


def columns_of(
    of: Prefix, b0: Float[Tensor, "B #T"], v: Float[Tensor, "B T"]
) -> tuple[Float[Tensor, "B T k"], Float[Tensor, "B T l"]]:
    """`PHI` of the state and `PSI` of the luck to come, from V less the middle of the returns seen."""
    known = of.known.unsqueeze(-1)
    parts = torch.stack([part(of, v) for part in PARTS.values()], dim=-1) * known
    by_sure = [parts, of.sure.unsqueeze(-1) * parts, of.sure.square().unsqueeze(-1) * parts]
    of_b0 = (b0 * of.known).unsqueeze(-1)
    phi = torch.cat([parts[..., :1], of_b0, parts[..., 1:], *by_sure[1:], of.earned.unsqueeze(-1)], dim=-1)
    return phi, torch.cat(by_sure[:2], dim=-1)
