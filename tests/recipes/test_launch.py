"""Launch configurations, launchers, several processes, Ctrl-C in programs of their own."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from accelerate.commands.config.config_args import load_config_from_file

from recipes import math as recipe
from recipes.common import launching
from recipes.common.errors import InputError, Stopped
from tests.recipes.conftest import SMALL, log_of, result_of


RECIPES = Path(recipe.__file__).parent
ACCELERATE = [str(Path(sys.executable).with_name("accelerate")), "launch", "--mixed_precision", "no"]
ACCELERATE += ["--dynamo_backend", "no"]


@pytest.mark.parametrize(
    ("name", "distributed_type", "processes"),
    [
        ("cpu", "NO", 1),
        ("single_gpu", "NO", 1),
        ("multi_cpu", "MULTI_GPU", 2),
        ("multi_gpu", "MULTI_GPU", 8),
        ("multi_machine", "MULTI_GPU", 16),
        ("zero1", "DEEPSPEED", 8),
        ("zero2", "DEEPSPEED", 8),
        ("zero3", "DEEPSPEED", 8),
        ("fsdp2", "FSDP", 8),
    ],
)
def test_accelerate_takes_its_configurations(name, distributed_type, processes):
    config = load_config_from_file(str(RECIPES / "accelerate" / f"{name}.yaml"))
    assert (config.distributed_type, config.num_processes) == (distributed_type, processes)
    if name.startswith("zero"):
        assert config.deepspeed_config["zero_stage"] == int(name[-1])
        assert config.deepspeed_config["zero3_init_flag"] == (name == "zero3")
    if name == "fsdp2":
        assert config.fsdp_config["fsdp_version"] == 2
    if name == "multi_machine":
        assert config.num_machines == 2


@pytest.mark.parametrize(
    ("environment", "message"),
    [
        ({"ACCELERATE_USE_FSDP": "true"}, "FSDP, and there is no GPU: on a CPU it would silently run DDP"),
        (
            {"ACCELERATE_USE_DEEPSPEED": "true", "ACCELERATE_MIXED_PRECISION": "bf16"},
            "DeepSpeed was asked for bf16.*--mixed_precision no",
        ),
    ],
)
def test_launchers_that_ask_for_a_gpu(environment, message, monkeypatch):
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr("torch.accelerator.is_available", lambda: False)
    with pytest.raises(InputError, match=message):
        launching.check_launcher()
    monkeypatch.setattr("torch.accelerator.is_available", lambda: True)
    launching.check_launcher()


def test_the_slurm_script_is_valid():
    subprocess.run(["bash", "-n", str(RECIPES / "accelerate" / "slurm.sh")], check=True)


def test_make_run_is_known_to_the_recipe(tmp_path):
    """So that the command that resumes is `make run ARGS=…`; and accelerate adds no traceback to a wrong flag."""
    command = ["make", "--no-print-directory", "-n", "run", "ARGS=--seed 3"]
    said = subprocess.run(command, cwd=RECIPES.parent, capture_output=True, text=True, check=True).stdout
    assert "TRL_OTB_MAKE_RUN=1 " in said and " launch --quiet " in said and said.endswith("recipes/math.py --seed 3\n")


@pytest.mark.usefixtures("heard")
@pytest.mark.parametrize("signum", [signal.SIGINT])
def test_ctrl_c_in_the_first_and_in_the_last_evaluation(run, monkeypatch, tmp_path, signum):
    """Nothing was trained before the first; the model is saved before the last, and the line says how to go on."""
    original = recipe.accuracy_reward
    evaluations = []

    def interrupting(when):
        def make(problems):
            inner = original(problems)

            def accuracy(completions, **kwargs):
                if len(completions) == 40 and when(tmp_path):
                    os.kill(os.getpid(), signum)
                evaluations.append(len(completions))
                return inner(completions=completions, **kwargs)

            return accuracy

        return make

    monkeypatch.setattr(recipe, "accuracy_reward", interrupting(lambda folder: True))
    with pytest.raises(Stopped, match="Nothing was trained yet, so there is nothing to resume"):
        run(output="first")
    assert not list((tmp_path / "first").glob("*.safetensors"))

    saved = lambda folder: (folder / "last" / "model.safetensors").exists()  # noqa: E731
    monkeypatch.setattr(recipe, "accuracy_reward", interrupting(saved))
    again = "--resume_from_checkpoint latest"
    with pytest.raises(Stopped, match=f"(?s)Training was complete; its last evaluation was not.*{again}"):
        run(output="last")
    assert saved(tmp_path) and not (tmp_path / "last" / "result.json").exists()
    monkeypatch.setattr(recipe, "accuracy_reward", original)
    run(*again.split(), output="last")
    assert result_of(tmp_path / "last")["steps"] == 4


@pytest.mark.slow
def test_two_processes_share_the_work_and_one_warm_start(tmp_path):
    """
    From an empty cache and another folder: one process makes the policy while the other waits for it. There are twice
    the completions per step, and every held-out problem counts as often as with one process.
    """
    (tmp_path / "toys.py").write_text(
        "from recipes.toy.warm_start import policy\n\ndef short():\n    return policy('sums', 20)\n"
    )
    launch = [*ACCELERATE, "--num_machines", "1", "--multi_gpu", "--num_processes", "2", "--main_process_port", "0"]
    flags = (
        "--max_steps 2 --per_device_train_batch_size 12 --num_generations 8 --num_held_out_problems 13 "
        "--per_device_eval_batch_size 20 --gradient_accumulation_steps 2 --num_generations_eval 5"
    )
    done = subprocess.run(
        [*launch, recipe.__file__, "--model_name_or_path", "toys:short", *SMALL, *flags.split()],
        cwd=tmp_path, capture_output=True, text=True, timeout=300,
        env={**os.environ, "TRL_OTB_CACHE": str(tmp_path / "cache")},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.count("Held-out accuracy after") == 1
    assert "arning:" not in done.stderr
    folder = tmp_path / "runs" / "math" / "otb-seed42"
    result = result_of(folder)
    # 24 rows per process and step, in groups of 8: 48 completions
    lengths = sum(h["completions/mean_length"] * 48 for h in log_of(folder) if "completions/mean_length" in h)
    assert result["tokens_generated"] == pytest.approx(lengths)
    assert (result["after"]["samples"], result["after"]["problems"]) == (5, 13)
    assert json.loads((folder / "configuration.json").read_text())["processes"] == 2
    assert len([f for f in (tmp_path / "cache").iterdir() if f.is_dir()]) == 1


@pytest.mark.slow
def test_several_machines_equal_one(short_policy, tmp_path):
    """Two launchers of one process, as on two machines, give the weights of one launcher with two processes."""
    program = [recipe.__file__, "--model_name_or_path", str(short_policy), *SMALL, "--max_steps", "2"]
    of_several = [
        *ACCELERATE,
        "--config_file",
        str(RECIPES / "accelerate" / "multi_machine.yaml"),
        "--num_processes",
        "2",
    ]
    subprocess.run(
        [*of_several, "--num_machines", "1", "--main_process_port", "0", *program, "--output_dir", "one"],
        cwd=tmp_path, check=True, timeout=200,
    )  # fmt: skip
    machines = [
        subprocess.Popen(
            [*of_several, "--num_machines", "2", "--machine_rank", str(rank), "--main_process_port", "29619",
             *program, "--output_dir", "two"],
            cwd=tmp_path,
        )
        for rank in (0, 1)
    ]  # fmt: skip
    assert [machine.wait(timeout=200) for machine in machines] == [0, 0]
    one, two = ((tmp_path / name / "model.safetensors").read_bytes() for name in ("one", "two"))
    assert one == two


@pytest.mark.slow
@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM])
def test_ctrl_c_in_the_warm_start_is_one_line(tmp_path, signum):
    """Also for the process that trains the toy, which is ended with it."""
    environment = {**os.environ, "TRL_OTB_CACHE": str(tmp_path / "cache")}
    with open(tmp_path / "said", "w") as said:
        program = subprocess.Popen(
            [sys.executable, recipe.__file__], cwd=tmp_path, env=environment, stdout=said, stderr=said,
            start_new_session=True, preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
        )  # fmt: skip
        while "Warm-starting" not in (tmp_path / "said").read_text() and program.poll() is None:
            time.sleep(0.1)
        time.sleep(1)
        os.killpg(program.pid, signum)
        assert program.wait(timeout=60) == 130
    last = (tmp_path / "said").read_text().splitlines()[-1]
    assert last == "math.py: stopped. Nothing was trained."
    assert not [f for f in (tmp_path / "cache").iterdir() if f.is_dir()]
