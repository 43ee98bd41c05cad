"""`trl-otb grpo` and `trl-otb compare`: the files and flags of `trl grpo`, with this package's trainer."""

import json
import subprocess
import sys

import pytest
import torch
import yaml

from tests.helpers import tiny
from trl_otb import cli


OPTIONS = tiny.SETTINGS | {"dataset_name": "data", "reward_funcs": ["own_rewards.odd"], "baseline": "value"}


@pytest.fixture
def folder(model_path, tmp_path, monkeypatch):
    """A YAML file, data, and a reward's module, in the current folder."""
    (tmp_path / "data").mkdir()
    rows = [json.dumps({"prompt": f"{i}+{i}="}) for i in range(40)]
    (tmp_path / "data" / "train.jsonl").write_text("\n".join(rows))
    reward = "def odd(completion_ids, **kwargs):\n    return [sum(i % 2 for i in ids) for ids in completion_ids]\n"
    (tmp_path / "own_rewards.py").write_text(reward)
    options = OPTIONS | {"model_name_or_path": model_path, "output_dir": "out"}
    (tmp_path / "run.yaml").write_text(yaml.dump(options))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    return tmp_path


def test_trl_yaml_trains_this_trainer(folder):
    cli.run(["grpo", "--config", "run.yaml", "--baseline", "rloo", "--save_strategy", "no"])
    assert (folder / "out" / "model.safetensors").is_file()
    args = torch.load(folder / "out" / "training_args.bin", weights_only=False)
    assert (type(args).__name__, args.baseline) == ("OTBGRPOConfig", "rloo")  # a flag wins over the file


@pytest.mark.slow
def test_compare_prints_verdict_trains_nothing(folder, capsys):
    with pytest.raises(SystemExit) as end:
        cli.run(["compare", "--config", "run.yaml"])
    assert end.value.code is None and "more completions" in capsys.readouterr().out
    assert not (folder / "out" / "model.safetensors").exists()


@pytest.mark.slow
def test_accelerate_starts_it_with_options(folder):
    command = [sys.executable, "-m", "trl_otb", "grpo", "--config", "run.yaml", "--num_processes", "1"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0 and "Training completed" in done.stdout, done.stderr
    assert (folder / "out" / "model.safetensors").is_file()


def test_what_is_wrong_is_named(folder, capsys):
    with pytest.raises(SystemExit, match="'sft' is none of \\('grpo', 'compare'\\)"):
        cli.main(["sft"])
    with pytest.raises(SystemExit, match="as `trl grpo`"):
        cli.main(["--help"])
    with pytest.raises(ValueError, match="`baseline` is 'absent'"):
        cli.run(["grpo", "--config", "run.yaml", "--baseline", "absent"])
    with pytest.raises(ValueError, match="--colour"):
        cli.run(["grpo", "--config", "run.yaml", "--colour", "red"])
