"""`make gpu`: parts run one after another, failing ones too, into one report."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import recipes.benchmarks


SCRIPT = Path(recipes.benchmarks.__file__).with_name("gpu.sh")
# In the place of Python: the tests fail, the other parts print a number
STANDS_IN = """#!/bin/sh
case "$*" in
    "- "*) echo "A machine, torch 2" ;;
    *test_gpu.py) echo "so it goes"; exit 3 ;;
    *) echo 7 ;;
esac
"""


@pytest.fixture
def gpu(tmp_path):
    def run(*parts, **environment):
        environment = {**os.environ, "PYTHON": sys.executable, "FOLDER": str(tmp_path / "gpu"), **environment}
        return subprocess.run([SCRIPT, *parts], env=environment, capture_output=True, text=True)

    return run


def test_a_failing_part_does_not_stop_the_others(gpu, tmp_path):
    python, page = tmp_path / "python", tmp_path / "gpu" / "report.md"
    python.write_text(STANDS_IN)
    python.chmod(0o755)
    done = gpu(PYTHON=str(python))
    assert done.returncode == 1 and done.stdout.endswith("Failed: tests.\n"), done.stderr
    sections = page.read_text().split("### ")[1:]
    failed, *others = sections
    assert failed.startswith("tests: failed with exit status 3") and "\nso it goes\n" in failed
    assert "A machine, torch 2" in failed and all("\n7\n```" in text for text in others)
    done = [f"{part}: done" for part in "step-lora step-full advantages meter main".split()]
    assert [text.split(", ")[0] for text in others] == done
    # A part that is run alone keeps what is known of the others
    assert gpu("meter", PYTHON=str(python)).returncode == 0
    assert page.read_text().split("### ")[1:4] == sections[:3]


def test_the_limits_of_all_parts_are_25_minutes():
    limits = re.findall(r"^part \S+ (\d+) ", SCRIPT.read_text(), flags=re.MULTILINE)
    assert len(limits) == 6 and sum(map(int, limits)) <= 25


@pytest.mark.slow
def test_a_part_from_end_to_end(gpu, tmp_path):
    done = gpu("advantages", SMALL="1")
    assert done.returncode == 0, done.stdout
    assert "\n1024 × 2048 " in (tmp_path / "gpu" / "report.md").read_text()
