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


def of_rank(results, name, rank):
    path = results / f"{name}.{rank}.pt"
    assert path.exists(), path.with_suffix(".log").read_text()[-3000:]
    return torch.load(path, weights_only=False)


def weights(results, name):
    (file,) = (results / name / "saved").glob("*model.safetensors")
    # Under ZeRO-3 a Qwen2-VL is saved as `model.model`, by GRPOTrainer too; it is loaded by either name
    return {key.replace("model.model.", "model."): value for key, value in load_file(file).items()}


@pytest.mark.parametrize(("backend", "part"), CASES, ids=lambda value: getattr(value, "name", value))
def test_two_processes_equal_one(results, backend, part):
    single, name = f"single-{part.name}", f"{backend}-{part.name}"
    one = of_rank(results, single, 0)
    two = [of_rank(results, name, rank) for rank in (0, 1)]

    assert [x["processes"] for x in (one, *two)] == [1, 2, 2]
    assert [x["source"] for x in (one, *two)] == [part.energies_from] * 3
    expected_type = {"ddp": "MULTI_CPU", "fsdp2": "FSDP"}.get(backend, "DEEPSPEED")
    assert expected_type in two[0]["distributed_type"]
    sharded = backend in ("zero3", "fsdp2")
    assert [x["share_held"] for x in two] == [0.5 if sharded else 1.0] * 2

    lengths = [x["advantages"].size(1) for x in two]
    if part.baseline.endswith("pooled"):  # one number per completion
        assert lengths == [1, 1]
    else:
        assert lengths[0] < lengths[1] == one["advantages"].size(1)  # lengths differ between the processes
    for key in ("energy", "advantages") if part.energies_from else ("advantages",):
        both = [torch.nn.functional.pad(x[key], (0, one[key].size(1) - x[key].size(1))) for x in two]
        torch.testing.assert_close(torch.cat(both), one[key], atol=1e-6, rtol=0)
        assert one[key].abs().max() > 0.05
    if part.energies_from == SAMPLED:  # which says the same as a forward of the whole text, in every step
        for x in (one, *two):
            assert len(x["differences"]) >= 3 and max(x["differences"]) < 1e-5

    for of_one, of_two in zip(one["metrics"], two[0]["metrics"], strict=True):
        assert of_two == pytest.approx(of_one, rel=1e-4, abs=1e-6)
    of_one, of_two = weights(results, single), weights(results, name)
    assert of_one.keys() == of_two.keys()
    for key in of_one:
        torch.testing.assert_close(of_two[key], of_one[key], atol=1e-6, rtol=1e-5, msg=key)
    if part.baseline == "value":
        learned, *of_both = (x["state"] for x in (one, *two))
        assert learned["weight"] > 0.01  # so the metrics and weights above are of predictions
        for state in of_both:
            assert state["weight"] == pytest.approx(learned["weight"], rel=1e-3)
            assert state["_most_weight"] == learned["_most_weight"]
            assert state["_gains"] == pytest.approx(learned["_gains"], rel=1e-2)
            for key, values in learned["_sums"].items():
                assert (state["_sums"][key] - values).abs().max() < 1e-4 * values.abs().max(), key


@pytest.mark.parametrize("backend", AGENT_BACKENDS)
def test_unequal_numbers_of_turns(results, backend):
    """One process takes turns that the other has not, and only its completions earn rewards along the way."""
    one = of_rank(results, "agent-single", 0)
    two = [of_rank(results, f"agent-{backend}", rank) for rank in (0, 1)]
    assert [x["processes"] for x in (one, *two)] == [1, 2, 2]
    longest = one["advantages"].size(1)
    both = [torch.nn.functional.pad(x["advantages"], (0, longest - x["advantages"].size(1))) for x in two]
    torch.testing.assert_close(torch.cat(both), one["advantages"], atol=1e-5, rtol=0)
    assert one["advantages"].abs().max() > 0.05
    assert two[0]["reward"] == pytest.approx(one["reward"])
    of_one, of_two = weights(results, "agent-single"), weights(results, f"agent-{backend}")
    for key in of_one:
        torch.testing.assert_close(of_two[key], of_one[key], atol=1e-6, rtol=1e-5, msg=key)


@pytest.mark.parametrize("backend", ["ddp", "zero2"])
def test_comparison_is_same_with_two_processes(results, backend):
    """Each measures prompts of its own."""
    one = of_rank(results, "compare-single", 0)
    two = [of_rank(results, f"compare-{backend}", rank) for rank in (0, 1)]
    assert [x["processes"] for x in (one, *two)] == [1, 2, 2]
    for x in two:
        for ours, theirs in zip(x["report"]["comparisons"], one["report"]["comparisons"], strict=True):
            assert ours["name"] == theirs["name"]
            for name in ("more_prompts", "noise_over_group_mean", "cosine"):
                known = {end: value for end, value in theirs[name].items() if value is not None}
                assert {end: ours[name][end] for end in known} == pytest.approx(known, rel=1e-3), (ours["name"], name)


@pytest.mark.parametrize("backend", ASYNC_BACKENDS)
def test_async_is_same_with_two_processes(results, backend):
    pytest.importorskip("trl_otb.experimental.async_grpo.worker", exc_type=ImportError)
    name = f"async-{backend}"
    one, *two = (of_rank(results, *which) for which in (("async-single", 0), (name, 0), (name, 1)))
    assert [x["processes"] for x in (one, *two)] == [1, 2, 2] and one["state"]["weight"] > 0
    for of_one, of_two in zip(one["metrics"], two[0]["metrics"], strict=True):
        assert of_two == pytest.approx(of_one, rel=1e-3, abs=1e-5)
    for x in two:
        assert x["state"]["weight"] == pytest.approx(one["state"]["weight"], rel=1e-3)
        for key, values in one["state"]["_sums"].items():
            # Folds are of other groups' numbers on no process
            assert (x["state"]["_sums"][key] - values).abs().max() < 1e-3 * values.abs().max(), key
    of_one, of_two = weights(results, "async-single"), weights(results, name)
    for key in of_one:
        torch.testing.assert_close(of_two[key], of_one[key], atol=1e-5, rtol=1e-4, msg=key)


def test_comparison_of_sharded_model_is_refused(results):
    log = (results / "compare-zero3.0.log").read_text()
    assert "The model is sharded over processes (ZeRO-3 or FSDP)" in log


def test_error_in_one_process_ends_all(results):
    """None waits for the one that failed; -9 would be a process that had to be killed."""
    assert "a reward must be a finite number" in (results / "failing.1.log").read_text()
    assert (results / "failing.codes").read_text() == "1 1"
