"""The project around the code: the notebook runs, a wheel works by itself, the README tells the truth."""

import re
import subprocess
import sys
import tomllib
import zipfile
from dataclasses import fields
from pathlib import Path

import nbclient
import nbformat
import pytest
import torch
from packaging.requirements import Requirement
from packaging.version import Version

from tests.recipes.test_arguments import CONFIGS
from trl_otb import OTBGRPOConfig, trl_seam
from trl_otb.metrics import STATISTICS, summarize


ROOT = Path(__file__).resolve().parent.parent
README = (ROOT / "README.md").read_text()


@pytest.mark.slow
def test_the_notebook_runs(tmp_path):
    notebook = nbformat.read(ROOT / "recipes" / "quickstart.ipynb", as_version=4)
    # In its own folder, beside math.py, where `import math` could go wrong; what it writes goes elsewhere
    for cell in notebook.cells:
        cell["source"] = cell["source"].replace('"runs/quickstart"', repr(str(tmp_path)))
    resources = {"metadata": {"path": str(ROOT / "recipes")}}
    nbclient.NotebookClient(notebook, timeout=300, kernel_name="python3", resources=resources).execute()
    pictures = [o for c in notebook.cells for o in c.get("outputs", []) if "image/png" in o.get("data", {})]
    assert len(pictures) == 2
    assert str(tmp_path) in str([c["source"] for c in notebook.cells])


@pytest.mark.slow
def test_a_wheel_works_by_itself(tmp_path):
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--quiet"]
    subprocess.run([*pip, "wheel", "--no-deps", "--wheel-dir", str(tmp_path), str(ROOT)], check=True)
    (wheel,) = tmp_path.glob("trl_otb-*.whl")
    names = zipfile.ZipFile(wheel).namelist()
    assert "trl_otb/py.typed" in names and any(name.endswith("licenses/LICENSE") for name in names)
    assert not any(name.startswith(("tests", "recipes")) for name in names)
    subprocess.run([*pip, "install", "--no-deps", "--target", str(tmp_path / "site"), str(wheel)], check=True)
    code = "import trl_otb; print(trl_otb.__file__); trl_otb.OTBGRPOTrainer, trl_otb.OTBGRPOConfig"
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={"PYTHONPATH": str(tmp_path / "site")},
        cwd=tmp_path,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert str(tmp_path / "site") in done.stdout


def test_the_readme_explains_every_metric_and_no_other():
    logged = {f"otb/{name}" for name in summarize(torch.zeros(2, len(STATISTICS)), 2)}
    assert set(re.findall(r"^\| `(otb/[\w/]+)`", README, flags=re.MULTILINE)) == logged


def test_the_readme_names_every_option_and_every_configuration():
    own = {f.name for f in fields(OTBGRPOConfig)} - {f.name for f in fields(OTBGRPOConfig.__base__)}
    for name in [*own, *(path.name for path in CONFIGS)]:
        assert f"`{name}`" in README or f"recipes/{name}" in README, name


def test_the_file_tree_of_the_readme_exists():
    tree = README.split("## Files")[1]
    paths = re.findall(r"^([\w./]+)\s{2,}", tree.split("```")[1], flags=re.MULTILINE)
    assert len(paths) > 10
    assert [path for path in paths if not (ROOT / path).exists()] == []


def test_the_python_examples_of_the_readme():
    trainer, reward = re.findall(r"```python\n(.*?)```", README, flags=re.DOTALL)
    compile(trainer, "README.md", "exec")
    assert len(trainer.strip().splitlines()) <= 12
    names = {}
    exec(reward, names)
    call = {"role": "assistant", "content": "", "tool_calls": [{}]}
    conversation = [call, {"role": "tool", "content": "5"}, call, {"role": "tool", "content": "6"}]
    answer = {"role": "assistant", "content": "6"}
    assert names["progress"]([[answer], [*conversation, answer], conversation]) == [[0.0], [0.1, 0.1, 0.0], [0.1, 0.1]]


def test_the_tested_versions_lie_in_the_promised_ranges():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    pinned = dict(re.findall(r"^([\w.-]+)==(\S+)$", (ROOT / "constraints.txt").read_text(), flags=re.MULTILINE))
    pinned = {name.lower().replace("_", "-"): version for name, version in pinned.items()}
    extras = project["optional-dependencies"]
    for text in [
        *project["dependencies"],
        *extras["recipes"],
        *extras["deepspeed"],
        *extras["test"],
        *extras["quality"],
    ]:
        requirement = Requirement(text)
        if requirement.name != "trl-otb":
            assert Version(pinned[requirement.name]) in requirement.specifier, text
    trl = next(Requirement(text) for text in project["dependencies"] if text.startswith("trl"))
    assert trl.specifier == Requirement(trl_seam.WORKING_VERSIONS).specifier
