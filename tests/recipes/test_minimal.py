"""recipes/minimal.py: what a user copies first, away from the checkout."""

import ast
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import trl_otb


PROGRAM = Path(__file__).parents[2] / "recipes" / "minimal.py"


def test_it_is_short_and_needs_nothing_else():
    written = PROGRAM.read_text()
    assert len(written.splitlines()) <= 80
    imports = [node for node in ast.walk(ast.parse(written)) if isinstance(node, ast.Import | ast.ImportFrom)]
    names = {alias.name for node in imports if isinstance(node, ast.Import) for alias in node.names}
    names |= {node.module.partition(".")[0] for node in imports if isinstance(node, ast.ImportFrom)}
    assert names - set(sys.stdlib_module_names) <= {"trl", "trl_otb", "datasets", "transformers"}


@pytest.mark.slow
def test_it_runs_in_any_folder(tmp_path):
    """With the package alone on Python's path; the model learns to write numbers."""
    (tmp_path / "site").mkdir()
    (tmp_path / "site" / "trl_otb").symlink_to(Path(trl_otb.__file__).parent)
    folder = tmp_path / "empty"
    folder.mkdir()
    shutil.copy(PROGRAM, folder)
    environment = {**os.environ, "PYTHONPATH": str(tmp_path / "site"), "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(
        [sys.executable, "minimal.py"], cwd=folder, env=environment, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    before, after = map(float, re.search(r"is_number/mean: ([\d.]+) before, ([\d.]+) after", done.stdout).groups())
    assert before < 0.2 and after > 0.6
    assert len(re.findall(r"^\['What is \d \+ \d\?", done.stdout, flags=re.MULTILINE)) == 3
    assert (folder / "minimal" / "model.safetensors").is_file()
