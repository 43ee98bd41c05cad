"""The completions of a prompt with coloured tokens: HTML in a notebook, otherwise text."""

import html
import os
import sys
import uuid
from typing import Any

from ..figure import require
from .group import IMPROBABLE, VALUES, Group, ShownCompletion, Token, read_group, visible


ORANGE, BLUE, RED = "e67e00", "2166ac", "c8202f"  # energy, positive and negative advantages
# The same in a terminal of 256 colours, from pale to strong
SHADES = {ORANGE: (230, 223, 222, 215, 208), BLUE: (195, 153, 117, 75, 33), RED: (224, 217, 210, 203, 196)}


def show(rollout: Any, prompt: int, tokenizer: Any, value: str | None, max_tokens: int) -> None:
    """See [`~trl_otb.rollout.Rollout.show`]."""
    if value is not None and value not in VALUES:
        raise ValueError(f"`value` is {value!r}: tokens are coloured by {', '.join(map(repr, VALUES))}.")
    group = read_group(rollout, prompt, tokenizer, max_tokens)
    if value is not None and value not in group.values:
        has = ", ".join(map(repr, group.values)) or "no values"
        raise ValueError(f"`value` is {value!r}, which is not available yet: this group has {has}.")
    value = value or next((name for name in ("advantage", "energy") if name in group.values), None)
    if in_notebook():
        display = require("IPython.display", "HTML").display
        display({"text/html": as_html(group, value), "text/plain": as_text(group, value, False)}, raw=True)
    else:
        print(as_text(group, value, colours=sys.stdout.isatty() and not os.environ.get("NO_COLOR")))


def in_notebook() -> bool:
    from transformers.utils import is_in_notebook  # here, as `Rollout` itself needs only torch

    return is_in_notebook()


def as_text(group: Group, value: str | None, colours: bool) -> str:
    """Tokens coloured by `value`, if given; improbable ones are underlined or, without colours, in ‹ ›."""
    lines = [f"Prompt {group.number}: {visible(group.prompt)}"]
    if colours and value is not None:
        high, low = _ends(group, value)
        ends = f"{_painted(f' {low} ', RED, 1.0)} to " if value != "energy" else "0 to "
        of_high = _painted(f" {high} ", ORANGE if value == "energy" else BLUE, 1.0)
        lines.append(f"coloured by {VALUES[value]}, {ends}{of_high}; underlined: {IMPROBABLE}; grey: tool output")
        others = [repr(name) for name in group.values if name != value]
        if others:
            lines.append(f"other colours: show(value={' or '.join(others)})")
    elif group.values:
        lines.append(f"‹ ›: {IMPROBABLE}; [ ]: tool output. Colours: in a terminal or a notebook.")
    for i, completion in enumerate(group.completions):
        head = f"completion {i}, {completion.label}"
        for name in group.values:
            numbers = [token.values[name] for token in completion.tokens if name in token.values]
            if numbers and name == "energy":
                head += f", energy {sum(numbers):.2f}"
            elif numbers:
                head += f", {VALUES[name]} {_range(numbers)}"
        text = _coloured(completion, value, group) if colours else _plain(completion)
        lines += ["", head, f"{text}{_more(completion)}"]
    return "\n".join(lines)


def as_html(group: Group, value: str | None) -> str:
    """An HTML fragment with a switch between the group's values, without scripts or external resources."""
    name = f"otb-{uuid.uuid4().hex[:8]}"
    style = (
        f"#{name} .c{{white-space:pre-wrap;font-family:monospace;line-height:1.6;margin:.2em 0 .8em}}"
        f"#{name} .k{{display:none;opacity:.8}}#{name} .c i{{font-style:normal;color:#888}}"
        f"#{name} .u{{outline:1px solid;outline-offset:-1px}}#{name} label{{margin-right:1em}}"
    )
    switch, keys = "", ""
    for key in group.values:
        chosen = f"#{name}-{key}:checked~"
        style += f"{chosen}.c span{{background:var(--{key})}}{chosen}.k.{key}{{display:block}}"
        checked = " checked" if key == value else ""
        switch += (
            f"<input type='radio' name='{name}' id='{name}-{key}'{checked}>"
            f"<label for='{name}-{key}'>{VALUES[key]}</label>"
        )
        high, low = _ends(group, key)
        if key == "energy":
            ends = f"0 to <span style='background:{_alpha(ORANGE, 1.0)}'>&nbsp;{high}&nbsp;</span>"
        else:
            ends = (
                f"<span style='background:{_alpha(RED, 1.0)}'>&nbsp;{low}&nbsp;</span> (less of this) to "
                f"<span style='background:{_alpha(BLUE, 1.0)}'>&nbsp;{high}&nbsp;</span> (more)"
            )
        keys += f"<div class='k {key}'>{VALUES[key]}: {ends}; framed: {IMPROBABLE}; grey: tool output</div>"
    completions = "".join(
        f"<div class='c'><b>completion {i}, {completion.label}</b>\n"
        f"{''.join(_element(token, group) for token in completion.tokens)}{_more(completion)}</div>"
        for i, completion in enumerate(group.completions)
    )
    prompt = html.escape(visible(group.prompt))
    return (
        f"<div id='{name}'><style>{style}</style><p><b>Prompt {group.number}:</b> {prompt}</p>"
        f"{switch}{keys}{completions}</div>"
    )


def _element(token: Token, group: Group) -> str:
    text = html.escape(visible(token.text)) + ("\n" if "\n" in token.text else "")
    if not token.generated:
        return f"<i>{text}</i>"
    colours = ";".join(
        f"--{name}:{_alpha(_colour(name, number), abs(number) / group.largest(name))}"
        for name, number in token.values.items()
    )
    numbers = ", ".join(f"{VALUES[name]} {number:.3g}" for name, number in token.values.items())
    framed = " class='u'" if token.improbable else ""
    return f'<span{framed} style="{colours}" title="{numbers}">{text}</span>'


def _coloured(completion: ShownCompletion, value: str | None, group: Group) -> str:
    found = ""
    for token in completion.tokens:
        text = visible(token.text)
        if not token.generated:
            found += f"\x1b[38;5;245m{text}\x1b[0m"
        elif value is None or value not in token.values:
            found += text
        else:
            number = token.values[value]
            share = abs(number) / group.largest(value)
            found += _painted(text, _colour(value, number), share, underlined=token.improbable)
        found += "\n" if "\n" in token.text else ""
    return found


def _plain(completion: ShownCompletion) -> str:
    found, of_tool = "", False
    for token in completion.tokens:
        if of_tool == token.generated:
            found += "]" if of_tool else "["
            of_tool = not of_tool
        text = visible(token.text)
        found += f"‹{text}›" if token.improbable else text
        found += "\n" if "\n" in token.text else ""
    return found + ("]" if of_tool else "")


def _painted(text: str, colour: str, share: float, underlined: bool = False) -> str:
    shade = round(share * len(SHADES[colour]))
    codes = [f"48;5;{SHADES[colour][shade - 1]};38;5;16"] if shade > 0 else []
    codes += ["4"] if underlined else []
    return f"\x1b[{';'.join(codes)}m{text}\x1b[0m" if codes else text


def _colour(value: str, number: float) -> str:
    return ORANGE if value == "energy" else BLUE if number > 0 else RED


def _alpha(colour: str, share: float) -> str:
    """A transparent colour, so that text stays readable on light and dark pages."""
    return f"#{colour}{round(170 * min(share, 1.0)):02x}"


def _ends(group: Group, value: str) -> tuple[str, str]:
    return f"{group.largest(value):.3g}", f"−{group.largest(value):.3g}"


def _range(numbers: list[float]) -> str:
    low, high = (f"{round(end, 2) + 0.0:.2f}" for end in (min(numbers), max(numbers)))  # no −0.00
    return low if low == high else f"{low} to {high}"


def _more(completion: ShownCompletion) -> str:
    return f" … {completion.left_out:,} more tokens" if completion.left_out > 0 else ""
