"""What the tests of the recipes share: a policy after a short warm start, small runs in this process, data files."""

import json
import os
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest
from datasets import Dataset

from recipes import math as recipe
from recipes.toy import warm_start


RECIPES = Path(recipe.__file__).parent
SMALL = (
    "--max_steps 4 --per_device_train_batch_size 16 --num_held_out_problems 20 --per_device_eval_batch_size 40 "
    "--num_train_problems 200 --logging_steps 1 --eval_strategy no --disable_tqdm true"
).split()


@pytest.fixture(scope="session")
def short_policy(tmp_path_factory):
    """The folder of a toy policy after a short warm start: it writes sums, mostly wrong ones."""
    return shortly_trained("sums", 150, tmp_path_factory.mktemp("policy") / "sums")


def shortly_trained(kind, steps, folder):
    """As `recipes.toy.warm_start.policy`, but in this process, which has imported what takes longest."""
    warm_start.train(replace(warm_start.WARM_STARTS[kind], steps=steps), folder)
    return folder


@pytest.fixture(autouse=True)
def elsewhere(tmp_path, tmp_path_factory, monkeypatch):
    """Every test runs in a folder and with caches of its own; modules in the folder can be imported."""
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path_factory.mktemp("datasets")))
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)


@pytest.fixture
def run(short_policy, tmp_path):
    """Runs recipes/math.py in this process, small, and returns the output folder."""

    def start(*flags, output="run"):
        folder = tmp_path / output
        recipe.main(["--model_name_or_path", str(short_policy), *SMALL, "--output_dir", str(folder), *flags])
        return folder

    return start


@pytest.fixture
def data_file(tmp_path):
    """Writes rows into a file of the given kind and returns its path."""

    def write(rows, suffix=".jsonl"):
        path = tmp_path / f"problems{suffix}"
        data = Dataset.from_list(rows)
        {".jsonl": data.to_json, ".json": data.to_json, ".parquet": data.to_parquet, ".csv": data.to_csv}[suffix](path)
        return str(path)

    return write


def started(command, folder, path=RECIPES.parent, **environment):
    """Run to its end in `folder`, with `path` alone on Python's path."""
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "PYTHONPATH": str(path), **environment}
    return subprocess.run(list(map(str, command)), cwd=folder, env=environment, capture_output=True, text=True)


def question_and_answer(rows=10):
    return [{"question": f"What is {i} + {i}?", "answer": f"Twice {i}. #### {2 * i}"} for i in range(rows)]


def log_of(folder):
    return json.loads((folder / "trainer_state.json").read_text())["log_history"]


def accuracies(folder):
    """The held-out accuracy by step."""
    return {entry["step"]: entry[recipe.ACCURACY] for entry in log_of(folder) if recipe.ACCURACY in entry}
