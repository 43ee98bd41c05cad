"""The private parts of TRL's asynchronous trainer that are relied on. See `trl_otb.seam.contract`."""

from collections.abc import Mapping
from typing import Any

from ...seam.contract import Contract, incompatible_trl


LOSS = "AsyncGRPOTrainer.compute_loss"
_PACKAGE = "trl.experimental.async_grpo"
ASYNC_GRPO = Contract(
    "AsyncGRPOTrainer",
    parts={
        f"{_PACKAGE}:AsyncGRPOTrainer": {
            "compute_loss": "self model inputs return_outputs num_items_in_batch",
            "get_train_dataloader": "self",
        },
        f"{_PACKAGE}.async_grpo_trainer:DataCollatorForRollout": {"torch_call": "self examples"},
        f"{_PACKAGE}.async_grpo_trainer:RolloutQueueDataset": {"__iter__": "self"},
        f"{_PACKAGE}.async_rollout_worker:_AsyncRolloutLoop": {"_score_group": "self group"},
        f"{_PACKAGE}.async_rollout_worker:AsyncRolloutWorker": {"start": "self", "stop": "self"},
        f"{_PACKAGE}.async_rollout_worker": {
            "RolloutGroup": "prompts reward_kwargs completions completions_ids completions_sequences",
            "RolloutSample": "prompt completion input_ids completion_mask old_log_probs advantage model_version",
        },
        f"{_PACKAGE}.packing:TreeRow": {"pack": "self"},
        "trl.trainer.utils": {"add_fused_lm_head": "model temperature cast_lm_head_to_fp32 outputs", "pad": "tensors"},
    },
    attributes={
        "AsyncGRPOTrainer": "_metrics model_version rollout_worker temperature",
        "AsyncRolloutWorker": "_failed_event _loop_cls _process",
        "DataLoaderDispatcher": "base_dataloader",
        "RolloutGroup": "completions_sequences env_rewards",
        "RolloutQueueDataset": "queue",
        "RolloutSample": "metrics model_version",
        "_AsyncRolloutLoop": "_score_group reward_funcs",
    },
    loss=frozenset((LOSS,)),
)
BATCH = "token_index segment_id old_log_probs advantages".split()
SAMPLE = "advantage group_id metrics".split()


def check_keys(what: str, found: Mapping[str, Any], expected: list[str]) -> None:
    """Raise an `ImportError` if TRL's batch or sample lacks a key."""
    if gone := [key for key in expected if key not in found]:
        raise incompatible_trl(f"a {what} of AsyncGRPOTrainer has no {', '.join(map(repr, gone))}")
