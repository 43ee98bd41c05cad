"""What a user sees with a TRL that is not the one that was read: copies of the installed one, each with an edit."""

import re
import shutil
from importlib.util import find_spec
from pathlib import Path

import pytest
import trl

from tests.helpers import edited_trl


pytestmark = pytest.mark.tested_trl
GRPO, ASYNC = "trainer/grpo_trainer.py", "experimental/async_grpo"
ASYNC_TRAINER = f"{ASYNC}/async_grpo_trainer.py"
PRODUCT = "per_token_loss1 = coef_1 * advantages"
TURN = "_generate_single_turn(self, prompt_ids,"
SELECTED = 'advantages = inputs["advantages"][selected]'
NO_PRODUCT = "does not weight each token"
# By name: the file, what it holds, what a later version might have there, what is trained, and what is seen: an error,
# or a warning with the same gradients
CASES = {
    "one number per completion": (GRPO, "if advantages.dim() == 1:", "if True:", "value", NO_PRODUCT),
    "renamed log-probs of the sampler": (
        GRPO,
        '"sampling_per_token_logps"',
        '"sampler_logps"',
        "vllm",
        "has no 'sampling_per_token_logps'",
    ),
    "renamed ratio": (GRPO, '"importance_sampling_ratio"', '"is_ratio"', "vllm", "has no 'importance_sampling_ratio'"),
    "renamed tool mask": (GRPO, '"tool_mask"', '"mask_of_tools"', "tools", "a generation batch has no 'tool_mask'"),
    "renamed old log-probs": (GRPO, '"old_per_token_logps"', '"before"', "reused", "has no 'old_per_token_logps'"),
    "another parameter": (GRPO, f"{TURN} images,", f"{TURN} prompts, images,", "rloo", r"takes \(self, prompt_ids"),
    "comment": (GRPO, "# Compute the loss\n", "# The loss\n", "value", "GRPOTrainer._compute_loss"),
    "async product": (ASYNC_TRAINER, PRODUCT, PRODUCT + ".mean()", "async", f"AsyncGRPOTrainer.*{NO_PRODUCT}"),
    "async order": (ASYNC_TRAINER, SELECTED, SELECTED + " + 0", "async", f"AsyncGRPOTrainer.*{NO_PRODUCT}"),
    "async key": (ASYNC_TRAINER, '"segment_id"', '"segment"', "async", "`AsyncGRPOTrainer's batch.segment_id` is gone"),
    "async comment": (ASYNC_TRAINER, "# DDP/FSDP averages", "# DDP averages", "async", "AsyncGRPOTrainer.compute_loss"),
}


def edited(folder: Path, edit: str = "", version: str = "") -> Path:
    """A copy in `folder` with one of `CASES`, or with the asynchronous files as in 1.18 (`"async moved"`)."""
    source, installed = Path(find_spec("trl").origin).parent, trl.__version__
    shutil.copytree(source, folder / "trl", ignore=shutil.ignore_patterns("__pycache__"))
    if edit == "async moved":
        old, new = folder / "trl" / ASYNC, folder / "trl/trainer/_async_grpo"
        shutil.move(old, new)
        for file in new.glob("*.py"):
            file.write_text(file.read_text().replace("from ...", "from trl."))
        old.mkdir()
        (old / "__init__.py").write_text("from trl.trainer._async_grpo import AsyncGRPOConfig, AsyncGRPOTrainer\n")
    elif edit:
        name, before, after = CASES[edit][:3]
        for path in [*(folder / "trl" / Path(name).parent).rglob("*.py")] if "key" in edit else [folder / "trl" / name]:
            text = path.read_text()
            assert before in text or "key" in edit, f"{path} has no {before!r}"
            path.write_text(text.replace(before, after))
    info = folder / f"trl-{version or installed}.dist-info"  # which `trl.__version__` reads
    shutil.copytree(next(source.parent.glob("trl-*.dist-info")), info)
    metadata = (info / "METADATA").read_text()
    (info / "METADATA").write_text(metadata.replace(f"Version: {installed}", f"Version: {version or installed}"))
    return folder


def short_run(folder, kind, model_path, tmp_path, **environment):
    """What a run of two steps raised, its gradient norms, and the warnings of drift."""
    out = tmp_path / f"{folder.name}-{kind}-{len(environment)}"
    program = "tests.helpers.short_run"
    _, text = edited_trl.ran(folder, out, program, kind, model_path, str(tmp_path / "run"), **environment)
    lines = text.splitlines()
    result = next((line for line in lines if line.startswith("trained:") or "Error: " in line), text[-2000:])
    return result, [line for line in lines if line.startswith("warned:") and "was tested with" in line]


@pytest.mark.slow
@pytest.mark.parametrize("edit", [edit for edit in CASES if edit != "comment"])  # which the test of versions tries
def test_an_edit_is_refused_or_said(edit, model_path, tmp_path):
    *_, kind, expected = CASES[edit]
    result, warnings = short_run(edited(tmp_path / "trl", edit), kind, model_path, tmp_path)
    if edit != "async comment":
        refused = "ImportError: .*relies on parts of TRL that are different in trl .*: .*"
        assert re.match(refused + expected, result) and "pip install 'trl==" in result
        return
    (said,) = warnings
    assert f"Changed for AsyncGRPOTrainer: {expected}. Signatures still match" in said
    assert result == short_run(tmp_path, kind, model_path, tmp_path)[0] and result.startswith("trained:")


@pytest.mark.slow
def test_another_version_is_refused_unless_allowed(model_path, tmp_path):
    version = "1.17.0"
    folder = edited(tmp_path / "trl", "comment", version)
    result, _ = short_run(folder, "async", model_path, tmp_path)
    assert result.startswith(f"ImportError: trl {version} is installed, and trl_otb was tested with trl 1.9 to 1.16.0")
    assert "TRL_OTB_ANY_TRL=1" in result
    result, (warning,) = short_run(folder, "value", model_path, tmp_path, TRL_OTB_ANY_TRL="1")
    assert result == short_run(tmp_path, "value", model_path, tmp_path)[0] and result.startswith("trained:")
    assert f"installed: trl {version}" in warning
    assert "Changed for GRPOTrainer: GRPOTrainer._compute_loss. Signatures still match" in warning


def test_report_of_moved_asynchronous_part(tmp_path):
    """The asynchronous part of 1.18 has moved; of GRPOTrainer, nothing."""
    code, text = edited_trl.ran(edited(tmp_path / "trl", "async moved"), tmp_path / "out", "trl_otb.seam")
    assert code == 1
    lines = text.splitlines()
    assert "contract: GRPOTrainer: every part is there, with the expected parameters" in lines
    assert "sources: GRPOTrainer: those that were read" in lines
    (gone,) = [line for line in lines if line.startswith("contract: AsyncGRPOTrainer: `")]
    assert "`TreeRow.pack` is gone" in gone and "AsyncGRPOTrainer.compute_loss" not in gone
