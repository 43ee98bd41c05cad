"""The way from a batch to its loss, as AGENTS.md tells it: what is named there is called, in that order."""

import re
import sys
from pathlib import Path

from tests.helpers import tiny
from trl_otb import OTBGRPOTrainer


ROOT = Path(__file__).parents[2]


def told():
    """File and names of each row."""
    page = (ROOT / "AGENTS.md").read_text().split("- **From batch to loss**")[1].split("- **A new metric**")[0]
    rows = [line for line in page.splitlines() if line.startswith("  | `")]
    named = (re.findall(r"`([\w./]+)`", row) for row in rows)
    return [(path, [name.rpartition(".")[2] for name in names]) for path, *names in named]


def calls_of_a_step(train):
    """When each function of the package is first called in a step with a `value` that has learned."""
    first, package = {}, str(ROOT / "trl_otb") + "/"

    def profile(frame, event, arg):
        code = frame.f_code
        if event == "call" and code.co_filename.startswith(package):
            first.setdefault((code.co_filename.removeprefix(package), code.co_qualname), len(first))

    class Traced(OTBGRPOTrainer):
        def training_step(self, *args, **kwargs):
            sys.setprofile(profile if self.state.global_step == 2 else None)
            try:
                return super().training_step(*args, **kwargs)
            finally:
                sys.setprofile(None)

    options = {"per_device_train_batch_size": 16, "train_dataset": tiny.prompts(16), "scale_rewards": "running"}
    train(Traced, baseline="value", max_steps=3, **options)
    return first


def test_what_is_named_is_called_in_that_order(train):
    """Each row has a call, of something that it names and its file defines, after one of the row before."""
    first, before = calls_of_a_step(train), -1
    rows = told()
    for path, names in rows:
        source = (ROOT / "trl_otb" / path).read_text()
        defined = {name for name in names if re.search(rf"(def|class) {name}\b", source)}
        times = sorted(at for (file, name), at in first.items() if file == path and defined & {*name.split(".")})
        later = [at for at in times if at > before]
        assert later, (path, names, times, before)
        before = later[0]
    assert len(rows) > 12
