"""What a user sees with a TRL that is not the one that was read: copies of the installed one, each with an edit."""

import re

import pytest

from tests.helpers.edited_trl import EDITS, edited, run


pytestmark = pytest.mark.tested_trl
REFUSED = "relies on parts of TRL that are different in trl .*: "
# The edit, what is trained, and what is seen: an error, or a warning with the same gradients
CASES = {
    "one number per completion": ("value", REFUSED + "`GRPOTrainer._compute_loss` does not weight each token"),
    "mean instead of a product": ("value", REFUSED + "`GRPOTrainer._compute_loss` does not weight each token"),
    "renamed ratio": ("vllm", REFUSED + "a generation batch has no 'importance_sampling_ratio'"),
    "renamed tool mask": ("tools", REFUSED + "a generation batch has no 'tool_mask'"),
    "renamed old log-probs": ("reused", REFUSED + "a generation batch has no 'old_per_token_logps'"),
    "another parameter": ("rloo", REFUSED + r"`GRPOTrainer._generate_single_turn` no longer takes \(self, prompt_ids"),
    "method gone": ("rloo", REFUSED + "`GRPOTrainer._tool_call_loop` is gone"),
    "comment": ("value", "Changed for GRPOTrainer: GRPOTrainer._compute_loss. Signatures still match"),
    "async product": ("async", REFUSED + "`AsyncGRPOTrainer.compute_loss` does not weight each token"),
    "async order": ("async", REFUSED + "`AsyncGRPOTrainer.compute_loss` does not weight each token"),
    "async key": ("async", REFUSED + "`AsyncGRPOTrainer's batch.segment_id` is gone"),
    "async comment": ("async", "Changed for AsyncGRPOTrainer: AsyncGRPOTrainer.compute_loss. Signatures still match"),
}


def short_run(folder, kind, model_path, tmp_path, **environment):
    """What a run of two steps raised, its gradient norms, and the warnings of drift."""
    done = run(folder, "-m", "tests.helpers.short_run", kind, model_path, str(tmp_path / "run"), **environment)
    lines = done.stdout.splitlines()
    result = next((line for line in lines if line.startswith("trained:") or "Error: " in line), done.stderr[-2000:])
    return result, [line for line in lines if line.startswith("warned:") and "was tested with" in line]


@pytest.mark.slow
@pytest.mark.parametrize("edit", CASES)
def test_an_edit_is_refused_or_said(edit, model_path, tmp_path):
    kind, expected = CASES[edit]
    result, warnings = short_run(edited(tmp_path / "trl", edit), kind, model_path, tmp_path)
    if "comment" not in edit:
        assert re.match("ImportError: .*" + expected, result) and "pip install 'trl==" in result
        return
    assert len(warnings) == 1 and expected in warnings[0]
    assert result == short_run(tmp_path, kind, model_path, tmp_path)[0] and result.startswith("trained:")


@pytest.mark.slow
def test_baselines_per_completion_need_no_token_loss(model_path, tmp_path):
    folder = edited(tmp_path / "trl", "one number per completion")
    result, warnings = short_run(folder, "rloo", model_path, tmp_path)
    assert result == short_run(tmp_path, "rloo", model_path, tmp_path)[0] and result.startswith("trained:")
    assert len(warnings) == 1


@pytest.mark.slow
@pytest.mark.parametrize("version", ["1.15.0", "1.17.0"])
def test_another_version_is_refused_unless_allowed(version, model_path, tmp_path):
    folder = edited(tmp_path / "trl", "comment", version)
    for kind in ("value", "async"):
        result, _ = short_run(folder, kind, model_path, tmp_path)
        assert result.startswith(f"ImportError: trl {version} is installed, and trl_otb was tested with trl 1.16.0")
        assert "TRL_OTB_ANY_TRL=1" in result
    result, (warning,) = short_run(folder, "value", model_path, tmp_path, TRL_OTB_ANY_TRL="1")
    assert result.startswith("trained:") and f"installed: trl {version}" in warning


def test_report_of_moved_asynchronous_part(tmp_path):
    """The asynchronous part of 1.18 has moved; of GRPOTrainer, nothing."""
    done = run(edited(tmp_path / "trl", "async moved"), "-m", "trl_otb.seam")
    assert done.returncode == 1
    lines = done.stdout.splitlines()
    assert "contract: GRPOTrainer: every part is there, with the expected parameters" in lines
    assert "sources: GRPOTrainer: those that were read" in lines
    (gone,) = [line for line in lines if line.startswith("contract: AsyncGRPOTrainer: `")]
    assert "`TreeRow.pack` is gone" in gone and "AsyncGRPOTrainer.compute_loss" not in gone


def test_every_edit_is_a_case():
    assert {*CASES} == {*EDITS}
