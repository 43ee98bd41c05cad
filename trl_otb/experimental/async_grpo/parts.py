"""The private parts of TRL's asynchronous trainer that are relied on."""

from ...seam.contract import Contract


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
        f"{_PACKAGE}.async_rollout_worker:_AsyncRolloutLoop": {"_score_group": "self group"},
        f"{_PACKAGE}.async_rollout_worker:AsyncRolloutWorker": {
            "check_health": "self stale_after_s",
            "start": "self",
            "stop": "self",
        },
        f"{_PACKAGE}.async_rollout_worker": {
            "RolloutGroup": "prompts reward_kwargs completions completions_ids completions_sequences",
            "RolloutSample": "prompt completion input_ids completion_mask old_log_probs advantage",
        },
        f"{_PACKAGE}.packing:TreeRow": {"pack": "self"},
        "trl.trainer.utils": {"add_fused_lm_head": "model temperature cast_lm_head_to_fp32 outputs", "pad": "tensors"},
    },
    attributes={
        "AsyncGRPOTrainer": "_metrics rollout_worker temperature",
        "AsyncGRPOTrainer's batch": "token_index segment_id old_log_probs advantages",
        "AsyncGRPOTrainer's sample": "advantage group_id metrics",
        "AsyncRolloutWorker": "_failed_event _loop_cls _process",
        "DataLoaderDispatcher": "base_dataloader",
        "RolloutGroup": "completions_sequences env_rewards",
        "_AsyncRolloutLoop": "_score_group reward_funcs",
    },
)
