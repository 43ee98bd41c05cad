"""
Unsloth's class in the place of GRPOTrainer: one of its kind in another process, put there before trl_otb is imported.
tests/hosts/run_unsloth.py runs the real one.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.helpers import tiny, unsloths_run
from trl_otb import OTBGRPOTrainer


RUNS = {
    "alone": "alone",
    "group_mean": 'otb {"baseline": "group_mean"}',
    "otb": 'otb {"baseline": "otb"}',
    "value": 'otb {"baseline": "value"}',
    "reused": 'otb {"baseline": "value", "num_iterations": 2}',
    "silent": 'silent {"baseline": "value"}',
    "unread": 'unread {"baseline": "value"}',
    "mean": 'mean {"baseline": "otb"}',
    "shift": 'shift {"baseline": "otb"}',
    "sequence": 'otb {"baseline": "otb", "importance_sampling_level": "sequence"}',
    "defaults": "config",
    "given": 'config {"learning_rate": 0.1, "baseline": "value", "scale_rewards": "running", "unsloth_num_chunks": 2}',
    "old name": 'config {"old_name": 5}',
    "unknown": 'config {"baselin": "value"}',
}


def made(folder, *runs):
    model = tiny.save_model(folder / "model")
    command = [sys.executable, "-W", "ignore", "-m", "tests.helpers.unsloths_run", model, *runs]
    env = os.environ | {"PYTHONPATH": str(Path(__file__).parents[2])}
    done = subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True)
    lines = [json.loads(line[4:]) for line in done.stdout.splitlines() if line.startswith("RUN ")]
    assert len(lines) == sum(run != "late" for run in runs), done.stdout + done.stderr
    return lines


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    return dict(zip(RUNS, made(tmp_path_factory.mktemp("unsloth"), *RUNS.values()), strict=True))


def test_group_mean_trains_as_unsloth_alone(runs):
    assert runs["group_mean"]["norms"] == runs["alone"]["norms"] and len(runs["alone"]["norms"]) == 2


@pytest.mark.parametrize("name", ["otb", "value", "reused"])
def test_a_baseline_per_token_trains_as_on_trl(runs, name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    options = json.loads(RUNS[name].partition(" ")[2])
    expected = unsloths_run.train(tiny.save_model(tmp_path / "model"), OTBGRPOTrainer, options)
    assert runs[name]["norms"] == pytest.approx(expected["norms"], rel=1e-4)
    assert runs[name]["off"] < 1e-5


def test_the_trial_of_the_loss_leaves_no_trace_in_metrics(runs):
    assert runs["otb"]["once"] == runs["alone"]["once"] == [1.0, 1.0]


def test_where_decoding_calls_no_layers_states_come_from_one_more_forward(runs):
    """Energies and luck are of the forwards that sampled, all the same."""
    assert (runs["value"]["extra"], runs["silent"]["extra"]) == (0, 2)
    assert runs["silent"]["source"] == "the forwards that sampled, and one more for hidden states"
    assert runs["silent"]["norms"] == pytest.approx(runs["value"]["norms"], rel=1e-4)
    assert not any("Later luck" in text for text in runs["silent"]["said"])


def test_where_nothing_can_be_read_all_comes_from_one_more_forward(runs):
    """Its rows have no padding on the left, which Unsloth's attention may not mask."""
    assert runs["unread"]["source"] == "one extra no-gradient forward"
    assert runs["unread"]["off"] < 1e-5
    assert any("Later luck is not subtracted" in text for text in runs["unread"]["said"])


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("mean", "`UnslothGRPOTrainer.compute_loss` does not weight each token by its own advantage: the cosine"),
        ("shift", "the log-probs of GRPOTrainer's forward of completion 0 of a rollout differ by 1"),
        ("sequence", "`importance_sampling_level` is 'sequence' and `baseline` is 'otb'"),
    ],
)
def test_what_would_train_otherwise_is_an_error_before_a_step(runs, name, message):
    assert message in runs[name]["error"]


def test_the_check_of_the_first_rollout_names_unsloth(runs):
    assert "different where Unsloth has replaced GRPOTrainer of trl" in runs["shift"]["error"]
    assert "Install the Unsloth that was tried: pip install 'unsloth==" in runs["shift"]["error"]


def test_what_is_not_given_is_as_in_unsloths_config(runs):
    expected = {"learning_rate": 5e-5, "eval_accumulation_steps": 7, "unsloth_num_chunks": -1}
    not_set = {"baseline": "otb", "scale_rewards": "none", "unset": ["baseline", "scale_rewards"]}
    assert runs["defaults"] == expected | not_set
    given = {"learning_rate": 0.1, "baseline": "value", "scale_rewards": "running", "unsloth_num_chunks": 2}
    assert runs["given"] == expected | given | {"unset": []}
    assert runs["old name"]["eval_accumulation_steps"] == 5
    assert "no option 'baselin'. Did you mean 'baseline'?" in runs["unknown"]["error"]


def test_unsloth_that_is_imported_later_is_an_error(tmp_path):
    (late,) = made(tmp_path, "late", RUNS["otb"])
    assert "Unsloth has replaced trl.GRPOTrainer after trl_otb was imported" in late["error"]


def test_a_trl_without_a_fused_head_is_an_error(monkeypatch):
    from trl_otb.seam import unsloth

    monkeypatch.setattr(unsloth, "REPLACED", True)
    monkeypatch.setattr(unsloth, "NO_FUSED_HEAD", False)
    unsloth.check_unsloth()
    monkeypatch.setattr(unsloth, "NO_FUSED_HEAD", True)
    with pytest.raises(ImportError, match="Install trl 1.15"):
        unsloth.check_unsloth()
