"""
What TRL before 1.16 lacks, or has otherwise, and the asynchronous parts, which 1.18 moved. No other file asks which TRL
is installed, but for `contract.py`, which compares it with those that were tested. Each piece says before which version
it is needed, and goes with that version.
"""

import functools
import inspect
import types
from collections.abc import Callable
from importlib.util import find_spec
from typing import Any

import torch
import trl
from packaging.version import Version
from trl.trainer import utils as trl_utils

from ..energy import log_sum_sq_probs


def _before(version: str) -> bool:
    return Version(trl.__version__) < Version(version)


# Before 1.15: no fused LM head, so forwards return logits

NO_FUSED_HEAD = _before("1.15")


def _add_to_outputs(model: Any, temperature: float, cast_lm_head_to_fp32: bool, outputs: tuple[str, ...]) -> None:
    """Stands for TRL's `add_fused_lm_head`: the outputs also hold log Σπ², `(b, L − 1)`, of their logits."""
    original = model.forward

    @functools.wraps(type(model).forward)
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        result = call_on(self, original, *args, **kwargs)
        result["log_sum_sq_probs"] = log_sum_sq_probs(result.logits.detach()[:, :-1], temperature)
        return result

    model.forward = types.MethodType(forward, model)


def call_on(model: Any, forward: Callable, *args: Any, **kwargs: Any) -> Any:
    """`forward` of a model or, if it is a method, of its copy; hooks of accelerate make it a function."""
    method = getattr(forward, "__func__", None)
    return forward(*args, **kwargs) if method is None else method(model, *args, **kwargs)


def _is_async(function: Callable) -> bool:
    """As TRL's `is_async_callable`, before 1.14."""
    call = getattr(function, "__call__", None)  # noqa: B004  # of an object
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(call)


add_fused_lm_head: Any = _add_to_outputs if NO_FUSED_HEAD else getattr(trl_utils, "add_fused_lm_head", None)
is_async_callable: Any = _is_async if _before("1.14") else getattr(trl_utils, "is_async_callable", None)
# What the contract lists, and a version does not have
LACKING = {"add_fused_lm_head", "FusedCausalLMOutput"} if NO_FUSED_HEAD else set()
LACKING |= {"is_async_callable"} if _before("1.14") else set()
# Before 1.14.1, `_generate_single_turn` has no `num_generations`
EMPTY_TURN: tuple[Any, ...] = ([], None, {}) if _before("1.14.1") else ([], None, {}, 1)


def scoring_method(trainer: Any) -> Any:
    """Whose parameters are the inputs of a scoring forward: in 1.14 that of TRL passes any on to another."""
    return getattr(trainer, "_full_logits_logps", trainer._get_per_token_logps_and_entropies)


def check_liger(use_liger_kernel: bool, per_token: bool, baseline: str) -> None:
    """Raise a `ValueError` if Liger's loss, before 1.15, is to take advantages per token."""
    if NO_FUSED_HEAD and use_liger_kernel and per_token:
        raise ValueError(
            f"`use_liger_kernel` is set and `baseline` is {baseline!r}, one per token: in trl {trl.__version__} "
            "Liger's loss takes one advantage per completion. Leave it out, install trl 1.15 or newer, or choose a "
            "baseline per completion, such as 'rloo'."
        )


def check_head(device: torch.device) -> None:
    """Raise an `ImportError` where 1.15's own LM head fails: on a CPU, if triton is installed."""
    if _before("1.16") and not NO_FUSED_HEAD and device.type == "cpu" and find_spec("triton") is not None:
        from triton import knobs  # type: ignore[import-untyped]

        if not knobs.runtime.interpret:
            raise ImportError(
                f"trl {trl.__version__} runs its Triton kernels on a CPU, too, where triton is installed, and fails "
                "there. Install trl 1.16 or 1.14, uninstall triton, or set TRITON_INTERPRET=1, which is slow."
            )


def no_asynchronous_training() -> str | None:
    """Before 1.16, and from 1.18 on: why `AsyncOTBGRPOTrainer` cannot be imported."""
    if _before("1.18") and not _before("1.16"):
        return None
    return (
        f"Asynchronous training needs trl 1.16 or 1.17, and {trl.__version__} is installed, whose AsyncGRPOTrainer has "
        "other parts. Install one of them: pip install 'trl>=1.16,<1.18'. `OTBGRPOTrainer` needs neither."
    )
