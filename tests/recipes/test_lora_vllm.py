"""recipes/lora_vllm.py on a CPU: its settings, data and errors, and a step with a sampler in the place of vLLM."""

import json

import pytest
from trl import ModelConfig
from trl.trainer import grpo_trainer

from recipes import lora_vllm as recipe
from tests.helpers import tiny
from tests.helpers.recording import Sampler
from trl_otb import OTBGRPOConfig


ROWS = [{"question": f"{i}+{i}", "answer": f"Twice {i}.\n#### {2 * i},000"} for i in range(1, 8)]


def parsed(*flags):
    kinds = (recipe.Options, OTBGRPOConfig, ModelConfig)
    return recipe.parse(["--use_cpu", "true", *flags], kinds, recipe.__file__, "lora_vllm.yaml")


def test_step_with_lora_and_stubbed_vllm(data_file, model_path, tmp_path, monkeypatch):
    monkeypatch.setattr(grpo_trainer, "VLLMGeneration", Sampler)
    monkeypatch.setattr(recipe, "accuracy_reward", tiny.even_bytes)  # a random policy answers nothing
    flags = "--max_steps 1 --gradient_accumulation_steps 1 --per_device_train_batch_size 16 --max_completion_length 8"
    flags += " --num_held_out_problems 2 --eval_on_start false --eval_strategy no --use_cpu true --bf16 false"
    flags += f" --dtype float32 --warmup_steps 0 --output_dir run --model_name_or_path {model_path}"
    trainer = recipe.main([*flags.split(), "--dataset_name", data_file(ROWS)])
    log = json.loads((tmp_path / "run" / "trainer_state.json").read_text())["log_history"][0]
    assert trainer.state.global_step == 1 and log["grad_norm"] > 0 and "otb/value/weight" in log
    assert trainer.energy_source == "the no-gradient forward that GRPOTrainer runs anyway"
    assert len(trainer.train_dataset) == 5 and (tmp_path / "run" / "adapter_model.safetensors").is_file()


def test_wrong_input_is_named(data_file, capsys):
    with pytest.raises(SystemExit):
        parsed("--learning_speed", "1")
    assert "--learning_speed" in capsys.readouterr().err
    rows = data_file([{"question": "1+1", "result": "2"}])
    with pytest.raises(ValueError, match="columns question, result, and .*: rename a column to answer"):
        recipe.load_problems(recipe.Options(dataset_name=rows))
    with pytest.raises(ValueError, match="--num_held_out_problems is 200, and .* has 7 problems"):
        recipe.main(["--use_cpu", "true", "--dataset_name", data_file(ROWS)])
