"""The benchmarks: each part runs, and `make gpu` reports all of them."""

import re
import runpy
import sys
from pathlib import Path

import pytest

from recipes import benchmarks
from tests.recipes.conftest import started


GPU = Path(benchmarks.__file__).with_name("gpu.sh")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("script", "flags", "said"),
    [
        ("step", "--rounds 1 --steps 1 --length 8 --lora --baselines value --regimes stored", "one extra no-gradient"),
        ("advantages", "--repeats 1 --longest 512", "64 × 512"),
    ],
)
def test_benchmarks_run(script, flags, said, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", [script, *flags.split()])
    runpy.run_module(f"recipes.benchmarks.{script}", run_name="__main__")
    assert said in capsys.readouterr().out


# In the place of Python: the tests fail, the other parts print a number
STANDS_IN = """#!/bin/sh
case "$*" in
    "- "*) echo "A machine, torch 2" ;;
    *test_gpu.py) echo "so it goes"; exit 3 ;;
    *) echo 7 ;;
esac
"""


def test_failing_part_stops_no_other(tmp_path):
    python, page = tmp_path / "python", tmp_path / "gpu" / "report.md"
    python.write_text(STANDS_IN)
    python.chmod(0o755)
    environment = {"PYTHON": str(python), "FOLDER": str(tmp_path / "gpu")}
    done = started([GPU], tmp_path, **environment)
    assert done.returncode == 1 and done.stdout.endswith("Failed: tests.\n"), done.stderr
    assert re.search(r"please post \S+/gpu/report.md as it is, at https://github.com/\S+/issues/new\n", done.stdout)
    head, *sections = page.read_text().split("### ")
    assert head.startswith("# trl_otb on A machine, torch 2\n\nBy `make gpu`. ")
    assert str(Path.home()) not in page.read_text()
    failed, *others = sections
    assert failed.startswith("tests: failed with exit status 3") and "\nso it goes\n" in failed
    assert "A machine, torch 2" in failed and all("\n7\n```" in text for text in others)
    done = [f"{part}: done" for part in "step-lora step-full step-generated advantages main".split()]
    assert [text.split(", ")[0] for text in others] == done
    # A part that is run alone keeps what is known of the others
    assert started([GPU, "advantages"], tmp_path, **environment).returncode == 0
    assert page.read_text().split("### ")[1:4] == sections[:3]


def test_all_limits_sum_to_25_minutes():
    limits = re.findall(r"^part \S+ (\d+) ", GPU.read_text(), flags=re.MULTILINE)
    assert len(limits) == 6 and sum(map(int, limits)) <= 25
