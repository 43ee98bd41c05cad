"""
A plugin for Axolotl, whose GRPO then trains with a baseline of this package. In the YAML file:

    plugins:
      - trl_otb.axolotl.Plugin
    otb:
      baseline: value
      scale_rewards: running

Axolotl builds its own config, to which the plugin adds the options of [`~trl_otb.OTBGRPOConfig`].
"""

import difflib
from collections.abc import Mapping
from dataclasses import field, fields, make_dataclass
from inspect import get_annotations
from typing import Any

from axolotl.integrations.base import BasePlugin
from pydantic import BaseModel

from ..baselines import find_baseline
from ..config import UNSET, OTBGRPOConfig, warn_of_unset
from ..state import KeepsBaseline


OPTIONS = {option.name: option for option in fields(OTBGRPOConfig) if option.name in get_annotations(OTBGRPOConfig)}

# What the plugin adds to Axolotl's config, which has `scale_rewards` from TRL
TrainingOptions = make_dataclass(
    "TrainingOptions",
    [(name, of.type, field(default=of.default)) for name, of in OPTIONS.items() if name != "scale_rewards"],
    namespace={"__module__": __name__},
)


def options_of(section: Any) -> dict[str, Any]:
    """The section `otb`, with defaults; a `ValueError` if it is none, or has an option that there is not."""
    if not isinstance(section or {}, Mapping):
        raise ValueError(f"`otb` is {section!r}: it is a section of options. Write `otb: {{baseline: {section}}}`.")
    for name in (section or {}).keys() - OPTIONS.keys():
        near = difflib.get_close_matches(name, OPTIONS, n=1)
        raise ValueError(f"`otb` has no option {name!r}.{f' Did you mean {near[0]!r}?' if near else ''}")
    options = {name: option.default for name, option in OPTIONS.items()} | {**(section or {})}
    if isinstance(options["progress_funcs"], str):
        options["progress_funcs"] = [options["progress_funcs"]]
    return options


class InputArgs(BaseModel):
    """What the plugin adds to Axolotl's YAML files."""

    otb: dict[str, Any] | None = None


class Plugin(BasePlugin):
    """Unless `trainer_cls` is set, [`~trl_otb.axolotl.trainer.OTBTrainer`] replaces Axolotl's GRPO trainer."""

    def register(self, cfg: Any) -> None:
        """Raises a `ValueError` if an option is wrong, or where Axolotl would take another trainer than GRPO's."""
        rl, trl, options = cfg.get("rl"), cfg.get("trl") or {}, options_of(cfg.get("otb"))
        for where, section in (("at top level", cfg), ("under `trl`", trl)):
            for name in OPTIONS:
                if name != "scale_rewards" and section.get(name) is not None:
                    raise ValueError(f"`{name}` stands {where}, where Axolotl drops it. Put it under `otb`.")
        if options["baseline"] is not None and ":" not in str(options["baseline"]):  # which the trainer imports
            find_baseline(options["baseline"])
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
        if "scale_rewards" in trl and options["scale_rewards"] is None:  # later Axolotl's default stands there
            cfg["otb"] = {**(cfg.get("otb") or {}), "scale_rewards": trl["scale_rewards"]}
        cfg["trainer_cls"] = cfg.get("trainer_cls") or "trl_otb.axolotl.trainer.OTBTrainer"

    def get_input_args(self) -> str:
        return "trl_otb.axolotl.InputArgs"

    def get_training_args_mixin(self) -> str:
        return "trl_otb.axolotl.TrainingOptions"

    def get_training_args(self, cfg: Any) -> dict[str, Any]:
        """The options of `otb`. What is not set there is as in [`~trl_otb.OTBGRPOConfig`]."""
        options = options_of(cfg.otb)
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
