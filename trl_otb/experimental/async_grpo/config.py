"""The options of [`AsyncOTBGRPOTrainer`]."""

from dataclasses import dataclass, field
from typing import Any

from accelerate.logging import get_logger

from ...baselines import Baseline, find_baseline
from ...config import refuse_unknown, warn_of_other_trainer
from .worker import AsyncGRPOConfig


logger = get_logger(__name__)

BASELINES = ("value", "rloo", "group_mean", "none")  # those that do not need whole groups at once


@dataclass
class AsyncOTBGRPOConfig(AsyncGRPOConfig):
    r"""
    Configuration class for the [`AsyncOTBGRPOTrainer`]: every parameter of [`~trl.AsyncGRPOConfig`], and two more.

    Parameters:
        baseline (`str`, *optional*, defaults to `"value"`): `"value"`, `"rloo"`, `"group_mean"` or `"none"`.
        scale_rewards (`str`, *optional*): `"none"`, the default, or `"group"`, what TRL's trainer always does: division
            by the standard deviation of the group's returns, with `"rloo"` and `"group_mean"`.
    """

    baseline: str = field(
        default="value", metadata={"help": f"The baseline that is subtracted from returns: {', '.join(BASELINES)}."}
    )
    scale_rewards: str | None = field(
        default=None,
        metadata={"help": "'none' (default), or 'group': divided by the deviation of the group's returns."},
    )

    def __new__(cls, *args: Any, **kwargs: Any) -> "AsyncOTBGRPOConfig":
        refuse_unknown(cls, kwargs)
        return super().__new__(cls)

    def __post_init__(self) -> None:
        by_default = self.scale_rewards is None
        self.scale_rewards = "none" if by_default else self.scale_rewards
        super().__post_init__()
        check_async_options(self)
        if by_default:
            warn_of_scale()

    def get_warmup_steps(self, *args: Any) -> int:
        warn_of_other_trainer(self, "AsyncOTBGRPOTrainer")
        return super().get_warmup_steps(*args)


def warn_of_scale() -> None:
    logger.warning_once(
        "Advantages are not scaled: AsyncOTBGRPOConfig's default is `scale_rewards='none'`, where TRL's "
        "AsyncGRPOTrainer always divides by the group's standard deviation, so that its learning rates do not carry "
        "over. Set `scale_rewards` to silence this."
    )


def check_async_options(args: AsyncGRPOConfig) -> Baseline:
    """The baseline of an [`AsyncOTBGRPOConfig`], `value` of a plain one; a `ValueError` if options conflict."""
    name, scale = getattr(args, "baseline", "value"), getattr(args, "scale_rewards", "none")
    if name not in BASELINES:
        find_baseline(name)
        raise ValueError(
            f"`baseline` is {name!r}, which needs whole groups at once, and AsyncGRPOTrainer cuts groups: in batches, "
            "between processes, and where stale samples are dropped. Choose 'value', which is per token, too, or "
            "'rloo', 'group_mean' or 'none'."
        )
    if scale not in ("none", "group"):
        raise ValueError(f"`scale_rewards` is {scale!r}: it must be 'none' or 'group'.")
    if scale == "group" and name not in ("rloo", "group_mean"):
        raise ValueError(
            f"`scale_rewards` is 'group' and `baseline` is {name!r}, under which advantages are not 0 where all "
            "returns of a group are nearly equal: set 'none', or choose 'rloo' or 'group_mean'."
        )
    if args.num_generations == 1 and name in ("rloo", "group_mean"):
        raise ValueError(
            f"`num_generations` is 1 and `baseline` is {name!r}, which compares the completions of a prompt. Choose "
            "'value', or 2 completions or more."
        )
    return find_baseline(name)
