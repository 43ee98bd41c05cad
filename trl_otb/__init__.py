"""The Optimal Token Baseline for TRL's GRPOTrainer."""

from importlib import import_module
from typing import TYPE_CHECKING

from .project import version


if TYPE_CHECKING:
    from .baselines import register_baseline as register_baseline
    from .callbacks import GradientNoiseCallback as GradientNoiseCallback
    from .config import OTBGRPOConfig as OTBGRPOConfig
    from .rewards import TokenRewards as TokenRewards
    from .trainer import OTBGRPOTrainer as OTBGRPOTrainer


__version__ = version()
# Imported when asked for, so that `trl_otb.energy` and `trl_otb.baselines` can be used with torch alone.
_MODULES = {
    "GradientNoiseCallback": "callbacks",
    "OTBGRPOConfig": "config",
    "OTBGRPOTrainer": "trainer",
    "TokenRewards": "rewards",
    "register_baseline": "baselines",
}
__all__ = list(_MODULES)


def __getattr__(name: str):
    if name in _MODULES:
        return getattr(import_module(f".{_MODULES[name]}", __name__), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
