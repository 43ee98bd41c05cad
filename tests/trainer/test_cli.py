"""`trl-otb grpo` and `trl-otb compare`: the files and flags of `trl grpo`, with this package's trainer."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from types import SimpleNamespace

import pytest
import torch
import yaml
from safetensors.torch import load_file

import trl_otb
from tests.helpers import tiny
from trl_otb import cli, stopping
from trl_otb.comparison import moments as moments_module


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


def test_a_reward_without_a_list(folder):
    options = yaml.safe_load((folder / "run.yaml").read_text()) | {"reward_funcs": "own_rewards.odd", "max_steps": 1}
    (folder / "run.yaml").write_text(yaml.dump(options))
    cli.run(["grpo", "--config", "run.yaml"])
    assert (folder / "out" / "model.safetensors").is_file()


@pytest.mark.slow
def test_compare_prints_verdict_trains_nothing(folder, capsys, monkeypatch):
    monkeypatch.setattr(moments_module, "BATCH_PARTITIONS", 1)  # for speed
    flags = "--num_prompts 4 --completions_per_prompt 16 --baselines value rloo --report found".split()
    with pytest.raises(SystemExit) as end:
        cli.run(["compare", "--config", "run.yaml", *flags])
    assert end.value.code is None and "4 prompts, 16 completions each" in capsys.readouterr().out
    saved = json.loads((folder / "found" / "report.json").read_text())
    assert {row["name"] for row in saved["comparisons"]} == {"none", "group_mean", "rloo_pooled", "value", "rloo"}
    assert "<svg" in (folder / "found" / "report.html").read_text()
    assert not (folder / "out" / "model.safetensors").exists()


def test_what_is_wrong_is_named(folder, capsys):
    with pytest.raises(SystemExit, match="'sft' is none of \\('grpo', 'compare'\\)"):
        cli.main(["sft"])
    with pytest.raises(ValueError, match="`baseline` is 'absent'"):
        cli.run(["grpo", "--config", "run.yaml", "--baseline", "absent"])
    with pytest.raises(ValueError, match="--colour"):
        cli.run(["grpo", "--config", "run.yaml", "--colour", "red"])


def test_help_begins_with_what_is_not_trls(capsys):
    for flags in ([], ["--help"]):
        cli.main(flags or ["-h"])
        assert "as `trl grpo`" in capsys.readouterr().out
    cli.main(["--version"])
    assert f"trl-otb {trl_otb.__version__}\n" in capsys.readouterr().out
    for command, options in (("grpo", ["baseline", "save_rollouts_steps"]), ("compare", ["baselines", "num_prompts"])):
        with pytest.raises(SystemExit):
            cli.main([command, "--help"])
        first = capsys.readouterr().out.partition("--dataset_name ")[0]
        assert all(f"--{name} " in first for name in options) and first.count("\n") < 80


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("learning_rat: 0.1", "'learning_rat' in run.yaml is no option of .* Did you mean learning_rate?"),
        ("baselin: rloo", "'baselin' in run.yaml is no option .* Did you mean baseline?"),
        ("baseline: [", 'while parsing(.|\n)* in "run.yaml", line'),
        ("\tbaseline: rloo", 'while scanning(.|\n)* in "run.yaml", line'),
        ("baseline: valu", "`baseline` is 'valu'"),
    ],
)
def test_a_wrong_line_of_the_file_is_named(folder, capsys, line, message):
    with (folder / "run.yaml").open("a") as file:
        file.write(f"\n{line}\n")
    with pytest.raises(SystemExit):
        cli.main(["grpo", "--config", "run.yaml"])
    usage, _, error = capsys.readouterr().err.rpartition("usage: ")[2].partition("\n")
    assert usage.startswith("trl-otb grpo --config") and re.search(message, error)


def test_a_wrong_baseline_of_a_comparison_is_named(folder, capsys):
    with pytest.raises(SystemExit):
        cli.main(["compare", "--config", "run.yaml", "--baselines", "rlo"])
    assert "'rlo'" in (error := capsys.readouterr().err) and "rloo" in error


@pytest.mark.slow
def test_ctrl_c_leaves_a_checkpoint_that_resumes(folder, capsys):
    """Started by accelerate, whose options are among the others."""
    command = [sys.executable, "-m", "trl_otb", "grpo", "--config", "run.yaml", "--num_processes", "1"]
    command += ["--max_steps", "2000", "--logging_strategy", "no"]
    running = subprocess.Popen([*command, "--save_steps", "1", "--save_strategy", "steps", "--save_total_limit", "1"])
    while not [*folder.glob("out/checkpoint-*/trainer_state.json")]:
        time.sleep(0.1)
    running.send_signal(signal.SIGINT)
    for child in subprocess.run(["pgrep", "-P", str(running.pid)], capture_output=True, text=True).stdout.split():
        os.kill(int(child), signal.SIGINT)  # a terminal sends it to both
    running.wait(240)
    step = int(stopping.latest_checkpoint(folder / "out").rpartition("-")[2])
    state = json.loads((folder / "out" / f"checkpoint-{step}" / "trainer_state.json").read_text())
    assert state["global_step"] == step
    cli.run([*command[3:6], "--resume_from_checkpoint", "latest", "--max_steps", str(step + 1), "--output_dir", "out"])
    assert "Training completed" in capsys.readouterr().out and (folder / "out" / "model.safetensors").is_file()


def test_a_checkpoint_that_was_cut_off_is_passed_over(tmp_path, capsys):
    for step, text in ((2, "{}"), (10, '{"global_'), (9, "{}"), (11, None)):
        (tmp_path / f"checkpoint-{step}").mkdir()
        if text is not None:
            (tmp_path / f"checkpoint-{step}" / "trainer_state.json").write_text(text)
    assert stopping.latest_checkpoint(tmp_path) == str(tmp_path / "checkpoint-9")
    assert "checkpoint-11 was not saved to its end" in capsys.readouterr().err
    assert stopping.latest_checkpoint(tmp_path / "none") is None


@pytest.fixture
def checkpoint(folder):
    """A run's second checkpoint, whose baseline has learned and whose weights are others than the model's."""
    flags = ["--save_strategy", "steps", "--save_steps", "2", "--learning_rate", "0.1"]
    cli.run(["grpo", "--config", "run.yaml", *flags])
    return folder / "out" / "checkpoint-2"


@pytest.mark.parametrize("asked", ["latest", "out/checkpoint-2"])
def test_compare_measures_the_checkpoint(folder, checkpoint, monkeypatch, asked):
    """Its weights, and what its baseline has learned."""
    found = []

    def watched(trainer, **options):
        head = trainer.model.get_output_embeddings().weight.detach().clone()
        found.append((head, trainer.baseline.state_dict()["state"]["_prompts"]))
        raise SystemExit

    monkeypatch.setattr(trl_otb, "compare_baselines", watched)
    for flags in (["--resume_from_checkpoint", asked], []):
        with pytest.raises(SystemExit):
            cli.run(["compare", "--config", "run.yaml", *flags])
    (head, learned), (of_model, nothing) = found
    saved = load_file(checkpoint / "model.safetensors")["lm_head.weight"]
    assert torch.equal(head, saved) and not torch.equal(of_model, saved)
    assert learned == 4 and nothing == 0


@pytest.mark.parametrize("command", ["grpo", "compare"])
def test_a_checkpoint_that_is_not_there_is_refused(folder, capsys, command):
    for asked in ["no/such/folder"] + ["latest"] * (command == "compare"):
        with pytest.raises(ValueError, match=f"--resume_from_checkpoint is {asked}, and there is no checkpoint in"):
            cli.run([command, "--config", "run.yaml", "--resume_from_checkpoint", asked])
        with pytest.raises(SystemExit):
            cli.main([command, "--config", "run.yaml", "--resume_from_checkpoint", asked])
        assert f"--resume_from_checkpoint is {asked}" in capsys.readouterr().err


def test_a_run_without_a_latest_checkpoint_says_so(folder, capsys):
    cli.run(["grpo", "--config", "run.yaml", "--resume_from_checkpoint", "latest", "--max_steps", "1"])
    assert "There is no checkpoint in out: the run starts from the beginning." in capsys.readouterr().err


def test_a_report_that_cannot_be_written_is_refused_at_the_start(folder):
    (folder / "found").write_text("a file, not a folder")
    with pytest.raises(OSError):
        cli.run(["compare", "--config", str(folder / "run.yaml"), "--report", str(folder / "found")])


@pytest.mark.parametrize("written", [False, "false", None])
def test_a_resume_that_is_switched_off_starts_anew(written, tmp_path):
    args = SimpleNamespace(resume_from_checkpoint=written, output_dir=str(tmp_path))
    cli.check("grpo", args, [])
    assert args.resume_from_checkpoint is None


def test_grpo_goes_on_from_the_checkpoint(folder, checkpoint, monkeypatch):
    """Also with TRL before 1.14.1, whose script does not pass it."""
    steps = []

    class Watches(trl_otb.OTBGRPOTrainer):
        def training_step(self, *args, **kwargs):
            steps.append(self.state.global_step)
            return super().training_step(*args, **kwargs)

    monkeypatch.setattr(trl_otb, "OTBGRPOTrainer", Watches)
    cli.run(["grpo", "--config", "run.yaml", "--max_steps", "4", "--resume_from_checkpoint", str(checkpoint)])
    assert steps[0] == 2
