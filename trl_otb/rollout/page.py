"""A page of rollouts: one HTML file with every token and its numbers; no server, no network."""

import base64
import hashlib
import html
import importlib
import json
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from transformers import TrainerCallback

from .text import group_data, prompts_in


if TYPE_CHECKING:
    from . import Rollout


TEMPLATE = Path(__file__).with_name("page.html").read_text(encoding="utf-8")
SCRIPT = re.search(r"<script>(.*?)</script>", TEMPLATE, re.DOTALL)
HASH = base64.b64encode(hashlib.sha256(SCRIPT[1].encode() if SCRIPT else b"").digest()).decode()
HEAD = TEMPLATE.replace("@hash@", HASH)  # nothing but this script runs, whatever completions hold
END = "</script>\n"
MAX_TOKENS = 100_000  # of a recorded step; the first prompt is always whole
MAX_BYTES = 200 * 2**20  # of a file; then every second step goes


SAVE_ROLLOUTS = "Every so many steps completions are added to the page `output_dir/rollouts.html`; by default never."


def check_steps(every: Any) -> None:
    if every is not None and (type(every) is not int or every < 1):
        raise ValueError(f"`save_rollouts_steps` is {every!r}: give a number of steps from 1 on, or None for no page.")


def recorded(rollout: "Rollout", mode: str, title: str) -> str:
    """A step as data in a script element that no browser runs: JSON without a `<`."""
    prompts: list[dict[str, Any]] = []
    known: dict[int, str] = {}
    tokens = 0
    while len(prompts) < prompts_in(rollout) and tokens < MAX_TOKENS:
        prompts.append(group_data(rollout, len(prompts), known))
        tokens += sum(len(of["tokens"]) for of in prompts[-1]["completions"])
    data = {
        "step": rollout.step,
        "mode": mode,
        "title": title,
        "baseline": rollout.baseline_name,
        "kinds": [name for name, of in prompts[0]["completions"][0].items() if isinstance(of, list)],
        "prompts": prompts,
        "left_out": prompts_in(rollout) - len(prompts),
    }
    text = json.dumps(data, separators=(",", ":")).replace("<", "\\u003c")
    return f'<script type="application/json" data-step="{rollout.step}" data-mode="{mode}">{text}{END}'


def append(path: Path, record: str, max_bytes: int = MAX_BYTES) -> bool:
    """
    Add a recorded step to the page at `path`, or begin it. What a crash has cut off is removed, and every second step
    while the file is larger than `max_bytes`: whether there were such steps.
    """
    thinned = False
    if not path.exists():
        path.write_text(HEAD, encoding="utf-8")
    with path.open("r+b") as file:
        file.seek(-len(END), 2)
        if file.read() != END.encode():
            file.seek(0)
            file.truncate(file.read().rindex(END.encode()) + len(END))
            file.seek(0, 2)
        file.write(record.encode())
        size = file.tell()
    while size > max_bytes:
        records = path.read_text(encoding="utf-8").removeprefix(HEAD).splitlines(keepends=True)
        if len(records) < 2:
            break
        kept, thinned = HEAD + "".join(records[::2] if len(records) > 2 else records[1:]), True
        size = path.with_suffix(".part").write_text(kept, encoding="utf-8")
        path.with_suffix(".part").replace(path)
    return thinned


@dataclass
class Page:
    """A page of one rollout, which notebooks show."""

    text: str = field(repr=False)

    def _repr_html_(self) -> str:
        source = html.escape(self.text)
        return (
            f'<iframe srcdoc="{source}" sandbox="allow-scripts" style="width: 100%; height: 40rem; border: 0"></iframe>'
        )


class RolloutPages(TrainerCallback):
    """
    Appends the latest rollout of the main process to `output_dir/rollouts.html` every `save_rollouts_steps`, and after
    an evaluation its last batch; to W&B and trackio goes a page of that step.
    """

    def __init__(self, rollouts: dict[str, "Rollout"]) -> None:
        self.rollouts = rollouts
        self.last: dict[str, int] = {}  # recorded step of each mode
        self.sparser = 1  # than `save_rollouts_steps`, since the file became too large

    def due(self, args: Any, step: int) -> bool:
        return step % (args.save_rollouts_steps * self.sparser) == 0

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if self.due(args, state.global_step):
            self._record("train", args, state)

    def on_evaluate(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._record("eval", args, state)

    def _record(self, mode: str, args: Any, state: Any) -> None:
        rollout = self.rollouts.get(mode)
        if not state.is_world_process_zero or rollout is None or self.last.get(mode) == rollout.step:
            return
        self.last[mode] = rollout.step
        path = Path(args.output_dir) / "rollouts.html"
        record = recorded(rollout, mode, path.resolve().parent.name)
        path.parent.mkdir(parents=True, exist_ok=True)
        self.sparser *= 2 if append(path, record) else 1
        for name in {"wandb", "trackio"}.intersection(args.report_to or ()):
            library = importlib.import_module(name)
            library.log({f"{mode}/rollouts": library.Html(HEAD + record)})
