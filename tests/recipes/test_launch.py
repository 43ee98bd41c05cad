"""The recipes as programs: copied away, launched in several processes, compared."""

import itertools
import json
import math
import shutil
import subprocess
import sys
from pathlib import Path

import numpy
import pytest
from accelerate.commands.config.config_args import load_config_from_file

import trl_otb
from recipes import compare
from recipes import math as recipe
from tests.recipes.conftest import RECIPES, SMALL, accuracies, shortly_trained, started


ACCELERATE = [str(Path(sys.executable).with_name("accelerate")), "launch", "--mixed_precision", "no"]
ACCELERATE += ["--dynamo_backend", "no"]


@pytest.mark.slow
def test_accelerate_starts_two_processes(short_policy, tmp_path):
    launch = [*ACCELERATE, "--num_machines", "1", "--multi_gpu", "--num_processes", "2", "--main_process_port", "0"]
    flags = f"--max_steps 1 --model_name_or_path {short_policy} --output_dir run".split()
    done = started([*launch, recipe.__file__, *SMALL, *flags], tmp_path)
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.count("Held-out accuracy: ") == 1 and (tmp_path / "run" / "model.safetensors").is_file()


@pytest.mark.slow
def test_copy_runs_in_empty_folder(data_file, tmp_path):
    """
    By `accelerate launch`, with common.py, where the package is installed and nothing else; it reads the YAML file of
    its own folder.
    """
    site, folder = tmp_path / "site", tmp_path / "empty"
    site.mkdir()
    folder.mkdir()
    (site / "trl_otb").symlink_to(Path(trl_otb.__file__).parent)
    (folder / "tool_math_cpu.yaml").write_text("seed: 7\n")
    shutil.copy(RECIPES / "common.py", folder)
    launch = [*ACCELERATE, "--num_processes", "1", "--num_machines", "1"]
    program = [*launch, shutil.copy(RECIPES / "tool_math.py", folder), *SMALL, "--max_steps", "1"]
    rows = [{"question": f"{10 + i}+{i}", "answer": 10 + 2 * i} for i in range(40)]
    flags = ["--dataset_name", data_file(rows), "--instruction=", "--max_completion_length", "24"]
    flags += ["--model_name_or_path", shortly_trained("calculator", 20, tmp_path / "policy")]
    done = started([*program, *flags], folder, site)
    assert done.returncode == 0, done.stderr
    assert "after (8 problems)" in done.stdout
    assert list(accuracies(folder / "runs" / "tool_math" / "value-seed7")) == [0, 1]


@pytest.mark.slow
def test_the_main_job_learns(tmp_path):
    """A quarter of `accelerate launch recipes/math.py`: accuracy rises by at least 10 points.

    With two seeds it rose by 14 and 19 points; after half of these steps by 10 to 16.
    """
    recipe.main("--output_dir run --seed 1 --max_steps 200 --eval_strategy no --disable_tqdm true".split())
    before, after = accuracies(tmp_path / "run").values()
    assert after - before >= 0.1


@pytest.mark.parametrize("path", sorted((RECIPES / "accelerate").glob("*.yaml")), ids=lambda path: path.stem)
def test_accelerate_takes_its_configurations(path):
    config, kind = load_config_from_file(str(path)), path.stem.partition("_")[0].rstrip("123")
    kinds = {"cpu": "NO", "single": "NO", "multi": "MULTI_GPU", "zero": "DEEPSPEED", "fsdp": "FSDP"}
    assert config.distributed_type == kinds[kind]
    assert kind != "zero" or config.deepspeed_config["zero_stage"] == int(path.stem[-1])


def test_slurm_and_make_pass_flags_on():
    subprocess.run(["bash", "-n", str(RECIPES / "accelerate" / "slurm.sh")], check=True)
    command = ["make", "--no-print-directory", "-n", "run", "ARGS=--seed 3"]
    done = subprocess.run(command, cwd=RECIPES.parent, capture_output=True, text=True, check=True)
    assert " launch --quiet " in done.stdout and done.stdout.endswith("recipes/math.py --seed 3\n")


def test_finished_runs_become_table_and_picture(tmp_path, capsys):
    """Gains of 10 points, and of 20 under `group_mean`. Only what is missing is run."""
    folder = tmp_path / "runs" / "compare" / "math"
    for name, seed in itertools.product(("otb", "group_mean"), (1, 2)):
        gain = {"otb": 0.1, "group_mean": 0.2}[name]
        log = [{"step": step, "eval_rewards/accuracy/mean": seed / 10 + gain * step / 4} for step in (0, 4)]
        rewards = {"otb": (0.1, 0.2, 0.3, 0.4), "group_mean": (0.1, 0.3, 0.5, 0.5)}[name]
        log += [{"step": i, "reward": of, "num_tokens": 100.0 * i} for i, of in enumerate(rewards, start=1)]
        (folder / f"{name}-seed{seed}").mkdir(parents=True)
        (folder / f"{name}-seed{seed}" / "trainer_state.json").write_text(json.dumps({"log_history": log}))
    flags = ["--baselines", "otb", "group_mean", "--launcher", "false", "--max_steps", "4", "--seeds", "1", "2"]
    compare.main(flags)
    text = (folder / "compare.md").read_text()
    # Of 10 and 20 the mean is 15, the standard error 5, and t is 12.706 with one degree of freedom
    assert "| otb | 2 | 15.0 ± 63.5 | 25.0 ± 63.5 | 10.0 ± 0.0 |  |" in text
    assert "| group_mean | 2 | 15.0 ± 63.5 | 35.0 ± 63.5 | 20.0 ± 0.0 | 10.0 ± 0.0 |" in text
    # The reward .25 after 250 tokens, or 175; .325 after 325, or 212.5; .385 after 385, or 242.5
    assert "| group_mean | −30 (−30 to −30) | −35 (−35 to −35) | −37 (−37 to −37) | 2, 2, 2 of 2 |" in text
    assert (folder / "compare.png").stat().st_size > 10_000
    with pytest.raises(SystemExit):
        compare.main([*flags, "--learning_rate", "1"])
    assert "has runs with the flags '--max_steps 4'" in capsys.readouterr().err
    with pytest.raises(SystemExit, match="otb with seed 3 ended with exit code 1"):
        compare.main([*flags, "3"])


def test_tokens_saved_count_what_is_never_reached():
    """The other arm needs half as many tokens in one pair; in the other it ends below the levels, or falls short."""
    tokens = numpy.arange(1.0, 11.0)
    slow, fast, flat = (tokens, tokens / 10), (tokens, numpy.minimum(tokens / 5, 1)), (tokens, tokens / 40)
    changes, sooner = compare.tokens_saved([slow], [fast])
    assert sooner == [1, 1, 1] and [of for (of,) in changes] == pytest.approx([-0.5] * 3)
    changes, sooner = compare.tokens_saved([slow, slow], [fast, flat])
    assert sooner == [1, 1, 1]
    # The mean of both is .225 per token up to 5 tokens, where it is .5625, and ends at .625: never at .775 and .955
    (half, low, high), later, last = changes
    assert half == pytest.approx(0.55 / 0.1125 / 5.5 - 1) and low == pytest.approx(-0.5) and math.isinf(high)
    assert all(math.isinf(value) and low == pytest.approx(-0.5) for value, low, _ in (later, last))
    assert compare.per_cent(later) == "never (−50 to never)" and compare.per_cent([0.123]) == "+12"
    # Runs of unequal length are compared as far as both go; moving means over a tenth
    assert compare.stacked([slow, tuple(part[:4] for part in fast)]).shape == (2, 2, 4)
    smooth = compare.smoothed(range(20), [0.0, 1.0] * 10)
    assert smooth[0].tolist() == [i + 0.5 for i in range(19)] and smooth[1].tolist() == [0.5] * 19
