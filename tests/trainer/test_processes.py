"""Two processes equal one, whatever shards the model between them."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from filelock import FileLock
from safetensors.torch import load_file

from tests.helpers.processes import AGENT_BACKENDS, ASYNC_BACKENDS, CASES, SAMPLED


pytestmark = pytest.mark.slow
ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    """The folder of all cases, run once for all workers of pytest-xdist."""
    base = tmp_path_factory.getbasetemp()
    folder = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "processes"
    with FileLock(f"{folder}.lock"):
        if not (folder / "done").exists():
            command = [sys.executable, "-m", "tests.helpers.processes", str(folder)]
            subprocess.run(command, cwd=ROOT, check=True)
            (folder / "done").touch()
    return folder


def one_and_two(results, single, name):
    """What one process alone saw, and each of two."""
    found = []
    for case, rank in ((single, 0), (name, 0), (name, 1)):
        path = results / f"{case}.{rank}.pt"
        assert path.exists(), path.with_suffix(".log").read_text()[-3000:]
        found.append(torch.load(path, weights_only=False))
    assert [x["processes"] for x in found] == [1, 2, 2]
    return found[0], found[1:]


def assert_same_advantages(one, two, key="advantages", atol=1e-6):
    both = [torch.nn.functional.pad(x[key], (0, one[key].size(1) - x[key].size(1))) for x in two]
    torch.testing.assert_close(torch.cat(both), one[key], atol=atol, rtol=0)
    assert one[key].abs().max() > 0.05


def assert_same_models(results, single, name, atol=1e-6, rtol=1e-5):
    def saved(name):
        (file,) = (results / name / "saved").glob("*model.safetensors")
        return load_file(file)

    of_one, of_two = saved(single), saved(name)
    assert of_one.keys() == of_two.keys()
    for key in of_one:
        torch.testing.assert_close(of_two[key], of_one[key], atol=atol, rtol=rtol, msg=key)


def assert_same_sums(one, other, most):
    assert other["weight"] == pytest.approx(one["weight"], rel=1e-3)
    for key in ("_value_sums", "_sums"):
        assert (other[key] - one[key]).abs().max() < most * one[key].abs().max(), key


@pytest.mark.parametrize(("backend", "part"), CASES, ids=lambda value: getattr(value, "name", value))
def test_two_processes_equal_one(results, backend, part):
    single, name = f"single-{part.name}", f"{backend}-{part.name}"
    one, two = one_and_two(results, single, name)
    assert [x["source"] for x in (one, *two)] == [part.energies_from] * 3
    expected_type = {"ddp": "MULTI_CPU", "fsdp2": "FSDP"}.get(backend, "DEEPSPEED")
    assert expected_type in two[0]["distributed_type"]
    sharded = backend in ("zero3", "fsdp2")
    assert [x["share_held"] for x in two] == [0.5 if sharded else 1.0] * 2

    lengths = [x["advantages"].size(1) for x in two]
    if part.baseline.endswith(("pooled", "mean")):  # one number per completion
        assert lengths == [1, 1]
    else:
        assert lengths[0] < lengths[1] == one["advantages"].size(1)  # lengths differ between the processes
    for key in ("energy", "advantages") if part.energies_from else ("advantages",):
        assert_same_advantages(one, two, key)
    if part.energies_from == SAMPLED:  # which says the same as a forward of the whole text, in every step
        for x in (one, *two):
            assert len(x["differences"]) >= 3 and max(x["differences"]) < 1e-5

    for of_one, of_two in zip(one["metrics"], two[0]["metrics"], strict=True):
        assert of_two == pytest.approx(of_one, rel=1e-4, abs=1e-6)
    assert_same_models(results, single, name)
    if part.baseline == "value":
        learned, *of_both = (x["state"] for x in (one, *two))
        # So the above is of predictions; with one completion per prompt there are too few tokens to learn from
        assert part.one or max(learned["weight"], learned["luck_weight"]) > 1e-3
        for state in of_both:
            assert_same_sums(learned, state, 1e-4)


@pytest.mark.parametrize("backend", AGENT_BACKENDS)
def test_unequal_numbers_of_turns(results, backend):
    """One process takes turns that the other has not, and only its completions earn rewards along the way."""
    one, two = one_and_two(results, "agent-single", f"agent-{backend}")
    assert_same_advantages(one, two, atol=1e-5)
    assert two[0]["reward"] == pytest.approx(one["reward"])
    assert_same_models(results, "agent-single", f"agent-{backend}")


def test_comparison_is_same_with_two_processes(results):
    one, two = one_and_two(results, "compare-single", "compare-ddp")
    for x in two:
        for ours, theirs in zip(x["report"]["comparisons"], one["report"]["comparisons"], strict=True):
            assert ours["name"] == theirs["name"]
            for name in ("more_prompts", "noise_over_group_mean", "cosine"):
                known = {end: value for end, value in theirs[name].items() if value is not None}
                assert {end: ours[name][end] for end in known} == pytest.approx(known, rel=1e-3), (ours["name"], name)


@pytest.mark.parametrize("backend", ASYNC_BACKENDS)
def test_async_is_same_with_two_processes(results, backend):
    pytest.importorskip("trl_otb.experimental.async_grpo.worker", exc_type=ImportError)
    one, two = one_and_two(results, "async-single", f"async-{backend}")
    assert one["state"]["weight"] > 0
    for of_one, of_two in zip(one["metrics"], two[0]["metrics"], strict=True):
        assert of_two == pytest.approx(of_one, rel=1e-3, abs=1e-5)
    for x in two:
        assert_same_sums(one["state"], x["state"], 1e-3)  # folds are of other groups' numbers on no process
    assert_same_models(results, "async-single", f"async-{backend}", atol=1e-5, rtol=1e-4)


def test_comparison_of_sharded_model_is_refused(results):
    log = (results / "compare-zero3.0.log").read_text()
    assert "The model is sharded over processes (ZeRO-3 or FSDP)" in log


def test_stopped_recipe_resumes_to_same_weights(results):
    """
    From an empty cache: one process makes the policy, the other waits. A signal that reaches one process alone, in the
    second step, ends both after it; the resumed run has the weights of an unstopped one.
    """
    whole, stopped, _ = said = [
        (results / f"recipe-{name}.0.log").read_text() for name in "whole stopped resumed".split()
    ]
    assert whole.count("Held-out accuracy: ") == 1 and "Held-out" not in (results / "recipe-whole.1.log").read_text()
    assert len([file for file in (results / "cache").iterdir() if file.is_dir()]) == 1
    assert stopped.count("Stopped after step 2; its checkpoint is in") == 1
    assert [(results / f"recipe-{name}.codes").read_text() for name in ("whole", "resumed")] == ["0 0"] * 2, said
    weights = [(results / name / "model.safetensors").read_bytes() for name in ("whole", "stopped")]
    assert weights[0] == weights[1]


def test_error_in_one_process_ends_all(results):
    """None waits for the one that failed; -9 would be a process that had to be killed."""
    assert "a reward must be a finite number" in (results / "failing.1.log").read_text()
    assert (results / "failing.codes").read_text() == "1 1"
