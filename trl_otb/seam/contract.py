"""The private parts of TRL that this package relies on, checked when a trainer is constructed."""

import contextlib
import hashlib
import inspect
import json
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from pkgutil import resolve_name
from typing import Any

import accelerate
import torch
import transformers
import trl
from accelerate.logging import get_logger
from packaging.version import Version
from transformers import Trainer

from ..baselines import Baseline


logger = get_logger(__name__)

PINNED = Path(__file__).with_name("trl_sources.json")  # newest versions, hashes of the sources read; see `make hashes`
OLDEST = "1.9"  # minor version of TRL that works; `older_trl.py` has what it takes
ON_TRAINER = "trainer"  # in the place of a class
ANY_TRL = "TRL_OTB_ANY_TRL"  # the environment variable that allows other versions than the tested ones


def tested() -> dict[str, Any]:
    """The newest `versions` that were tested, and by part the hashes of the `sources` that were read."""
    return json.loads(PINNED.read_text())


def versions() -> dict[str, str]:
    """The installed versions of the packages whose private parts are used."""
    return {package.__name__: package.__version__ for package in (trl, transformers, accelerate)}


def incompatible_trl(what: str) -> ImportError:
    return ImportError(
        f"trl_otb relies on parts of TRL that are different in trl {trl.__version__}: {what}. Install a version that "
        f"was tested, such as the newest: pip install 'trl=={tested()['versions']['trl']}'."
    )


class BrokenContract(Exception):
    """An assumption that TRL, or a user's override of one of `methods`, breaks."""

    def __init__(self, what: str, *methods: str) -> None:
        super().__init__(what)
        self.what, self.methods = what, methods

    def named(self, trainer: "GRPOTrainer") -> Exception:
        """The `TypeError` if the trainer's class overrides one of the methods; else the `ImportError`."""
        found = users_methods(trainer, self.methods)
        if not found:
            return incompatible_trl(self.what)
        theirs = [f"{name}, set on the trainer" if owner == ON_TRAINER else f"{owner}.{name}" for owner, name in found]
        return TypeError(
            f"{self.what[:1].upper()}{self.what[1:]}. In `{type(trainer).__name__}`, look at {', '.join(theirs)}; "
            "help(trl_otb.OTBGRPOTrainer) says what such a class must do."
        )


def check_version() -> None:
    """Raise an `ImportError` unless the installed TRL is of a minor version that was tested."""
    installed, newest = versions()["trl"], tested()["versions"]["trl"]
    minors = [Version(version).release[:2] for version in (OLDEST, installed, newest)]
    if minors != sorted(minors) and os.environ.get(ANY_TRL, "0") in ("", "0"):
        raise ImportError(
            f"trl {installed} is installed, and trl_otb was tested with trl {OLDEST} to {newest}. Install one: pip "
            f"install 'trl=={newest}'. To try the installed one, set the environment variable {ANY_TRL}=1: all "
            "checks still run."
        )


try:
    from trl.models import utils as trl_models  # noqa: F401
    from trl.trainer import utils as trl_utils  # noqa: F401
    from trl.trainer.grpo_trainer import GRPOTrainer

    from .older_trl import LACKING
except ImportError as error:
    check_version()
    raise incompatible_trl(str(error)) from error


FOLDERS = [Path(str(of.__file__)).parent for of in (trl, transformers, torch, accelerate)] + [Path(__file__).parents[1]]
LIBRARIES = (contextlib.__file__, *(f"{folder}{os.sep}" for folder in FOLDERS))  # as the paths of their code begin


def _takes(function: Any, names: list[str]) -> bool:
    """Whether these are the leading parameters, or the function takes any."""
    parameters = inspect.signature(function).parameters
    takes_any = {"VAR_POSITIONAL", "VAR_KEYWORD"} <= {of.kind.name for of in parameters.values()}
    return takes_any or [*parameters][: len(names)] == names


@dataclass(frozen=True)
class Contract:
    """What is relied on of one of TRL's trainers."""

    trainer: str
    parts: dict[str, dict[str, str]]  # by `module` or `module:class`: functions, with their leading parameters
    attributes: dict[str, str]  # of instances, by class; of dicts, the keys
    loss: frozenset[str] = frozenset()  # of the parts, those that multiply advantages

    def gone(self) -> list[str]:
        """A message for each part that is gone or takes other parameters."""
        messages = []
        for name, function, parameters in self._parts():
            if function is None:
                messages.append(f"`{name}` is gone")
            elif not _takes(function, parameters) and function.__module__.partition(".")[0] in versions():
                messages.append(f"`{name}` no longer takes ({', '.join(parameters)})")
        return messages

    def sources(self) -> dict[str, str]:
        """A short hash of the source of every part."""
        return {name: _hash(part) for name, part, _ in self._parts() if part is not None}

    def changed(self) -> list[str]:
        """The parts whose source is not the one that was read."""
        known = tested()["sources"]
        return sorted(name for name, source in self.sources().items() if source not in known.get(name, ()))

    def check(self) -> None:
        """
        Raise an `ImportError` if the installed TRL is another version, or does not keep the contract; a `TypeError` if
        what a user put in the place of a part does not take its parameters.
        """
        check_version()
        if messages := self.gone():
            raise incompatible_trl("; ".join(messages))
        for name, function, parameters in self._parts():
            if not _takes(function, parameters):
                raise TypeError(
                    f"`{name}` was replaced by `{function.__module__}.{function.__qualname__}`, which does not take "
                    f"({', '.join(parameters)}): let it take `*args, **kwargs`, or these."
                )

    def warn_if_changed(self) -> list[str]:
        """Warns once of the parts whose source is not the one that was read, and returns them."""
        if changed := self.changed():
            tried = "; before the first step with a baseline per token the loss is tried"
            installed, known = (", ".join(map(" ".join, of.items())) for of in (versions(), tested()["versions"]))
            logger.warning_once(
                f"trl_otb was tested with up to {known}; installed: {installed}. Changed for {self.trainer}: "
                f"{', '.join(changed)}. Signatures still match{tried if {*changed} & self.loss else ''}."
            )
        return changed

    def check_attributes(self, owner: str, instance: Any) -> None:
        """Raise an `ImportError` if an attribute of an instance of `owner` is gone, or a key if it is a dict."""
        names = self.attributes[owner].split()
        known = instance if isinstance(instance, Mapping) else [name for name in names if hasattr(instance, name)]
        if gone := [name for name in names if name not in known]:
            raise incompatible_trl(", ".join(f"`{owner}.{name}` is gone" for name in gone))

    def _parts(self) -> list[tuple[str, Any, list[str]]]:
        """Names, the functions or classes that are there, and their expected parameters."""
        return [
            (f"{owner.rpartition(':')[2]}.{name}", _found(owner, name), parameters.split())
            for owner, functions in self.parts.items()
            for name, parameters in functions.items()
            if name not in LACKING
        ]


def _found(owner: str, name: str) -> Any:
    try:
        return getattr(resolve_name(owner), name, None)
    except (ImportError, AttributeError):
        return None


def from_library(function: Any) -> bool:
    """Whether its code is that of a library or of this package, whatever `functools.wraps` says."""
    return getattr(getattr(function, "__code__", None), "co_filename", "").startswith(LIBRARIES)


@cache
def _hash(part: Any) -> str:
    while hasattr(part, "__wrapped__") and from_library(part):  # not through a user's wrapper
        part = part.__wrapped__
    try:
        return hashlib.sha256(inspect.getsource(getattr(part, "__code__", part)).encode()).hexdigest()[:12]
    except (OSError, TypeError):
        return "without source"


GRPO = Contract(
    "GRPOTrainer",
    parts={
        "trl.trainer.grpo_trainer:GRPOTrainer": {
            "_calculate_rewards": "self inputs prompts completions completion_ids_list",
            "_compute_loss": "self model inputs",
            "_generate_and_score_completions": "self inputs",
            "_generate_single_turn": "self prompt_ids images multimodal_fields",
            "_get_per_token_logps_and_entropies": "self model input_ids attention_mask logits_to_keep batch_size",
            "_tool_call_loop": "self prompts prompt_ids",
            "get_gamma_weights": "advantages log_ratio_per_token mask",
            "get_off_policy_mask": "advantages per_token_logps sampling_per_token_logps mask off_policy_threshold",
        },
        "trl.trainer.grpo_config:GRPOConfig": {"__post_init__": "self"},
        "transformers.trainer:Trainer": {
            "_load_from_checkpoint": "self resume_from_checkpoint model",
            "_load_optimizer_and_scheduler": "self checkpoint",
            "_push_from_checkpoint": "self checkpoint_folder",
            "_save_optimizer_and_scheduler": "self output_dir",
            "push_to_hub": "self commit_message",
            "training_step": "self model inputs",
        },
        "transformers.generation.utils:GenerationMixin": {"_get_logits_processor": "self generation_config"},
        "trl.trainer.utils": {
            "add_fused_lm_head": "model temperature cast_lm_head_to_fp32 outputs",
            "FusedCausalLMOutput": "loss log_probs entropy log_sum_sq_probs",
            "get_config_model_id": "config",
            "is_async_callable": "func",
            "nanstd": "tensor dim",
            "split_pixel_values_by_grid": "batch",
            "split_tensor_dict": "tensor_dict num_chunks",
            "unsplit_pixel_values_by_grid": "batch",
        },
        "trl.models.utils": {"disable_gradient_checkpointing": "model gradient_checkpointing_kwargs"},
    },
    attributes={
        "GRPOTrainer": "_logs _metrics _name _paper _pending_extra_logs _pending_metrics _remove_unused_columns "
        "_tag_names _tokenizer importance_sampling_level is_deepspeed_enabled is_fsdp_enabled "
        "multi_objective_aggregation num_generations num_generations_eval reward_func_names reward_funcs "
        "reward_weights rollout_func scale_rewards temperature tools use_vllm vllm_mode "
        "vllm_importance_sampling_mode vllm_tensor_parallel_size"
    },
    loss=frozenset(("GRPOTrainer._compute_loss", "GRPOTrainer.get_gamma_weights", "GRPOTrainer.get_off_policy_mask")),
)

CLI = Contract(  # of the command line
    "trl grpo",
    parts={
        "accelerate.commands.launch": {"launch_command": "args", "launch_command_parser": "subparsers"},
        "trl.cli.accelerate_config": {"resolve_accelerate_config_argument": "launch_args"},
        "trl.cli.commands.training": {"_subtract_subsequence": "lst subseq"},
        "trl.scripts.grpo": {"main": "script_args training_args model_args dataset_args"},
        "trl.scripts.utils:TrlParser": {
            "__init__": "self dataclass_types",
            "parse_args_and_config": "self args return_remaining_strings fail_with_unknown_args",
        },
    },
    attributes={},
)


# A user's own subclass


def users_classes(cls: type, of_trl: type = GRPOTrainer) -> list[type]:
    """The classes of `cls` that belong neither to TRL's trainer and its bases nor to this package."""
    core = {*of_trl.__mro__}
    return [base for base in cls.__mro__ if base not in core and not base.__module__.startswith("trl_otb.")]


def users_methods(trainer: Trainer, names: Iterable[str], of_trl: type = GRPOTrainer) -> list[tuple[str, str]]:
    """Owner and name of each of these methods that is set on the trainer, or that a user's class has."""
    classes = users_classes(type(trainer), of_trl)
    owners = [(ON_TRAINER, vars(trainer)), *((cls.__name__, vars(cls)) for cls in classes)]
    return [(owner, name) for owner, methods in owners for name in names if name in methods]


def users_loss(trainer: Trainer, tried: str, of_trl: type = GRPOTrainer) -> str | None:
    """
    The name of a loss of the user's own, or `None`. It is in a class, on the trainer, or in the place of a method of
    this package or of TRL. TRL's own `tried` may be replaced, as a trial then checks it.
    """
    names, mro = ("_compute_loss", "compute_loss"), type(trainer).__mro__
    known = [(cls, name) for cls in mro[: mro.index(of_trl) + 1] for name in names if name in vars(cls)]
    replaced = [(cls.__name__, name) for cls, name in known if not from_library(vars(cls)[name])]
    found = dict.fromkeys([*users_methods(trainer, names, of_trl), *replaced])
    return next((f"{owner}.{name}" for owner, name in found if (owner, name) != (of_trl.__name__, tried)), None)


def check_subclass(trainer: GRPOTrainer, entry: Baseline) -> None:
    """Raise a `TypeError` if a user has a method that the baseline would undo, or that would misread it."""
    for owner, name in users_methods(trainer, ("_transform_advantages",)):  # of TRL's pull request 7298
        raise TypeError(
            f"`{owner}.{name}` would change advantages that `baseline={entry.name!r}` then replaces. Change rewards in "
            "`_calculate_rewards`, or `inputs['advantages']` in `_compute_loss`."
        )
    if not entry.per_token or getattr(trainer, "takes_token_advantages", False):
        return
    if loss := users_loss(trainer, tried="_compute_loss"):
        raise TypeError(
            f"`baseline` is {entry.name!r}, one per token, and `{loss}` is not known to take advantages of shape "
            "(B, T): a loss for (B,) fails, or silently mixes up completions. If it supports both, as one that only "
            "adds to `super()`'s does, set `takes_token_advantages = True` in the class. Otherwise choose a baseline "
            "per completion, such as 'ogb_pooled' or 'rloo'."
        )


def check_config(cls: type) -> None:
    """Raise a `ValueError`, as `args` is missing, if a user's class may have a config of its own."""
    for base in users_classes(cls):
        if issubclass(base, GRPOTrainer) and "__init__" in vars(base):
            raise ValueError(
                f"`args` is missing, and {base.__name__} may have its own config, whose defaults would be lost. Pass "
                "one: `class Config(OTBGRPOConfig, TheirConfig)`, decorated with `@dataclass`."
            )
