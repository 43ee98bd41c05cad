"""The options of [`~trl_otb.OTBGRPOTrainer`], and their checks."""

import difflib
import inspect
import sys
from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import dataclass, field, fields
from typing import Any
from unittest.mock import patch

from accelerate.logging import get_logger
from trl import GRPOConfig

from .baselines import BASELINES, Baseline, find_baseline
from .display.page import SAVE_ROLLOUTS, check_steps
from .progress import PROGRESS_PLACES, check_function_names
from .seam.namespace import NAMESPACE
from .seam.unsloth import with_unsloths_defaults


logger = get_logger(__name__)

# The loss types of TRL 1.16 that multiply each token's score by its own advantage.
LOSS_TYPES = ("grpo", "dr_grpo", "dapo", "bnpo", "cispo", "sapo", "luspo", "vespo")


# What is said of options that are not set
UNSET = {
    "baseline": "The baseline is 'otb', the paper's; 'value' is advised.",
    "scale_rewards": "Advantages are not scaled: OTBGRPOConfig's default is `scale_rewards='none'`, as in the paper, "
    "where GRPOConfig's is 'group', so the gradient norm scales with rewards: 'running' keeps GRPO's scale.",
}


def _baseline_help() -> str:
    built_in = [entry for entry in BASELINES.values() if entry.built_in]
    return (
        "The baseline to subtract from returns: 'value' is advised, the others are for comparison. "
        + " ".join(f"`'{entry.name}'`: {entry.summary[:1].lower()}{entry.summary[1:]}" for entry in built_in)
        + " By default `'otb'`. Or a name registered with `trl_otb.register_baseline`, or `module:function`."
    )


@with_unsloths_defaults
@dataclass
class OTBGRPOConfig(GRPOConfig):
    r"""
    Configuration class for the [`OTBGRPOTrainer`].

    It inherits every parameter from [`~trl.GRPOConfig`], adds the choice of baseline, and changes one default:
    `scale_rewards` is `"none"`, as in the paper of the Optimal Token Baseline (https://arxiv.org/abs/2602.07078).

    Parameters:
        scale_rewards (`str`, *optional*, defaults to `"none"`): What advantages are divided by: as in
            [`~trl.GRPOConfig`], or `"running"`, the standard deviation of returns within groups, over earlier batches.
            Where it is not set, a warning says so once.
        baseline (`str`, *optional*, defaults to `"otb"`): The baseline to subtract from returns: a name in
            `trl_otb.baselines.BASELINES` or registered before with [`trl_otb.register_baseline`], or
            `"module:function"`. Where it is not set, the same warning says so.
        credit_whole_return (`bool`, *optional*, defaults to `False`): Whether every token is credited with the
            completion's summed reward, not with the rewards from it on. Set it if a reward of a turn or token depends
            on later tokens, as a judge's that reads the whole transcript: rewards-to-go are biased then.
        progress_funcs (`list[str]`, *optional*): Functions of the text so far, as `"module:function"`, which `value`
            reads: called like reward functions, on unfinished completions. `"rewards"` stands for the run's reward
            functions. The trainer takes functions, too, as its `progress_funcs`.
        progress_places (`int`, *optional*, defaults to 64): At how many places of a completion of usual length they
            are called.
        save_rollouts_steps (`int`, *optional*): Every so many steps the latest completions are added to
            `output_dir/_rollouts.html`, a page that shows what training pushes, token by token. It stays below 200 MB;
            `push_to_hub` leaves it out, since it holds prompts and columns of the data set.
    """

    scale_rewards: str | None = field(
        default=None,  # becomes "none"; `None` shows that it was not set
        metadata={
            "help": "What advantages are divided by: `'none'` (default), or the standard deviation of rewards within "
            "each group (`'group'`), across the batch (`'batch'`), or within groups of earlier batches (`'running'`)."
        },
    )
    baseline: str | None = field(default=None, metadata={"help": _baseline_help()})  # becomes "otb"
    credit_whole_return: bool = field(
        default=False,
        metadata={"help": "Whether every token is credited with the summed reward, not with the rewards from it on."},
    )
    progress_funcs: list[str] | None = field(
        default=None,
        metadata={
            "help": "Functions of the text so far, as `module:function`, which `value` reads: called like reward "
            "functions, on unfinished completions. `rewards` stands for the run's reward functions."
        },
    )
    progress_places: int = field(
        default=PROGRESS_PLACES,
        metadata={"help": "At how many places of a completion of usual length progress functions are called."},
    )
    save_rollouts_steps: int | None = field(default=None, metadata={"help": SAVE_ROLLOUTS})

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

    def __new__(cls, *args: Any, **kwargs: Any) -> "OTBGRPOConfig":
        refuse_unknown(cls, kwargs)
        return super().__new__(cls)

    def __post_init__(self) -> None:
        self.__dict__.update(self.__dict__.pop("own_options", {}))  # of `with_unsloths_defaults`
        stated = vars(type(self))
        undecorated = inspect.get_annotations(type(self)) and "__dataclass_fields__" not in stated
        if undecorated or any(stated.get(f.name, f.default) is not f.default for f in fields(self)):
            raise TypeError(
                f"`{type(self).__name__}` is a config class whose own or merged options would be ignored: decorate it "
                "with `@dataclass`, and give each option a type (`baseline: str = 'ogb'`)."
            )
        self.unset = [name for name in UNSET if getattr(self, name) is None]  # no option, as the trainer reads it
        if isinstance(self.progress_funcs, str):  # a single one in a YAML file
            self.progress_funcs = [self.progress_funcs]
        for name, default in {"baseline": "otb", "scale_rewards": "none"}.items():
            if name in self.unset:
                setattr(self, name, default)
        with patch.object(self, "num_generations", _One(1)) if self.num_generations == 1 else nullcontext():
            super().__post_init__()
        if not (isinstance(self.baseline, str) and ":" in self.baseline):  # which the trainer imports
            check_options(self)

    def get_warmup_steps(self, *args: Any) -> int:  # which every trainer calls when it trains
        warn_of_other_trainer(self, "OTBGRPOTrainer")
        return super().get_warmup_steps(*args)


def refuse_unknown(cls: Any, given: Mapping[str, Any]) -> None:
    """Raise a `TypeError` that suggests a name if `cls` has no option of a given one."""
    parameters = inspect.signature(cls.__init__).parameters
    if any(of.kind is of.VAR_KEYWORD for of in parameters.values()):  # a class with an `__init__` of its own
        return
    for name in given.keys() - parameters.keys():
        near = difflib.get_close_matches(name, parameters, n=1)
        raise TypeError(f"{cls.__name__} has no option {name!r}.{f' Did you mean {near[0]!r}?' if near else ''}")


class _One(int):
    """N = 1, which passes GRPOConfig's own check of N ≥ 2: with other prompts, one completion is compared, too."""

    def __lt__(self, other: int) -> bool:
        return False


def warn_of_unset(names: list[str], trainer: type) -> None:
    """Warn once of options that are not set, whose default is not GRPOConfig's, or not advised."""
    if getattr(trainer, "default_baseline", None) is not None:
        names = [name for name in names if name != "baseline"]
    if names:
        logger.warning_once(f"{' '.join(UNSET[name] for name in names)} Set {' and '.join(names)} to silence this.")


def warn_of_other_trainer(args: Any, trainer: str) -> None:
    """Warn once if a trainer that is not of this package trains with one of its configs."""
    caller = sys._getframe(2)
    by_trainer = caller.f_globals.get("__name__", "").startswith("transformers.trainer")
    if by_trainer and not hasattr(caller.f_locals.get("self"), NAMESPACE):
        logger.warning_once(
            f"A {type(args).__name__} is used by another trainer than {trainer}: `baseline={args.baseline!r}` has no "
            f"effect, and `scale_rewards` is {args.scale_rewards!r}. Make an {trainer}."
        )


def named_baseline(args: GRPOConfig, trainer: type = object) -> tuple[Any, str]:
    """
    The baseline that a trainer of this class uses, and where it is named: in the config, if it is set there; else in
    the class, as `default_baseline`; else it is `"otb"`.
    """
    name, of_class = getattr(args, "baseline", None), getattr(trainer, "default_baseline", None)
    if name is not None and ("baseline" not in getattr(args, "unset", ()) or name != "otb"):
        return name, f"set in {type(args).__name__}"
    if of_class is not None:
        return of_class, f"`default_baseline` of {trainer.__name__}"
    return "otb", f"the default: {type(args).__name__} names none"


def check_options(args: GRPOConfig, own_loss: bool = True, trainer: type = object) -> Baseline:
    """
    The baseline that [`named_baseline`] finds. `own_loss`: whether the trainer may compute another loss than TRL's, of
    a type of its own.

    Raises:
        ValueError: An option is unknown, or conflicts with the baseline.
    """
    (name, named), plain = named_baseline(args, trainer), not hasattr(args, "baseline")
    if not isinstance(name, str):
        raise ValueError(
            f"`baseline` is {name!r}: a config holds text. Register the function with "
            "`trl_otb.register_baseline(name)` and set `baseline=name`."
        )
    baseline = find_baseline(name)
    check_steps(getattr(args, "save_rollouts_steps", None))
    check_function_names(getattr(args, "progress_funcs", None))
    if (places := getattr(args, "progress_places", PROGRESS_PLACES)) < 1:
        raise ValueError(f"`progress_places` is {places}: give 1 or more.")
    if args.scale_rewards not in (True, False, "group", "batch", "none", "running"):
        raise ValueError(
            f"`scale_rewards` is {args.scale_rewards!r}: it must be one of 'none', 'running', 'group' and 'batch'."
        )
    if args.scale_rewards not in (False, "none", "running") and not baseline.scalable:
        scalable = ", ".join(repr(of.name) for of in BASELINES.values() if of.scalable)
        if plain:
            raise ValueError(
                f"`args` is a {type(args).__name__}, which has no `baseline`, so the baseline is {name!r} ({named}). "
                "Its advantages are not 0 where all returns of a group are nearly equal, and `scale_rewards` is "
                f"{args.scale_rewards!r}, which would divide them by a deviation of nearly 0. Use OTBGRPOConfig, whose "
                "`scale_rewards` is 'none' by default. Or set `scale_rewards` to 'none' or 'running', and name a "
                "baseline as `default_baseline` in the trainer's class."
            )
        raise ValueError(
            f"`scale_rewards` is {args.scale_rewards!r} and `baseline` is {name!r}, under which advantages are not 0 "
            "where all returns of a group are nearly equal: they would be divided by a standard deviation of nearly 0. "
            "Set `scale_rewards` to 'none', the default of OTBGRPOConfig (GRPOConfig's is 'group'), or to "
            f"'running'{f', or choose {scalable}' if args.num_generations != 1 else ''}."
        )
    if args.num_generations == 1 and (conflict := _conflict_with_single_completion(args, baseline)):
        raise ValueError(f"`num_generations` is 1, and {conflict}.")
    if args.loss_type not in LOSS_TYPES and not own_loss:
        raise ValueError(
            f"`loss_type` is {args.loss_type!r}: OTBGRPOTrainer is known to be correct with "
            f"{', '.join(map(repr, LOSS_TYPES))} only. Set one of these."
        )
    return baseline


def _conflict_with_single_completion(args: GRPOConfig, baseline: Baseline) -> str | None:
    """What does not go with one completion per prompt, and the remedy."""
    if args.multi_objective_aggregation == "normalize_then_sum":
        return (
            "`multi_objective_aggregation` is 'normalize_then_sum', which normalizes rewards within a prompt's "
            "completions. Set 'sum_then_normalize'"
        )
    if baseline.scope == "group" and baseline.name != "none":
        return (
            f"`baseline` is {baseline.name!r}, which compares the completions of a prompt. Choose 'value', "
            "'rloo_pooled', 'ogb_pooled' or one of your own with `scope='batch'`, which compare prompts, or 'none', or "
            "2 completions"
        )
    if baseline.scope == "batch" and args.generation_batch_size == 1:
        return (
            "a generation batch is a single completion, which cannot be compared with another. Raise "
            "`generation_batch_size`, or its factors `per_device_train_batch_size` and `steps_per_generation`"
        )
    return None
