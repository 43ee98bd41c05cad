import copy
import inspect
from dataclasses import dataclass, field, fields
from functools import cache
from typing import Any

from accelerate.logging import get_logger
from trl import GRPOConfig

from .baselines import ALIGNMENTS, BASELINES, check_options, find_baseline


logger = get_logger(__name__)

# The loss types of TRL 1.16 that multiply each token's score by its own advantage.
LOSS_TYPES = ("grpo", "dr_grpo", "dapo", "bnpo", "cispo", "sapo", "luspo", "vespo")


def _baseline_help() -> str:
    built_in = [entry for entry in BASELINES.values() if entry.built_in]
    return (
        "The baseline to subtract from returns. "
        + " ".join(f"`'{entry.name}'`: {entry.summary[:1].lower()}{entry.summary[1:]}" for entry in built_in)
        + " Or a name registered with `trl_otb.register_baseline`, or `module:function`."
    )


@dataclass
class OTBGRPOConfig(GRPOConfig):
    r"""
    Configuration class for the [`OTBGRPOTrainer`].

    It inherits every parameter from [`~trl.GRPOConfig`], adds the choice of baseline, and changes one default:
    `scale_rewards` is `"none"`, as in the paper of the Optimal Token Baseline (https://arxiv.org/abs/2602.07078).

    Parameters:
        baseline (`str`, *optional*, defaults to `"otb"`):
            The baseline to subtract from returns: a name in `trl_otb.baselines.BASELINES`, whose docstrings say when
            to use each; a name that you registered with [`trl_otb.register_baseline`] before making the config; or
            `"module:function"`.
        alignment (`str`, *optional*, defaults to `"generated"`):
            Which tokens of a group a baseline per token compares: those with the same number of generated tokens
            before them (`"generated"`), or those at the same position in the completion (`"position"`). The two differ
            only if tool output comes between generated tokens.
        zero_tail (`bool`, *optional*, defaults to `True`):
            For `"otb"`, subtract nothing where only the longest completion of a group still generates, as the
            reference implementation does. The advantage there is the return, even if all returns of the group are
            equal. If `False`, such tokens get advantage 0.
        leave_one_out (`bool`, *optional*, defaults to `False`):
            Leave a completion's own return out of its baseline, which removes the bias at small `num_generations` but
            adds variance. `"group_mean"` with one left out is `"rloo"`.
        keep_groups_together (`bool`, *optional*):
            Whether each micro-batch holds whole groups, if `per_device_train_batch_size` is a multiple of
            `num_generations`. If so, the training forward can provide the energies of a baseline that compares tokens,
            and [`GradientNoiseCallback`] can compare micro-batches. `None`, the default, means yes, except for
            `"group_mean"`, which shuffles rows as [`~trl.GRPOTrainer`] does.

    Setting an option the baseline ignores raises a `ValueError`.

    > [!NOTE]
    > These parameters have default values different from [`~trl.GRPOConfig`]:
    > - `scale_rewards`: Defaults to `"none"` instead of `"group"`. Where it is not set, a warning says so, once per
    >   process.
    """

    scale_rewards: str | None = field(
        default=None,  # becomes "none", and is known not to have been asked for
        metadata={
            "help": "Specifies the scaling strategy for rewards. Supported values are: `False` or `'none'` (default): "
            "no scaling is applied. `True` or `'group'`: advantages are divided by the standard deviation of the "
            "rewards within each group. `'batch'`: by the standard deviation of the rewards across the entire batch."
        },
    )
    baseline: str = field(default="otb", metadata={"help": _baseline_help()})
    alignment: str = field(
        default="generated",
        metadata={
            "help": "Which tokens of a group a baseline per token compares: `'generated'` (default), those with the "
            "same number of generated tokens before them; `'position'`, those at the same position in the completion. "
            "The two differ only if tool output comes between generated tokens.",
            "choices": list(ALIGNMENTS),
        },
    )
    zero_tail: bool = field(
        default=True,
        metadata={
            "help": "For `'otb'`, whether to subtract nothing where only the longest completion of a group still "
            "generates. If `False`, such tokens get advantage 0."
        },
    )
    leave_one_out: bool = field(
        default=False,
        metadata={
            "help": "Whether to leave a completion's own return out of its baseline, which removes the bias at small "
            "`num_generations`."
        },
    )

    keep_groups_together: bool | None = field(
        default=None,
        metadata={
            "help": "Whether each micro-batch holds whole groups, if `per_device_train_batch_size` is a multiple of "
            "`num_generations`. By default yes, except for 'group_mean', which shuffles rows as GRPOTrainer does."
        },
    )

    def __init_subclass__(cls, **kwargs: Any) -> None:
        """
        A class that merges this one with another config keeps the defaults of both; the first class that states a
        default wins. A plain dataclass would take every default, also inherited ones, from its first base.
        """
        super().__init_subclass__(**kwargs)
        annotations = dict(inspect.get_annotations(cls))
        stated: dict[str, Any] = {}
        bases = [base for base in cls.__mro__[1:] if "__dataclass_fields__" in vars(base)]
        for base in reversed(bases):
            stated.update((f.name, f) for f in fields(base) if f.name in inspect.get_annotations(base))
        taken = {f.name: f for f in fields(bases[0])}
        for name, option in stated.items():
            if name not in annotations and taken.get(name) is not option:
                annotations[name] = option.type
                setattr(cls, name, option)
        cls.__annotations__ = annotations

    def __post_init__(self) -> None:
        stated = vars(type(self))
        undecorated = inspect.get_annotations(type(self)) and "__dataclass_fields__" not in stated
        if undecorated or any(stated.get(f.name, f.default) is not f.default for f in fields(self)):
            raise TypeError(
                f"`{type(self).__name__}` is a config class whose own or merged options would be ignored: decorate it "
                "with `@dataclass`, and give each option a type (`baseline: str = 'ogb'`)."
            )
        by_default = self.scale_rewards is None
        if by_default:
            self.scale_rewards = "none"
        self._check_otb_options()
        super().__post_init__()
        if by_default:
            logger.warning_once(
                "Advantages are not scaled: OTBGRPOConfig's default is `scale_rewards='none'`, as in the paper, where "
                "GRPOConfig's is 'group'. Set `scale_rewards` to silence this."
            )

    @classmethod
    def from_grpo_config(cls, args: GRPOConfig) -> "OTBGRPOConfig":
        """
        A copy of `args` with the defaults of the options that this class adds. All other options, including
        `scale_rewards`, keep their values, and the copy is an instance of both classes.
        """
        ours: Any = cls
        theirs: Any = type(args)
        merged = ours if issubclass(ours, theirs) else _merged(ours, theirs)
        args = copy.copy(args)  # not re-created, since TrainingArguments would derive fields again
        args.__class__ = merged
        for option in fields(merged):
            if option.name not in vars(args):
                setattr(args, option.name, option.default)
        args._check_otb_options()
        return args

    def _check_otb_options(self) -> None:
        if not isinstance(self.baseline, str):
            raise ValueError(
                f"`baseline` is {self.baseline!r}: a config holds text. Register the function with "
                "`trl_otb.register_baseline(name)` and set `baseline=name`."
            )
        check_options(self.baseline, self.alignment, self.zero_tail, self.leave_one_out)
        if self.scale_rewards not in (True, False, "group", "batch", "none"):
            raise ValueError(
                f"`scale_rewards` is {self.scale_rewards!r}: it must be one of 'none', 'group' and 'batch'."
            )
        rule = find_baseline(self.baseline)
        if self.scale_rewards in (True, "group") and not rule.cancels_equal_returns:
            why = "compares prompts" if rule.compares_prompts else "does not only compare the completions of a group"
            raise ValueError(
                f"`scale_rewards` is {self.scale_rewards!r} and `baseline` is {self.baseline!r}, which {why}: a group "
                "with nearly equal returns has advantages then, and they would be divided by its standard deviation, "
                "which is nearly 0. Set `scale_rewards='none'` or 'batch'."
            )
        together = self.keep_groups_together
        if not (together is None or isinstance(together, bool)):
            raise ValueError(f"`keep_groups_together` is {together!r}: it must be True, False or None.")
        if together and self.num_generations and self.per_device_train_batch_size % self.num_generations != 0:
            raise ValueError(
                "`keep_groups_together` is True and `per_device_train_batch_size` "
                f"{self.per_device_train_batch_size}: whole groups need a multiple of `num_generations`, "
                f"{self.num_generations}."
            )
        if self.loss_type not in LOSS_TYPES:
            raise ValueError(
                f"`loss_type` is {self.loss_type!r}: OTBGRPOTrainer is known to be correct with "
                f"{', '.join(map(repr, LOSS_TYPES))} only. Set one of these."
            )


@cache
def _merged(ours: Any, theirs: Any) -> Any:
    """A config class derived from both, whose instances can be pickled for checkpoints."""
    methods = {"__reduce__": lambda self: (_restored, (ours, theirs, vars(self)))}
    return dataclass(type(f"{ours.__name__}Of{theirs.__name__}", (ours, theirs), methods))


def _restored(ours: Any, theirs: Any, values: dict[str, Any]) -> Any:
    cls = _merged(ours, theirs)
    args = cls.__new__(cls)
    vars(args).update(values)
    return args
