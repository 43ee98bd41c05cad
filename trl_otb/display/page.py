"""
A page of rollouts: one HTML file with every token and its numbers; no server, no network.

- A completion has the rewards of each function, a prompt the data set's other columns, shortened. A token of `value`
  has what its advantage is made of: reward − (B0 + prefix + later luck).
- Beside a completion stands GRPO's view of it, or what another step or run sampled for the same prompt: [`join_pages`].
- Numbers are rounded: advantages and baselines to a thousandth of the step's largest, √w to 0.002, √−log π to 0.005. At
  most 100,000 tokens of a step are recorded, in whole prompts; 36,000 take about 220 kB.
- A resumed run goes on in its page, without what came after the checkpoint. A new run renames the old page, and either
  renames a file of another kind.
- Pages hold prompts and answers. transformers uploads no file whose name begins with `_`, so `push_to_hub` leaves them
  out. To publish one, use `HfApi().upload_file`.
"""

import base64
import hashlib
import html
import importlib
import json
import logging
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import chain, count
from pathlib import Path
from typing import Any

from transformers import TrainerCallback

from ..rollout import Rollout
from .record import END, RECORD, about_of, recorded


logger = logging.getLogger(__name__)


def read_head() -> str:
    """What stands before the records: the page with its style and script, of which nothing else may run."""
    template, style, script = (
        Path(__file__).with_name(f"page.{kind}").read_text(encoding="utf-8") for kind in ("html", "css", "js")
    )
    digest = base64.b64encode(hashlib.sha256(f"\n{script}".encode()).digest()).decode()
    return template.replace("@hash@", digest).replace("@style@", style).replace("@script@", script)


HEAD = read_head()
MARK = "<!doctype html>\n<!-- rollouts of trl_otb -->\n"  # how a page of any release begins
MAX_BYTES = 200 * 2**20  # of a file; then every second step goes
NAME = "_rollouts.html"
SAVE_ROLLOUTS = "Every so many steps completions are added to the page `output_dir/_rollouts.html`; by default never."


def check_steps(every: Any) -> None:
    if every is not None and (type(every) is not int or every < 1):
        raise ValueError(f"`save_rollouts_steps` is {every!r}: give a number of steps from 1 on, or None for no page.")


def records_of(path: Path) -> list[str]:
    """The recorded steps of a page with whatever script, without one that was cut off."""
    text = path.read_bytes().decode(errors="ignore") if path.exists() else ""
    return [line for line in text.splitlines(keepends=True) if RECORD.fullmatch(line)]


def write(path: Path, records: Sequence[str]) -> None:
    """A page at once, so that a crash leaves the old one."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.with_suffix(".part").write_bytes((HEAD + "".join(records)).encode())
    path.with_suffix(".part").replace(path)


def set_aside(path: Path, reason: str) -> None:
    """Rename a file, so that a page can begin at `path`, and say so."""
    number = 1
    while (to := path.with_stem(f"{path.stem}-{number}")).exists():
        number += 1
    path.rename(to)
    logger.warning(f"{path} {reason}: it is now {to.name}, and a new page begins.")


def begins_page(path: Path) -> bool:
    """Whether a new page may replace the file: there is none, it is empty, or it is a page without a record."""
    if not path.exists() or path.stat().st_size == 0:
        return True
    with path.open("rb") as file:
        ours = file.read(len(MARK.encode())) == MARK.encode()
    return ours and not records_of(path)


def begin(path: Path, step: int) -> None:
    """
    The page of a run that is at `step`. A run that goes on from a checkpoint goes on in its page, without what came
    after the checkpoint; a new one sets the file of an earlier run aside, and each sets aside what is no page.
    """
    before = path.with_name(NAME.removeprefix("_"))  # as it was called before release 0.14
    if not path.exists() and records_of(before):
        before.rename(path)
    if begins_page(path):
        return
    records = records_of(path)
    if records and step > 0:
        write(path, [record for record in records if about_of(record)[0] <= step])
    else:
        set_aside(path, "is the page of an earlier run" if records else "is no page of rollouts that can be continued")


def append(path: Path, record: str, max_bytes: int = MAX_BYTES) -> bool:
    """
    Add a recorded step to the page at `path`, or begin it; a file that is no page is set aside. While the file is
    larger than `max_bytes`, every second step of each mode goes, from the last but one on: whether there were such
    steps.
    """
    if path.exists() and path.stat().st_size + len(record) <= max_bytes:
        with path.open("rb+") as file:
            if file.read(len(HEAD.encode())) == HEAD.encode():
                file.seek(-len(END), 2)
                if file.read() == END.encode():  # else a crash has cut off the end
                    file.write(record.encode())
                    return False
    records, thinned = records_of(path), False
    if not records and not begins_page(path):
        set_aside(path, "is no page of rollouts that can be continued")
    records.append(record)
    while len(records) > 2 and len(HEAD) + sum(map(len, records)) > max_bytes:
        of_mode = [[of for of in records if about_of(of)[1] == mode] for mode in ("train", "eval")]
        records, thinned = sorted(chain(*(of[::-2] for of in of_mode)), key=records.index), True
    write(path, records)
    return thinned


def join_pages(paths: Sequence[str | Path], to: str | Path) -> None:
    """
    Write one page of several runs, to compare what they sampled for the same prompts, as after an evaluation.

    Args:
        paths: Pages, or output folders that hold a `_rollouts.html`. Runs have the names of their folders.
        to: The page to write.

    Raises:
        ValueError: There is no recorded step in a file, or it is the one to write.
    """
    joined: list[str] = []
    taken: set[str] = set()
    for path in map(Path, paths):
        page = path / NAME if path.is_dir() else path
        if page.resolve() == Path(to).resolve():
            raise ValueError(f"{page} is one of the pages to join, and would be overwritten: choose another output.")
        records = records_of(page)
        if not records:
            raise ValueError(f"{page} holds no recorded step: give pages that `save_rollouts_steps` has written.")
        name = about_of(records[0])[2]["run"]
        names = chain([name], (f"{name} ({number})" for number in count(2)))
        run = next(of for of in names if of not in taken)
        taken.add(run)
        for record in records:
            about = html.escape(json.dumps(about_of(record)[2] | {"run": run}))
            head, _, rest = record.partition(' data-about="')
            joined.append(f'{head} data-about="{about}"{rest.partition(chr(34))[2]}')
    write(Path(to), joined)


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
    Appends the latest rollout of the main process to `output_dir/_rollouts.html` every `save_rollouts_steps`, and after
    an evaluation its last batch; to W&B and trackio goes a page of that step.
    """

    def __init__(self, rollouts: dict[str, Rollout]) -> None:
        self.rollouts = rollouts
        self.last: dict[str, Rollout] = {}  # that was recorded, of each mode
        self.modes: set[str] = set()  # that this run has recorded
        self.begun = False
        self.sparser = 1  # than `save_rollouts_steps`, since the file became too large

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.last = {}
        if not self.begun or "train" in self.modes:  # else evaluations before training are of this run
            self._begin(args, state)

    def due(self, args: Any, step: int) -> bool:
        return step % (args.save_rollouts_steps * self.sparser) == 0

    def records(self, args: Any, state: Any, mode: str) -> bool:
        """Whether a step that a rollout of now serves is added to the page."""
        steps = math.ceil(args.steps_per_generation * args.num_iterations / args.gradient_accumulation_steps)
        served = range(state.global_step + 1, state.global_step + 1 + steps)
        return mode == "eval" or any(self.due(args, step) for step in served)

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if self.due(args, state.global_step):
            self._record("train", args, state)

    def on_evaluate(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._record("eval", args, state)

    def _begin(self, args: Any, state: Any) -> None:
        self.begun, self.modes = True, set()
        if state.is_world_process_zero:
            begin(Path(args.output_dir) / NAME, state.global_step)

    def _record(self, mode: str, args: Any, state: Any) -> None:
        rollout = self.rollouts.get(mode)
        if not state.is_world_process_zero or rollout is None or self.last.get(mode) is rollout:
            return
        if not self.begun:  # an evaluation without training
            self._begin(args, state)
        self.last[mode] = rollout
        self.modes.add(mode)
        path = Path(args.output_dir) / NAME
        record = recorded(rollout, mode, path.resolve().parent.name)
        self.sparser *= 2 if append(path, record) else 1
        for name in {"wandb", "trackio"}.intersection(args.report_to or ()):
            library = importlib.import_module(name)
            if hasattr(library, "Html") and getattr(library, "run", True) is not None:
                library.log({f"{mode}/rollouts": library.Html(HEAD + record)})
