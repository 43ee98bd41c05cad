"""A step as a line of a page: text, and the numbers of each token as integers of bounded precision, deflated."""

import base64
import html
import json
import math
import re
import reprlib
import zlib
from typing import Any, NamedTuple

import numpy
from torch import Tensor

from ..baselines import completion_returns
from ..rollout import Rollout
from .text import prompt_text, prompts_in, readable, rows_of_prompt, token_texts


MAX_TOKENS = 100_000  # of a recorded step; the first prompt is always whole
MAX_COLUMNS, MAX_CHARACTERS = 20, 1000  # of the data set, for each prompt; of each column
OPENS = '<script type="application/octet-stream" data-step="'  # no browser runs it, and base64 has no `<`
END = "</script>\n"
RECORD = re.compile(rf'{OPENS}(\d+)" data-mode="(\w+)" data-about="([^"]*)">[\w+/=]+{END}', re.ASCII)


class Column(NamedTuple):
    """A number of each token."""

    values: Tensor  # (B, T)
    unit: float | None = None  # the finest; `None`: a thousandth of the largest
    differences: bool = True  # whether neighbours are close to one another, so that their difference is stored


def recorded(rollout: Rollout, mode: str, title: str) -> str:
    """
    The line of a page that holds a rollout: whole prompts, until there are `MAX_TOKENS` tokens. `title` names the run.

    Its base64 is zlib's of JSON, a 0 byte, and for each of the JSON's `columns`, `[name, unit, differences]`, a 16-bit
    integer for each of `tokens` tokens, in multiples of `unit`: all low bytes, then all high ones, zigzag-coded. Tokens
    are those of all completions in their order. Energies are stored as √w, log-probabilities as √−log π.
    """
    known: dict[int, str] = {}
    prompts: list[dict[str, Any]] = []
    lengths: list[int] = []  # of the text of each token
    counts: list[int] = []  # of the tokens of each completion
    while len(prompts) < prompts_in(rollout) and sum(counts) < MAX_TOKENS:
        rows = rows_of_prompt(rollout, len(prompts))
        completions = []
        for row in range(rows.start, rows.stop):
            ids = rollout.completion_ids[row][rollout.completion_mask[row].bool()].tolist()
            texts = [*map(readable, token_texts(ids, rollout.shown.processing_class, known))]
            lengths += [len(text) if text.isascii() else len(text.encode("utf-16-le")) // 2 for text in texts]
            counts.append(len(ids))
            completions.append({"text": "".join(texts), "tokens": len(ids)} | numbers_of_row(rollout, row))
        columns = columns_of_prompt(rollout, rows.start)
        prompts.append({"prompt": prompt_text(rollout, rows.start), "columns": columns, "completions": completions})
    stored = [packed(name, column, counts) for name, column in token_columns(rollout).items()]
    stored.append((["length", 1, False], planes(numpy.array(lengths))))
    data = {
        "step": rollout.shown.step,
        "mode": mode,
        "title": title,
        "baseline": rollout.shown.baseline_name,
        "rewards": [*rollout.shown.reward_names],
        "tokens": sum(counts),
        "columns": [head for head, _ in stored],
        "prompts": prompts,
        "left_out": prompts_in(rollout) - len(prompts),
    }
    text = json.dumps(data, separators=(",", ":"), allow_nan=False)
    packet = zlib.compress(text.encode() + b"\0" + b"".join(of for _, of in stored), 6)
    about = html.escape(json.dumps(about_step(rollout) | {"run": title}, allow_nan=False))
    return (
        f'{OPENS}{rollout.shown.step}" data-mode="{mode}" data-about="{about}">{base64.b64encode(packet).decode()}{END}'
    )


def about_step(rollout: Rollout) -> dict[str, float | None]:
    """What the page shows of all steps, for which it decodes none: rewards, and what a learning baseline measured."""
    returns = completion_returns(rollout.rewards)
    known = returns[~returns.isnan()]
    numbers = {name.rpartition("/")[2]: value for name, value in rollout.shown.learned.items()}
    if len(known):
        numbers |= {"mean": known.mean().item(), "lowest": known.amin().item(), "highest": known.amax().item()}
    return {name: finite(value) for name, value in numbers.items()}


def token_columns(rollout: Rollout) -> dict[str, Column]:
    """
    Of each token: √w (and √(ρ² w) where they differ), √−log π, whether the policy generated it, and what its
    advantage and baseline follow from: the parts of the baseline, prefix and later luck, if it has parts, or else the
    advantage; B0 and return where they differ between tokens.
    """
    energy, loss_energy = rollout.energy, rollout.loss_energy
    columns: dict[str, Column | None] = {
        "energy": None if energy is None else Column(energy.sqrt(), 2e-3, False),
        "logp": None if rollout.logps is None else Column((-rollout.logps).sqrt(), 5e-3, False),
        "generated": Column(rollout.mask, 1),
    }
    if loss_energy is not None and loss_energy is not energy:
        columns["loss_energy"] = Column(loss_energy.sqrt(), 2e-3, False)
    of_tokens = {"advantage": rollout.advantages}
    if rollout.shown.later_luck is not None and rollout.shown.b0 is not None and rollout.baselines is not None:
        prefix = (rollout.baselines - rollout.shown.b0 - rollout.shown.later_luck) * rollout.mask
        of_tokens = {"prefix": prefix, "luck": rollout.shown.later_luck, "b0": rollout.shown.b0}
    if rollout.rewards.dim() == 2 and rollout.advantages is not None and rollout.advantages.size(1) > 1:
        of_tokens["returns"] = rollout.rewards.flip(1).cumsum(1).flip(1)  # rewards-to-go
    columns |= {name: Column(values) for name, values in of_tokens.items() if values is not None and values.size(1) > 1}
    return {name: column for name, column in columns.items() if column is not None}


def numbers_of_row(rollout: Rollout, row: int) -> dict[str, Any]:
    """What is one number for all tokens of a completion."""
    of_row = {"advantage": rollout.advantages, "baseline": rollout.baselines}
    of_row |= {"b0": rollout.shown.b0, "scale": rollout.scale, "grpo": rollout.group_mean_advantages}
    of_all = {name: values for name, values in of_row.items() if values is not None and values.size(1) == 1}
    numbers = {name: values[row].item() for name, values in of_all.items()}
    numbers["reward"] = completion_returns(rollout.rewards[row : row + 1]).item()
    rewards = [] if rollout.shown.rewards_per_func is None else rollout.shown.rewards_per_func[row].tolist()
    return {name: finite(value) for name, value in numbers.items()} | {"rewards": [*map(finite, rewards)]}


def finite(value: float) -> float | None:
    """To seven digits, as float32 has; JSON knows no NaN."""
    return float(f"{value:.7g}") if math.isfinite(value) else None


def columns_of_prompt(rollout: Rollout, row: int) -> dict[str, str]:
    """The data set's other columns, as text of bounded length."""
    short = reprlib.Repr()
    short.maxstring = short.maxother = MAX_CHARACTERS
    short.maxlist = short.maxtuple = short.maxdict = short.maxset = short.maxarray = 50
    found = {}
    for name, value in [*(rollout.shown.columns[row].items() if rollout.shown.columns else ())][:MAX_COLUMNS]:
        text = value if isinstance(value, str) else short.repr(value)
        cut = text if len(text) <= MAX_CHARACTERS else text[:MAX_CHARACTERS] + " …"
        found[str(name)[:100]] = readable(cut)
    return found


def packed(name: str, column: Column, counts: list[int]) -> tuple[list[Any], bytes]:
    """`[name, unit, differences]`, and the bytes of the first completions' tokens; `counts` says how many each has."""
    rows = column.values[: len(counts)].detach().double().cpu().numpy()
    flat = numpy.concatenate([row[:count] for row, count in zip(rows, counts, strict=True)])
    flat = numpy.nan_to_num(flat, nan=0.0, posinf=0.0, neginf=0.0)
    most = float(numpy.abs(flat).max(initial=0.0)) or 1.0
    unit = max(column.unit or most / 1000, most / 32_767)
    integers = numpy.rint(flat / unit).astype(numpy.int64)
    return [name, unit, column.differences], planes(numpy.diff(integers, prepend=0) if column.differences else integers)


def planes(integers: numpy.ndarray) -> bytes:
    """Low bytes, then high bytes, of which most are 0; differences may wrap, as the page adds them modulo 2¹⁶."""
    short = integers.astype(numpy.int16)
    zigzag = ((short << 1) ^ (short >> 15)).astype("<u2")
    return zigzag.view(numpy.uint8).reshape(-1, 2).T.tobytes()


def about_of(record: str) -> tuple[int, str, dict[str, Any]]:
    """Step, mode, and what else stands at the head of a recorded line."""
    found = RECORD.match(record)
    assert found is not None  # of a line that `RECORD` has recognised
    return int(found[1]), found[2], json.loads(html.unescape(found[3]))
