"""A page of rollouts: one HTML file with every token and its numbers; no server, no network."""

import base64
import hashlib
import html
import importlib
import json
import re
from dataclasses import dataclass, field
from itertools import chain
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


def records_of(path: Path) -> list[str]:
    """The recorded steps of a page that this version of the package has begun, without one that was cut off."""
    text = path.read_bytes().decode(errors="ignore") if path.exists() else ""
    lines = text.removeprefix(HEAD).splitlines(keepends=True) if text.startswith(HEAD) else []
    return [line for line in lines if line.endswith(END)]


def write(path: Path, records: list[str]) -> None:
    """A page at once, so that a crash leaves the old one."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.with_suffix(".part").write_bytes((HEAD + "".join(records)).encode())
    path.with_suffix(".part").replace(path)


def mode_of(record: str) -> str:
    return record.partition('data-mode="')[2].partition('"')[0]


def step_of(record: str) -> int:
    return int(record.partition('data-step="')[2].partition('"')[0])


def append(path: Path, record: str, max_bytes: int = MAX_BYTES) -> bool:
    """
    Add a recorded step to the page at `path`, or begin it. While the file is larger than `max_bytes`, every second step
    of each mode goes, from the last but one on: whether there were such steps.
    """
    if path.exists() and path.stat().st_size + len(record) <= max_bytes:
        with path.open("rb+") as file:
            if file.read(len(HEAD.encode())) == HEAD.encode():
                file.seek(-len(END), 2)
                if file.read() == END.encode():  # else a crash has cut off the end
                    file.write(record.encode())
                    return False
    records, thinned = [*records_of(path), record], False
    while len(records) > 2 and len(HEAD) + sum(map(len, records)) > max_bytes:
        of_mode = [[of for of in records if mode_of(of) == mode] for mode in ("train", "eval")]
        records, thinned = sorted(chain(*(of[::-2] for of in of_mode)), key=records.index), True
    write(path, records)
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
        self.last: dict[str, Rollout] = {}  # that was recorded, of each mode
        self.sparser = 1  # than `save_rollouts_steps`, since the file became too large

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Of a run that goes on from a checkpoint, or begins anew, what came after that."""
        self.last, path = {}, Path(args.output_dir) / "rollouts.html"
        if state.is_world_process_zero and path.exists():
            write(path, [record for record in records_of(path) if step_of(record) <= state.global_step])

    def due(self, args: Any, step: int) -> bool:
        return step % (args.save_rollouts_steps * self.sparser) == 0

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if self.due(args, state.global_step):
            self._record("train", args, state)

    def on_evaluate(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._record("eval", args, state)

    def _record(self, mode: str, args: Any, state: Any) -> None:
        rollout = self.rollouts.get(mode)
        if not state.is_world_process_zero or rollout is None or self.last.get(mode) is rollout:
            return
        self.last[mode] = rollout
        path = Path(args.output_dir) / "rollouts.html"
        record = recorded(rollout, mode, path.resolve().parent.name)
        self.sparser *= 2 if append(path, record) else 1
        for name in {"wandb", "trackio"}.intersection(args.report_to or ()):
            library = importlib.import_module(name)
            if hasattr(library, "Html") and getattr(library, "run", True) is not None:
                library.log({f"{mode}/rollouts": library.Html(HEAD + record)})
