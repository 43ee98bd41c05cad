"""
Sums that a careless pupil solves with a calculator of one operation per call: the warm start of tool_math.py's policy.

In `12+7-35>[12+7]<eos>{19}>[19-35]<eos>{-16}>=-16<eos>` the problem is followed by a call, the calculator's output,
another call and its output, and the answer.
"""

import random
import re

from .worked_sums import expressions


ALPHABET = "0123456789+-=[]{}>?"
CHAIN_SUM = {"min_terms": 3, "max_terms": 4, "min_digits": 2, "max_digits": 2}


def demonstrations(size: int) -> list[list[tuple[str, bool]]]:
    rng = random.Random(0)
    return [_demonstration(e.replace(" ", ""), rng) for e in expressions(size, **CHAIN_SUM)]


def _demonstration(expression: str, rng: random.Random) -> list[tuple[str, bool]]:
    """
    The pupil guesses one time in three. Otherwise, about one time in twenty each, it miscopies a digit, leaves a call
    open, leaves one incomplete, or takes an intermediate result for the answer.
    """
    segments = [(f"{expression}>", False)]
    first, *terms = expression.replace("-", "+-").split("+")
    terms = [term if term.startswith("-") else f"+{term}" for term in terms]
    if rng.random() < 0.35:
        guess = int(first) + sum(map(int, terms)) + rng.choice([-20, -10, -2, -1, 0, 1, 2, 10, 20])
        return [*segments, (f"={guess}<eos>", True)]
    shown = first
    while terms:
        call = _copy(shown, rng) + _copy(terms[0], rng)
        slip = rng.random()
        if slip < 0.11:  # open or incomplete: the calculator shows a question mark, and the pupil tries again
            call = call if slip < 0.06 else f"{shown}{rng.choice('+-')}]"
            segments += [(f"[{call}<eos>", True), ("{?}>", False)]
            continue
        segments.append((f"[{call}]<eos>", True))
        shown = str(sum(map(int, re.findall(r"[+-]?\d+", call))))
        segments.append((f"{{{shown}}}>", False))
        terms.pop(0)
        if terms and rng.random() < 0.06:
            break
    return [*segments, (f"={_copy(shown, rng)}<eos>", True)]


def _copy(number: str, rng: random.Random) -> str:
    if rng.random() < 0.06:
        place = rng.choice([i for i, character in enumerate(number) if character.isdigit()])
        number = number[:place] + rng.choice("123456789") + number[place + 1 :]
    return number
