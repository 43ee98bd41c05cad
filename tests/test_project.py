"""The project around the code: the notebook runs, a wheel works by itself, the README tells the truth."""

import ast
import copy
import importlib.util
import os
import re
import runpy
import shutil
import subprocess
import sys
import tomllib
import zipfile
from dataclasses import fields
from itertools import chain
from pathlib import Path

import nbformat
import pytest
import torch
import yaml
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.version import Version

from recipes.notebook import executed
from trl_otb import OTBGRPOConfig
from trl_otb.baselines import BASELINES, find_baseline
from trl_otb.run.metrics import STATISTICS, summarize


ROOT = Path(__file__).resolve().parent.parent
CONFIGS = sorted((ROOT / "recipes").glob("*.yaml"))
README, REFERENCE = ((ROOT / page).read_text() for page in ("README.md", "recipes/reference.md"))


NOTEBOOK = nbformat.read(ROOT / "recipes" / "quickstart.ipynb", as_version=4)


def texts(cell):
    """What a cell printed and returned, as text."""
    return [output.get("text") or output["data"]["text/plain"] for output in cell.outputs]


def results(cell):
    """Without what it printed, which arrives in one part or several."""
    return [output for output in cell.outputs if output.output_type != "stream"]


@pytest.mark.slow
def test_notebook_runs_to_stored_outputs(tmp_path):
    """As a new user's kernel would, which installs the package; in its folder, beside math.py."""
    notebook = copy.deepcopy(NOTEBOOK)
    shorter = {"max_steps=1200": "max_steps=150", "max_steps=60": "max_steps=10"}
    shorter["sums(10_000"] = "sums(2_000"
    shorter["num_prompts=24, group_sizes=[4, 8]"] = "num_prompts=3, completions_per_prompt=32, group_sizes=[4]"
    for cell in notebook.cells:
        for text, by in {'"runs/quickstart"': repr(str(tmp_path / "run")), **shorter}.items():
            cell["source"] = cell["source"].replace(text, by)
    installed = tmp_path / "site"
    notebook = executed(notebook, f"%pip install -q --no-deps --target {installed} {ROOT}", PYTHONPATH=str(installed))
    assert (tmp_path / "run").is_dir() and (installed / "trl_otb").is_dir()
    compared = 0
    for stored, cell in zip(NOTEBOOK.cells, notebook.cells, strict=True):
        if cell.cell_type == "code":
            assert [output for output in cell.outputs if output.get("name") == "stderr"] == []
            assert len(results(cell)) == len(results(stored))
            if "deterministic" in cell.metadata.get("tags", []):
                assert texts(cell) == texts(stored), cell["source"]
                compared += 1
    assert compared == 4


def test_notebook_is_stored_with_outputs():
    assert re.fullmatch(
        r'%pip install -q "trl_otb @ git\+https://github\.com/\w+/trl_otb" pandas matplotlib', NOTEBOOK.cells[1].source
    )
    cells = [cell for cell in NOTEBOOK.cells if cell.cell_type == "code"]
    assert [cell.execution_count for cell in cells] == list(range(1, len(cells) + 1))  # run once, top to bottom
    outputs = [output for cell in cells for output in cell.outputs]
    silent = [cell for cell in cells if not cell.source.endswith("print(report)")]
    streams = [output.text for cell in silent for output in cell.outputs if output.output_type == "stream"]
    lines = [line for text in streams for line in text.splitlines()]  # no warnings, no errors
    assert all(re.match(r"Training with baseline '\w+'|\w+ (?:removed|added) -?\d+ % of the", line) for line in lines)
    data = [output.get("data", {}) for output in outputs]
    assert sum("Prompt " in of.get("text/plain", "") and "background-color" in of["text/html"] for of in data) == 1
    assert sum("<iframe" in of.get("text/html", "") for of in data) == sum("image/svg+xml" in of for of in data) == 1
    assert (ROOT / "recipes" / "quickstart.ipynb").stat().st_size < 400_000


def test_notebook_needs_no_repository():
    source = "\n".join(cell["source"] for cell in NOTEBOOK.cells if cell.cell_type == "code")
    assert "sys" not in re.findall(r"\w+", source)
    imported = {name.partition(".")[0] for name in re.findall(r"^(?:from|import) ([\w.]+)", source, flags=re.MULTILINE)}
    assert imported - set(sys.stdlib_module_names) == {"datasets", "pandas", "torch", "transformers", "trl", "trl_otb"}


MINIMAL = (ROOT / "recipes" / "minimal.py").read_text()
SOONER = MINIMAL.replace("    logging_steps=50,", "    per_device_eval_batch_size=64,\n    logging_steps=50,")
WITH_PROGRESS = SOONER.replace("    # progress_funcs=", "    progress_funcs=")


def learned_by(said):
    """The share of answers that minimal.py got right after training."""
    before, after = map(float, re.search(r"all_right/mean: ([\d.]+) before, ([\d.]+) after", said).groups())
    assert before < 0.1
    return after


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(5))
def test_the_first_recipe_learns_with_every_seed(tmp_path, monkeypatch, capsys, seed):
    """As its docstring says, and with progress; with seed 0 alone, as a program, in `test_a_wheel_works_by_itself`."""
    program = SOONER if seed else WITH_PROGRESS
    assert MINIMAL != SOONER != WITH_PROGRESS and program.count("\nSEED = 0\n") == 1
    (tmp_path / "minimal.py").write_text(program.replace("\nSEED = 0\n", f"\nSEED = {seed}\n"))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["minimal.py"])
    runpy.run_path("minimal.py", run_name="__main__")
    assert learned_by(capsys.readouterr().out) > 0.9


@pytest.mark.slow
def test_a_wheel_works_by_itself(tmp_path):
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--quiet"]
    subprocess.run([*pip, "wheel", "--no-deps", "--wheel-dir", str(tmp_path), str(ROOT)], check=True)
    (wheel,) = tmp_path.glob("trl_otb-*.whl")
    names = zipfile.ZipFile(wheel).namelist()
    data = {f"trl_otb/display/page.{kind}" for kind in ("html", "css", "js")}
    assert data | {"trl_otb/py.typed", "trl_otb/seam/trl_sources.json"} <= {*names}
    assert any(name.endswith("licenses/LICENSE") for name in names)
    assert not any(name.startswith(("tests", "recipes")) for name in names)
    (metadata,) = (name for name in names if name.endswith("METADATA"))
    page = zipfile.ZipFile(wheel).read(metadata).decode()  # on an index, which has no files beside it
    links = re.findall(r"\]\(([^)]*)\)", page)
    assert len(links) == len(re.findall(r"\]\([^)]*\)", README)) and all(link.startswith("https://") for link in links)
    assert "](https://github.com/OWNER/trl_otb/raw/main/recipes/group.png)" in page
    subprocess.run([*pip, "install", "--no-deps", "--target", str(tmp_path / "site"), str(wheel)], check=True)

    # A stranger's script in an empty folder: the model learns to write digits or vowels; show, compare
    script = SOONER
    script += """
import trl_otb
print(trl_otb.__file__)
trainer.rollouts["train"].show(prompt=0)
trainer.rollouts["train"].page("group.html")
print(trl_otb.compare_baselines(trainer, num_prompts=3, completions_per_prompt=32))
"""
    (tmp_path / "empty").mkdir()
    (tmp_path / "empty" / "stranger.py").write_text(script)
    environment = {**os.environ, "PYTHONPATH": str(tmp_path / "site"), "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(
        [sys.executable, "stranger.py"], cwd=tmp_path / "empty", env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert str(tmp_path / "site") in done.stdout
    assert learned_by(done.stdout) > 0.9
    assert len(re.findall(r"^\['Write (?:digits|vowels):'", done.stdout, flags=re.MULTILINE)) == 3
    assert (tmp_path / "empty" / "minimal" / "model.safetensors").is_file()
    assert "more prompts, % (95 %)" in done.stdout and "\ngroup_mean " in done.stdout
    assert "Write " in done.stdout and (tmp_path / "empty" / "group.html").stat().st_size > 10_000


@pytest.mark.skipif(not (ROOT / ".git").exists() or not shutil.which("git"), reason="needs a checkout and git")
def test_make_owner_reaches_every_place():
    named = re.search(r"\nowner:.*\n\tsed .*?' (.*)", (ROOT / "Makefile").read_text()).group(1)
    grep = ["git", "grep", "-l", "[O]WNER/trl_otb", "--", ":!tests", ":!Makefile"]
    assert sorted(named.split()) == sorted(subprocess.check_output(grep, cwd=ROOT, text=True).split())


@pytest.mark.skipif(not (ROOT / ".git").exists() or not shutil.which("git"), reason="needs a checkout and git")
def test_nothing_lies_beside_the_project():
    """What a tool left in the root is easily committed."""
    tracked = subprocess.run(["git", "ls-files"], cwd=ROOT, check=True, capture_output=True, text=True).stdout.split()
    shown = {path.partition("/")[0] for path in tracked if not path.startswith(".")}
    files = {"AGENTS.md", "LICENSE", "Makefile", "README.md", "pyproject.toml"}
    assert shown == {"recipes", "tests", "trl_otb"} | files


VALUE_METRICS = ("explained", "explained_by_state", "weight", "luck_weight", "kept", "restarted")
VALUE_METRICS += ("luck_mean", "luck_left_out", "r2_at_end", "slope_at_start")


def test_exactly_logged_metrics_are_explained():
    logged = {f"otb/{name}" for name in summarize(torch.zeros(2, len(STATISTICS)), 2)}
    logged |= {f"otb/value/{name}" for name in VALUE_METRICS} | {"otb/progress/time_share"}
    assert set(re.findall(r"^\| `(otb/[\w/]+)`", REFERENCE, flags=re.MULTILINE)) == logged


def table(heading):
    """The rows of the reference's table under a heading, cell by cell."""
    section = REFERENCE.split(f"## {heading}\n")[1].split("\n## ")[0]
    rows = [line for line in section.splitlines() if line.startswith("|")][2:]
    return [[cell.strip() for cell in re.split(r"(?<!\\)\|", row.strip("|"))] for row in rows]


def test_listed_baselines_match_registry():
    assert [row[:2] for row in table("Baselines")] == [
        [f'`"{entry.name}"`', entry.summary] for entry in BASELINES.values()
    ]


def test_options_and_configurations_are_named():
    own = {f.name for f in fields(OTBGRPOConfig)} - {f.name for f in fields(OTBGRPOConfig.__base__)}
    assert own | {"scale_rewards"} == {row[0].strip("`") for row in table("Options")}
    pages = "".join((ROOT / "recipes" / page).read_text() for page in ("README.md", "GPU.md"))
    assert [path.name for path in CONFIGS if path.name not in pages] == []


@pytest.mark.parametrize(
    "page", ["README.md", *(str(path.relative_to(ROOT)) for path in sorted((ROOT / "recipes").rglob("*.md")))]
)
def test_page_references_exist(page):
    text, folder = (ROOT / page).read_text(), (ROOT / page).parent
    links = re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", text)
    assert [link for link in links if not (folder / link).exists()] == []
    paragraphs = re.split(r"\n(?:\n|(?=- ))", text)
    text = "\n".join(p for p in paragraphs if not re.search(r"(commit|git show) \w{7}", p))  # not what once was
    modules = re.findall(r"python -m ((?:recipes|tests)[\w.]*)", text)
    assert [m for m in modules if importlib.util.find_spec(m) is None] == []
    scripts = re.findall(r"\b((?:recipes|tests)/[\w/]+\.(?:py|yaml|ipynb))", text)
    assert [script for script in scripts if not (ROOT / script).exists()] == []


def test_the_python_examples_of_the_readme(registry):
    (trainer,) = re.findall(r"```python\n(.*?)```", README, flags=re.DOTALL)
    reward, progress, baseline, merged = re.findall(r"```python\n(.*?)```", REFERENCE, flags=re.DOTALL)
    names = {"__name__": "page"}
    exec(merged, names)
    args = names["Config"](output_dir="unused", use_cpu=True, bf16=False)
    assert (args.baseline, args.epsilon, args.scale_rewards) == ("ogb", 0.4, "none")
    exec(baseline.split("args =")[0], names)
    compile(baseline, "reference.md", "exec")
    assert find_baseline("newest").estimator is names["newest"]
    compile(trainer, "README.md", "exec")
    compile(progress, "reference.md", "exec")
    exec(progress.split("trainer =")[0], names)
    assert names["sentences"]([[{"role": "assistant", "content": "One. Two. Thr"}]]) == [2.0]
    exec(reward, names)
    call = {"role": "assistant", "content": "", "tool_calls": [{}]}
    conversation = [call, {"role": "tool", "content": "5"}, call, {"role": "tool", "content": "6"}]
    answer = {"role": "assistant", "content": "6"}
    assert names["progress"]([[answer], [*conversation, answer], conversation]) == [[0.0], [0.1, 0.1, 0.0], [0.1, 0.1]]


def test_uninstalled_checkout_can_be_imported(tmp_path):
    """
    Nothing but the package's folder and pyproject.toml, in an interpreter that finds no installation. The maths loads
    neither TRL nor transformers.
    """
    shutil.copytree(ROOT / "trl_otb", tmp_path / "trl_otb")
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    code = (
        "import importlib.metadata, sys; version, importlib.metadata.version = importlib.metadata.version, None;"
        "sys.path.insert(0, sys.argv[1]); import trl_otb; print(trl_otb.__file__, trl_otb.__version__);"
        "importlib.metadata.version = version; print(trl_otb.energy.token_energy.__name__, "
        "len(trl_otb.baselines.BASELINES) > 5, {'trl', 'transformers'} & set(sys.modules))"
    )
    command = [sys.executable, "-I", "-c", code, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    file, version, *maths = done.stdout.split()
    assert file.startswith(str(tmp_path)) and version[0].isdecimal() and maths == ["token_energy", "True", "set()"]


def test_tested_versions_are_in_promised_ranges():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    pinned = dict(
        re.findall(r"^([\w.-]+)==(\S+)$", (ROOT / "tests" / "constraints.txt").read_text(), flags=re.MULTILINE)
    )
    pinned = {name.lower().replace("_", "-"): version for name, version in pinned.items()}
    tested = [project["optional-dependencies"][name] for name in "recipes studies deepspeed test quality".split()]
    for text in chain(project["dependencies"], *tested):
        requirement = Requirement(text)
        if requirement.name != "trl-otb":
            assert Version(pinned[requirement.name]) in requirement.specifier, text


def test_what_the_package_imports_is_declared():
    imported = set()
    for file in (ROOT / "trl_otb").rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            names += [node.module] if isinstance(node, ast.ImportFrom) and node.level == 0 else []
            imported |= {name.partition(".")[0] for name in names}
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    declared = {re.split(r"[^\w-]", name)[0].replace("-", "_") for name in project["dependencies"]}
    imported = {"pyyaml" if name == "yaml" else name for name in imported}
    of_hosts = {"axolotl", "pydantic", "swift", "triton"}
    assert imported - {*sys.stdlib_module_names, *of_hosts, "trl_otb"} == declared


def test_workflow_runs_lint_tests_drift():
    text = (ROOT / ".github" / "workflows" / "ci.yml").read_text()
    makefile = (ROOT / "Makefile").read_text()
    targets = set(re.findall(r"^(\w+):", makefile, flags=re.MULTILINE))
    assert {"lint", "test", "oldest", "drift"} == set(re.findall(r"run: make (\w+)", text)) <= targets
    workflow = yaml.safe_load(text)
    jobs, events = workflow["jobs"], workflow[True]  # `on`, which is a boolean in YAML 1.1
    assert {"push", "pull_request", "schedule"} <= events.keys() and "schedule" in jobs["drift"]["if"]
    supported = SpecifierSet(tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["requires-python"])
    versions = [str(supported).strip(">="), *jobs["test"]["strategy"]["matrix"]["python"]]
    steps = [step for job in jobs.values() for step in job["steps"]]
    versions += [step["with"]["python-version"] for step in steps if "with" in step]
    assert all(version in supported for version in versions if "matrix" not in version)


def test_the_project_is_cloned_from_its_repository():
    """A placeholder until it is published: the same in the README, the package and `make gpu`."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    url = project["urls"]["Repository"]
    assert re.findall(r"git clone (\S+)", README) == [url]
    assert "Repository = " in (ROOT / "recipes" / "benchmarks" / "gpu.sh").read_text()
