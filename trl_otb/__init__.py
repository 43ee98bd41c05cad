"""
Baselines per token for TRL's GRPOTrainer.

    from trl_otb import OTBGRPOConfig, OTBGRPOTrainer      # instead of GRPOConfig and GRPOTrainer

    trainer = OTBGRPOTrainer(..., args=OTBGRPOConfig(baseline="value", ...))
    trainer.train()
    trainer.rollouts["train"].show(prompt=0)               # the last batch, token by token
    trl_otb.compare_baselines(trainer)                     # which baseline suits this run

Also: `AsyncOTBGRPOTrainer`, `register_baseline`, `TokenRewards`, and pure torch in `energy` and `baselines`.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from .version import __version__ as __version__


if TYPE_CHECKING:
    from . import baselines as baselines
    from . import energy as energy
    from .baselines import register_baseline as register_baseline
    from .comparison import BaselineReport as BaselineReport
    from .comparison import compare_baselines as compare_baselines
    from .config import OTBGRPOConfig as OTBGRPOConfig
    from .experimental.async_grpo.config import AsyncOTBGRPOConfig as AsyncOTBGRPOConfig
    from .experimental.async_grpo.trainer import AsyncOTBGRPOTrainer as AsyncOTBGRPOTrainer
    from .seam.token_rewards import TokenRewards as TokenRewards
    from .trainer import OTBGRPOTrainer as OTBGRPOTrainer


# Imported on first use, so that `trl_otb.energy` and `trl_otb.baselines` need torch and jaxtyping only.
_MODULES = {
    "AsyncOTBGRPOConfig": "experimental.async_grpo.config",
    "AsyncOTBGRPOTrainer": "experimental.async_grpo.trainer",
    "BaselineReport": "comparison",
    "OTBGRPOConfig": "config",
    "OTBGRPOTrainer": "trainer",
    "TokenRewards": "seam.token_rewards",
    "compare_baselines": "comparison",
    "register_baseline": "baselines",
}
_SUBMODULES = ("baselines", "energy")
__all__ = [*_MODULES, *_SUBMODULES]


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return getattr(import_module(f".{_MODULES[name]}", __name__), name)
    if name in _SUBMODULES:
        return import_module(f".{name}", __name__)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
