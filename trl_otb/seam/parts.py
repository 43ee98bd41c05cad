"""The private parts of TRL, transformers and accelerate that the trainer and the command line rely on."""

from .contract import Contract


GRPO = Contract(
    "GRPOTrainer",
    parts={
        "trl.trainer.grpo_trainer:GRPOTrainer": {
            "_calculate_rewards": "self inputs prompts completions completion_ids_list",
            "_compute_loss": "self model inputs",
            "_generate_and_score_completions": "self inputs",
            "_generate_single_turn": "self prompt_ids images multimodal_fields",
            "_get_per_token_logps_and_entropies": "self model input_ids attention_mask logits_to_keep batch_size",
            "_prepare_inputs": "self generation_batch",
            "_tool_call_loop": "self prompts prompt_ids",
            "compute_loss": "self model inputs",
            "get_gamma_weights": "advantages log_ratio_per_token mask",
            "get_off_policy_mask": "advantages per_token_logps sampling_per_token_logps mask off_policy_threshold",
        },
        "trl.trainer.grpo_config:GRPOConfig": {"__post_init__": "self"},
        "transformers.trainer:Trainer": {
            "_load_from_checkpoint": "self resume_from_checkpoint model",
            "_load_optimizer_and_scheduler": "self checkpoint",
            "_save_optimizer_and_scheduler": "self output_dir",
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
)

PROGRESS = Contract(  # of progress functions, which few runs have
    "GRPOTrainer with progress functions",
    parts={
        "trl.trainer.grpo_trainer:GRPOTrainer": {"_generate": "self prompts"},
        "trl.chat_template_utils": {"parse_response": "tokenizer ids prefix"},
    },
    # And, from 1.16 on and where there are environments, `_env_tools` and `_batch_environments`; else `tools`
    attributes={"GRPOTrainer": "_tokenizer processing_class tools"},
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
