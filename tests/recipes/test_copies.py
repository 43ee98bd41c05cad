"""Copies of a recipe: another name, another folder of the checkout, data of one's own."""

import json
import re
import shutil
import subprocess
import sys
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path

import pytest
from datasets import Dataset

from recipes import math as recipe
from recipes.common.errors import InputError
from recipes.common.problems import Problems
from tests.recipes.conftest import SMALL, result_of


CHECKOUT = Path(recipe.__file__).parents[1]
OWN_DATA = """
def load_data(settings, seed):
    from datasets import Dataset

    rows = [{"question": f"{i % 9} + {i // 9}", "answer": i % 9 + i // 9} for i in range(60)]
    return Problems(Dataset.from_list(rows[10:]), Dataset.from_list(rows[:10]), name="sums of mine")


def accuracy_reward("""


@pytest.fixture
def copy(tmp_path):
    """A checkout with a copy of math.py two folders down that has data of its own, whose answers are integers."""
    checkout = tmp_path / "checkout"
    shutil.copytree(CHECKOUT / "recipes", checkout / "recipes", ignore=shutil.ignore_patterns("studies", "*.ipynb"))
    (checkout / "trl_otb").symlink_to(CHECKOUT / "trl_otb")
    file = checkout / "experiments" / "november" / "my_sums.py"
    file.parent.mkdir(parents=True)
    written = Path(recipe.__file__).read_text()
    file.write_text(written.replace("\ndef accuracy_reward(", OWN_DATA, 1))
    return file


@pytest.mark.slow
def test_a_copy_in_another_folder_tells_the_truth(copy, short_policy, tmp_path):
    """Started from elsewhere, with nothing of the checkout on Python's path: its name, its data's name, its folder."""
    program = [sys.executable, str(copy), "--model_name_or_path", str(short_policy), *SMALL, "--max_steps", "1"]
    done = subprocess.run(program, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("my_sums.py: defaults from ")
    assert "\nsums of mine: 50 problems to train on, 10 held out.\n" in done.stdout
    assert re.search(r"\n  0 \+ 0 \[0\] before: '", done.stdout) and "chain_sum" not in done.stdout
    assert "math.py" not in done.stdout and "\nruns/my_sums/otb-seed42: the model" in done.stdout
    assert result_of(tmp_path / "runs" / "my_sums" / "otb-seed42")["after"]["problems"] == 10
    again = subprocess.run(program, cwd=tmp_path, capture_output=True, text=True)
    assert again.returncode == 2 and again.stderr.startswith("my_sums.py: error: runs/my_sums/otb-seed42 holds")
    usage = subprocess.run([*program, "--help"], cwd=tmp_path, capture_output=True, text=True).stdout
    assert "usage: my_sums.py [--config" in usage and "math.py" not in usage


def imported(file):
    spec = spec_from_file_location(file.stem, file)
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_a_copy_reads_the_yaml_beside_it(run, tmp_path, capsys):
    file = tmp_path / "mine.py"
    file.write_text(Path(recipe.__file__).read_text().replace('CONFIG = "math_cpu.yaml"', 'CONFIG = "mine.yaml"'))
    settings = (CHECKOUT / "recipes" / "math_cpu.yaml").read_text()
    (tmp_path / "mine.yaml").write_text(settings.replace("learning_rate: 4.0e-4", "learning_rate: 7.0e-4"))
    folder = run("--max_steps", "1", main=imported(file).main)
    assert capsys.readouterr().out.startswith("mine.py: defaults from mine.yaml, ")
    assert json.loads((folder / "configuration.json").read_text())["trainer"]["learning_rate"] == 7e-4


def test_numbers_are_taken_as_text():
    rows = [{"question": 12, "answer": 12}, {"question": 13, "answer": 13}]
    problems = Problems(Dataset.from_list(rows[:1]), Dataset.from_list(rows[1:]))
    assert problems.held_out[0] == {"question": "13", "answer": "13"}
    assert problems.grade("13.0", problems.held_out[0]["answer"], None) == 1.0


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([{"question": "1+1", "solution": "2"}], "mine has no column 'answer', only question, solution"),
        (
            [{"question": "1+1", "answer": 2}, {"question": "1+2", "answer": None}],
            "row 1 of mine: 'answer' holds nothing",
        ),
        ([{"question": "1+1", "answer": [2]}], "row 0 of mine: 'answer' holds a list"),
    ],
)
def test_data_of_ones_own_that_cannot_be_used(rows, message):
    with pytest.raises(InputError, match=message):
        Problems(Dataset.from_list(rows), Dataset.from_list(rows), name="mine")
