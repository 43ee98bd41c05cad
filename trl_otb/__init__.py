"""The Optimal Token Baseline for TRL's GRPOTrainer."""

from importlib.metadata import version
from typing import TYPE_CHECKING


if TYPE_CHECKING:
    from .config import OTBGRPOConfig as OTBGRPOConfig
    from .rewards import TokenRewards as TokenRewards
    from .trainer import OTBGRPOTrainer as OTBGRPOTrainer


__version__ = version("trl-otb")
__all__ = ["OTBGRPOConfig", "OTBGRPOTrainer", "TokenRewards"]


def __getattr__(name: str):
    # Lazy, so that `trl_otb.energy` and `trl_otb.baselines` can be used with torch alone.
    if name == "OTBGRPOConfig":
        from .config import OTBGRPOConfig

        return OTBGRPOConfig
    if name == "OTBGRPOTrainer":
        from .trainer import OTBGRPOTrainer

        return OTBGRPOTrainer
    if name == "TokenRewards":
        from .rewards import TokenRewards

        return TokenRewards
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
