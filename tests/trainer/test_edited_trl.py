"""What a user sees with a TRL that is not the one that was read: copies of the installed one, each with an edit."""

import re
import shutil

import pytest

from recipes.studies import later_trl, render
from recipes.studies.later_trl import EDITS, Edit, edited, outcomes
from tests.helpers import edited_trl


pytestmark = pytest.mark.tested_trl
ASYNC = "experimental/async_grpo"
PRODUCT = "per_token_loss1 = coef_1 * advantages"
SELECTED = 'advantages = inputs["advantages"][selected]'
NO_PRODUCT = "does not weight each token"
# By name: an edit of the asynchronous trainer, and what is seen: an error, or a warning with the same gradients
ASYNC_EDITS = {
    "product": (((PRODUCT, PRODUCT + ".mean()"),), f"AsyncGRPOTrainer.*{NO_PRODUCT}"),
    "order": (((SELECTED, SELECTED + " + 0"),), f"AsyncGRPOTrainer.*{NO_PRODUCT}"),
    "key": ((('"segment_id" ->', '"segment"'),), "`AsyncGRPOTrainer's batch.segment_id` is gone"),
    "comment": ((("# DDP/FSDP averages", "# DDP averages"),), "AsyncGRPOTrainer.compute_loss"),
}


def moved(folder):
    """The asynchronous files as in 1.18."""
    edited(folder, EDITS["a comment"], "1.18.0")
    old, new = folder / "trl" / ASYNC, folder / "trl/trainer/_async_grpo"
    shutil.move(old, new)
    for file in new.glob("*.py"):
        file.write_text(file.read_text().replace("from ...", "from trl."))
    old.mkdir()
    (old / "__init__.py").write_text("from trl.trainer._async_grpo import AsyncGRPOConfig, AsyncGRPOTrainer\n")
    return folder


def short_run(folder, kind, model_path, tmp_path):
    """What a run of two steps raised, its gradient norms, and the warnings of drift."""
    out, program = tmp_path / f"{folder.name}-{kind}", "tests.helpers.short_run"
    _, text = edited_trl.ran(folder, out, program, kind, model_path, str(tmp_path / "run"))
    lines = text.splitlines()
    result = next((line for line in lines if line.startswith("trained:") or "Error: " in line), text[-2000:])
    return result, [line for line in lines if line.startswith("warned:") and "was tested with" in line]


# The study of all edits


def published():
    return {(row["edit"], row["run"]): row for row in render.load("later_trl")["edits"]}


def test_no_edit_of_the_study_trains_wrongly_or_without_a_word():
    assert {*published()} == {(name, run) for name, edit in EDITS.items() for run in edit.runs.split()}
    assert {row["verdict"] for row in published().values()} == {"error", "right, with a warning"}
    assert f"with each of {len(EDITS)} edits" in (render.HERE / "later_trl.md").read_text()


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    [
        "advantages left out of the shuffle",
        "kept on the trainer",
        "a hook that does nothing",
        "the branch for (B, T) is gone",
        "another name for the tool mask",
        "log-probs of the token before",
        "a norm in the place of Σπ²",
        "the ratio twice",
        "another name for the file",
    ],
)
def test_an_edit_of_the_study_does_what_is_published(name, model_path, tmp_path):
    for found in outcomes(edited(tmp_path / "trl", EDITS[name], later_trl.VERSION), EDITS[name], model_path):
        expected = published()[name, found["run"]]
        assert (found["verdict"], found["error"]) == (expected["verdict"], expected["error"])


def test_an_edit_whose_text_is_gone_is_an_error(tmp_path):
    with pytest.raises(ValueError, match="has 0 times 'gone'"):
        edited(tmp_path, Edit("otb", (("gone", ""),)))


# What is said


@pytest.mark.slow
def test_a_newer_version_trains_with_one_line(model_path, tmp_path):
    folder = edited(tmp_path / "trl", EDITS["a comment"], "1.17.0")
    result, (warning,) = short_run(folder, "value", model_path, tmp_path)
    assert result == short_run(tmp_path, "value", model_path, tmp_path)[0] and result.startswith("trained:")
    assert "installed: trl 1.17.0" in warning
    assert "Changed for GRPOTrainer: GRPOTrainer._compute_loss. Signatures still match, and what the first" in warning


@pytest.mark.slow
@pytest.mark.parametrize("name", ASYNC_EDITS)
def test_an_edit_of_asynchronous_training_is_refused_or_said(name, model_path, tmp_path):
    changes, expected = ASYNC_EDITS[name]
    edit = Edit("async", changes, file=f"{ASYNC}/async_grpo_trainer.py")
    folder = edited(tmp_path / "trl", edit)
    if name == "key":
        for path in (folder / "trl" / ASYNC).glob("*.py"):
            path.write_text(path.read_text().replace('"segment_id"', '"segment"'))
    result, warnings = short_run(folder, "async", model_path, tmp_path)
    if name != "comment":
        refused = "ImportError: .*relies on parts of TRL that are different in trl .*: .*"
        assert re.match(refused + expected, result) and "pip install 'trl==" in result
        return
    (said,) = warnings
    assert f"Changed for AsyncGRPOTrainer: {expected}. Signatures still match" in said
    assert result == short_run(tmp_path, "async", model_path, tmp_path)[0] and result.startswith("trained:")


def test_1_18_has_no_asynchronous_training(tmp_path):
    folder = moved(tmp_path / "trl")
    _, text = edited_trl.ran(folder, tmp_path / "imported", "trl_otb.experimental.async_grpo.config")
    assert "ImportError: Asynchronous training needs trl 1.16 or 1.17, and 1.18.0 is installed" in text
    code, text = edited_trl.ran(folder, tmp_path / "report", "trl_otb.seam")
    assert code == 0
    lines = text.splitlines()
    assert "contract: GRPOTrainer: every part is there, with the expected parameters" in lines
    assert "sources: GRPOTrainer: GRPOTrainer._compute_loss changed" in lines
    assert not [line for line in lines if "AsyncGRPOTrainer" in line]
