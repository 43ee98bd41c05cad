"""The private parts of TRL that this package relies on, checked when a trainer is constructed."""

import hashlib
import inspect
import json
from pathlib import Path
from typing import Any

import transformers
import trl
from transformers import Trainer
from trl import GRPOTrainer


READ = Path(__file__).with_name("trl_sources.json")  # versions and hashes of the sources read; see `make hashes`


def incompatible_trl(what: str) -> ImportError:
    tested = json.loads(READ.read_text())["versions"]["trl"]
    return ImportError(
        f"trl_otb relies on parts of TRL that have moved in trl {trl.__version__}: {what}. Install the version that "
        f"was tested: pip install 'trl=={tested}'."
    )


try:
    from trl.models import utils as trl_models
    from trl.trainer import utils as trl_utils
except ImportError as error:
    raise incompatible_trl(str(error)) from error

# By owner: what is overridden, called or replaced, with its leading parameters
PARTS: dict[Any, dict[str, str]] = {
    GRPOTrainer: {
        "_calculate_rewards": "self inputs prompts completions completion_ids_list",
        "_compute_loss": "self model inputs",
        "_generate_and_score_completions": "self inputs",
        "_generate_single_turn": "self prompt_ids images multimodal_fields num_generations",
        "_get_per_token_logps_and_entropies": "self model input_ids attention_mask logits_to_keep batch_size",
        "_prepare_inputs": "self generation_batch",
        "_tool_call_loop": "self prompts prompt_ids",
        "get_gamma_weights": "advantages log_ratio_per_token mask",
        "get_off_policy_mask": "advantages per_token_logps sampling_per_token_logps mask off_policy_threshold",
    },
    Trainer: {
        "_load_optimizer_and_scheduler": "self checkpoint",
        "_save_optimizer_and_scheduler": "self output_dir",
        "training_step": "self model inputs",
    },
    trl_utils: {
        "add_fused_lm_head": "model temperature cast_lm_head_to_fp32 outputs",
        "FusedCausalLMOutput": "loss log_probs entropy log_sum_sq_probs",
        "get_config_model_id": "config",
        "is_async_callable": "func",
        "nanstd": "tensor dim",
        "split_pixel_values_by_grid": "batch",
        "split_tensor_dict": "tensor_dict num_chunks",
        "unsplit_pixel_values_by_grid": "batch",
    },
    trl_models: {"disable_gradient_checkpointing": "model gradient_checkpointing_kwargs"},
}
ATTRIBUTES = (
    "_logs _metrics _pending_extra_logs _pending_metrics _tokenizer importance_sampling_level "
    "multi_objective_aggregation num_generations num_generations_eval reward_func_names reward_funcs reward_weights "
    "scale_rewards temperature tools use_vllm vllm_mode vllm_tensor_parallel_size"
).split()
# What `_compute_loss` passes to the forward, in addition to ids and masks.
FORWARD_KWARGS = (
    "pixel_values image_grid_thw num_images pixel_attention_mask spatial_shapes num_tiles image_sizes token_type_ids "
    "mm_token_type_ids image_position_ids"
).split()


def check_trl(attributes_of: GRPOTrainer | None = None) -> None:
    """Raise an `ImportError` if a part of TRL has moved, or an attribute of a constructed trainer, if given."""
    messages = moved(PARTS)
    forward = getattr(GRPOTrainer, "_get_per_token_logps_and_entropies", None)
    known = inspect.signature(forward).parameters if forward is not None else FORWARD_KWARGS
    gone = [name for name in FORWARD_KWARGS if name not in known]
    messages += [f"`_get_per_token_logps_and_entropies` no longer takes `{name}`" for name in gone]
    if attributes_of is not None:
        messages += [f"`GRPOTrainer.{name}` is gone" for name in ATTRIBUTES if not hasattr(attributes_of, name)]
    if messages:
        raise incompatible_trl("; ".join(messages))


def moved(parts: dict[Any, dict[str, str]]) -> list[str]:
    """A message for each of `parts`, like `PARTS`, that is gone or takes other parameters."""
    messages = []
    for owner, expected in parts.items():
        for name, parameters in expected.items():
            function, names = getattr(owner, name, None), tuple(parameters.split())
            if function is None:
                messages.append(f"`{owner.__name__}.{name}` is gone")
            elif tuple(inspect.signature(function).parameters)[: len(names)] != names:
                messages.append(f"`{owner.__name__}.{name}` no longer takes ({', '.join(names)})")
    return messages


def versions() -> dict[str, str]:
    """The installed versions of the packages whose private parts are used."""
    return {package.__name__: package.__version__ for package in (trl, transformers)}


def source_hashes() -> dict[str, str]:
    """A short hash of the source of every part of TRL that is overridden, recomputed, intercepted or called."""
    try:
        from .asynchronous import ASYNC_PARTS
    except ImportError:  # experimental, and of no matter to OTBGRPOTrainer
        ASYNC_PARTS = {}
    parts = PARTS | ASYNC_PARTS
    owned = [(owner, name) for owner, expected in parts.items() for name in expected if hasattr(owner, name)]
    return {f"{owner.__name__}.{name}": _hash(getattr(owner, name)) for owner, name in owned}


def _hash(part: Any) -> str:
    try:
        return hashlib.sha256(inspect.getsource(part).encode()).hexdigest()[:12]
    except (OSError, TypeError):
        return "without source"


def drift() -> str | None:
    """A line on how the installed TRL differs from the one that was read; `None` if it does not."""
    known, seen = json.loads(READ.read_text()), source_hashes()
    changed = sorted(name for name in seen.keys() | known["sources"] if seen.get(name) != known["sources"].get(name))
    if not changed:
        return None
    installed, tested = (" and ".join(map(" ".join, of.items())) for of in (versions(), known["versions"]))
    return (
        f"trl_otb was tested with {tested}, and {installed} is installed, where the source of {', '.join(changed)} is "
        "another. All that is relied on has the expected arguments, and every rollout is compared with TRL's."
    )


# A user's own subclass


def users_classes(cls: type) -> list[type]:
    """The classes of `cls` that belong neither to GRPOTrainer and its bases nor to this package."""
    core = {*GRPOTrainer.__mro__}
    return [base for base in cls.__mro__ if base not in core and not base.__module__.startswith("trl_otb.")]


def check_loss(cls: type, baseline: str) -> None:
    """Raise a `TypeError` if a user's class has a loss that is not known to support advantages per token."""
    if getattr(cls, "takes_token_advantages", False):
        return
    for base in users_classes(cls):
        if "_compute_loss" in vars(base):
            raise TypeError(
                f"`baseline` is {baseline!r}, one per token, and `{base.__name__}._compute_loss` is not known to take "
                "advantages of shape (B, T): a loss for (B,) fails, or silently mixes up completions. If it supports "
                "both, as one that only adds to `super()`'s does, set `takes_token_advantages = True` in the class. "
                "Otherwise choose a baseline per completion, such as 'ogb_pooled' or 'rloo'."
            )


def check_config(cls: type) -> None:
    """Raise a `ValueError`, as `args` is missing, if a user's class may have a config of its own."""
    for base in users_classes(cls):
        if issubclass(base, GRPOTrainer) and "__init__" in vars(base):
            raise ValueError(
                f"`args` is missing, and {base.__name__} may have its own config, whose defaults would be lost. Pass "
                "one: `class Config(OTBGRPOConfig, TheirConfig)`, decorated with `@dataclass`."
            )


def overriders(trainer: Any, *names: str) -> list[str]:
    """`Class.method` for the user's overrides of `names`, also for methods set on the trainer."""
    result = [f"{name}, set on the trainer" for name in names if name in vars(trainer)]
    return result + [f"{b.__name__}.{name}" for name in names for b in users_classes(type(trainer)) if name in vars(b)]
