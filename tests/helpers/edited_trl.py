"""Copies of the installed TRL, edited as a later version might be, and a process that sees one in its place."""

import os
import shutil
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import trl


GRPO = "trainer/grpo_trainer.py"
ASYNC = "experimental/async_grpo"
PRODUCT = "per_token_loss1 = coef_1 * advantages"
TURN = "_generate_single_turn(self, prompt_ids,"
ASYNC_TRAINER = f"{ASYNC}/async_grpo_trainer.py"
SELECTED = 'advantages = inputs["advantages"][selected]'
# By name: the file, what it holds, and what stands there instead
EDITS = {
    "one number per completion": (GRPO, "if advantages.dim() == 1:", "if True:"),
    "mean instead of a product": (GRPO, PRODUCT, PRODUCT + ".mean(-1, keepdim=True)"),
    "renamed ratio": (GRPO, '"importance_sampling_ratio"', '"is_ratio"'),
    "renamed tool mask": (GRPO, '"tool_mask"', '"mask_of_tools"'),
    "renamed old log-probs": (GRPO, '"old_per_token_logps"', '"logps_before"'),
    "another parameter": (GRPO, f"{TURN} images,", f"{TURN} prompts, images,"),
    "method gone": (GRPO, "_tool_call_loop(", "_call_tools("),
    "comment": (GRPO, "# Compute the loss\n", "# The loss\n"),
    "async product": (ASYNC_TRAINER, PRODUCT, PRODUCT + ".mean()"),
    "async order": (ASYNC_TRAINER, SELECTED, SELECTED + " + 0"),
    "async key": (ASYNC_TRAINER, '"segment_id"', '"segment"'),
    "async comment": (ASYNC_TRAINER, "# DDP/FSDP averages", "# DDP averages"),
}


def edited(folder: Path, edit: str = "", version: str = "") -> Path:
    """A copy in `folder` with one of `EDITS`, or with the asynchronous files as in 1.18 (`"async moved"`)."""
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
        name, before, after = EDITS[edit]
        for path in [*(folder / "trl" / Path(name).parent).rglob("*.py")] if "key" in edit else [folder / "trl" / name]:
            text = path.read_text()
            assert before in text or "key" in edit, f"{path} has no {before!r}"
            path.write_text(text.replace(before, after))
    info = folder / f"trl-{version or installed}.dist-info"  # which `trl.__version__` reads
    shutil.copytree(next(source.parent.glob("trl-*.dist-info")), info)
    metadata = (info / "METADATA").read_text()
    (info / "METADATA").write_text(metadata.replace(f"Version: {installed}", f"Version: {version or installed}"))
    return folder


def run(folder: Path, *command: str, **environment: str) -> subprocess.CompletedProcess:
    """Python with the copy in place of the installed TRL."""
    root = Path(__file__).resolve().parents[2]
    paths = os.pathsep.join([str(folder), str(root)])
    return subprocess.run(
        [sys.executable, "-W", "ignore", *command], cwd=root, capture_output=True, text=True, timeout=600,
        env={**os.environ, "PYTHONPATH": paths, **environment},
    )  # fmt: skip
