"""recipes/async_math.py, with its worker in this process: results, errors, resuming."""

import asyncio
import json

import pytest

from recipes import async_math


SMALL = "--max_steps 2 --per_device_train_batch_size 16 --num_held_out_problems 10 --disable_tqdm true".split()


@pytest.fixture
def run_async(short_policy, tmp_path):
    def start(*flags, output="run"):
        folder = tmp_path / output
        main = ["--model_name_or_path", str(short_policy), *SMALL, "--output_dir", str(folder), *flags]
        return async_math.main(main), folder

    return start


def test_run_measures_before_and_after(run_async, capsys):
    _, folder = run_async("--lora_r", "4", "--max_steps", "4", "--logging_steps", "1")
    said = capsys.readouterr().out
    assert "held out. Baseline value." in said and said.count("% (avg@4, 10 problems)") == 2
    log = [entry for entry in json.loads((folder / "trainer_state.json").read_text())["log_history"] if "loss" in entry]
    assert "otb/value/weight" in log[-1]
    assert (folder / "adapter_model.safetensors").is_file()


def test_run_resumes_and_names_used_folder(run_async, capsys):
    run_async("--save_steps", "2")
    with pytest.raises(SystemExit):
        run_async()
    assert "holds a run already" in capsys.readouterr().err
    trainer, _ = run_async("--resume_from_checkpoint", "latest", "--max_steps", "3")
    assert trainer.state.global_step == 3 and trainer.baseline.has_learned


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--steps_ahead", "None"], "Without one, give --steps_ahead, as 1"),
        (["--config", "empty.yaml"], "--model_name_or_path is missing"),
        (["--config", "empty.yaml", "--model_name_or_path", "x"], "Without one, give --steps_ahead"),
        (["--baseline", "otb"], "`baseline` is 'otb', which needs whole groups at once"),
    ],
)
def test_wrong_options_end_at_once(flags, message, tmp_path, capsys):
    (tmp_path / "empty.yaml").write_text("use_cpu: true\nbf16: false\n")
    with pytest.raises(SystemExit) as ended:
        async_math.main(flags)
    assert message in capsys.readouterr().err + str(ended.value)


def test_right_answers_are_rewarded_one():
    said = ["1+1=2", [{"role": "assistant", "content": r"so \boxed{3}"}], "", r"\boxed{\frac{4}{2}}"]
    assert asyncio.run(async_math.accuracy(said, ["2"] * 4)) == [1.0, 0.0, 0.0, 1.0]
