"""
A plugin for Axolotl, whose GRPO then trains with a baseline of this package. In the YAML file:

    plugins:
      - trl_otb.axolotl.Plugin
    otb:
      baseline: value
      scale_rewards: running

Axolotl builds its own config, to which the plugin adds the options of [`~trl_otb.OTBGRPOConfig`].
"""

from dataclasses import dataclass
from typing import Any

from axolotl.integrations.base import BasePlugin
from pydantic import BaseModel, ConfigDict

from ..baselines import find_baseline
from ..config import UNSET, warn_of_unset
from ..progress import PROGRESS_PLACES
from ..state import KeepsBaseline


@dataclass
class TrainingOptions:
    """What the plugin adds to Axolotl's config, which has `scale_rewards` from TRL."""

    baseline: str | None = None
    credit_whole_return: bool = False
    progress_funcs: list[str] | None = None
    progress_places: int = PROGRESS_PLACES
    progress_draws: int = 0
    save_rollouts_steps: int | None = None


class Options(BaseModel):
    """The section `otb` of a YAML file: options of [`~trl_otb.OTBGRPOConfig`]."""

    model_config = ConfigDict(extra="forbid")

    baseline: str | None = None
    scale_rewards: str | bool | None = None
    credit_whole_return: bool = False
    progress_funcs: list[str] | None = None
    progress_places: int = PROGRESS_PLACES
    progress_draws: int = 0
    save_rollouts_steps: int | None = None


class InputArgs(BaseModel):
    """What the plugin adds to Axolotl's YAML files."""

    otb: Options | None = None


class Plugin(BasePlugin):
    """Unless `trainer_cls` is set, [`~trl_otb.axolotl.trainer.OTBTrainer`] replaces Axolotl's GRPO trainer."""

    def register(self, cfg: Any) -> None:
        """Raises a `ValueError` if an option is wrong, or where Axolotl would take another trainer than GRPO's."""
        rl, trl, options = cfg.get("rl"), cfg.get("trl") or {}, Options(**(cfg.get("otb") or {}))
        if options.baseline is not None and ":" not in options.baseline:  # which the trainer imports
            find_baseline(options.baseline)
        if rl not in ("grpo", "gdpo"):
            raise ValueError(f"`rl` is {rl!r}, and trl_otb's plugin is for 'grpo' and 'gdpo'. Leave the plugin out.")
        for name in ("async_prefetch", "use_data_producer"):
            if trl.get(name):
                raise ValueError(
                    f"`trl.{name}` is set: `AxolotlAsyncGRPOTrainer._compute_loss` takes one advantage per completion, "
                    "and its rollouts do not pass through GRPOTrainer's. Leave the option or trl_otb's plugin out."
                )
        if (cfg.get("context_parallel_size") or 1) > 1:
            raise ValueError(
                "`context_parallel_size` is above 1: AxolotlGRPOSequenceParallelTrainer cuts completions, whose "
                "energies trl_otb adds up. Set it to 1, or leave trl_otb's plugin out."
            )
        cfg["trainer_cls"] = cfg.get("trainer_cls") or "trl_otb.axolotl.trainer.OTBTrainer"

    def get_input_args(self) -> str:
        return "trl_otb.axolotl.InputArgs"

    def get_training_args_mixin(self) -> str:
        return "trl_otb.axolotl.TrainingOptions"

    def get_training_args(self, cfg: Any) -> dict[str, Any]:
        """The options of `otb`. What is not set there is as in [`~trl_otb.OTBGRPOConfig`], also `scale_rewards`."""
        options = Options(**(cfg.otb or {})).model_dump()
        return options | ({"scale_rewards": "none"} if options["scale_rewards"] is None else {})

    def post_trainer_create(self, cfg: Any, trainer: Any) -> None:
        """Raises a `TypeError` if the trainer, as of another plugin or `trainer_cls`, honours no baseline."""
        if not isinstance(trainer, KeepsBaseline):
            raise TypeError(
                f"The trainer is a {type(trainer).__name__}, which has no baseline: the section `otb` would be "
                "ignored. Derive `trainer_cls` from `trl_otb.axolotl.trainer.OTBTrainer`, or leave the plugin out."
            )
        options = cfg.otb or {}
        warn_of_unset([name for name in UNSET if options.get(name) is None], type(trainer))
