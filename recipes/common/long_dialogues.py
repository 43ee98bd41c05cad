"""Sums of eight to ten numbers with the calculator of calculator_dialogues.py, by the same pupil: ten turns, 80 tokens."""

import random

from .calculator_dialogues import _demonstration
from .sums import expressions


CHAIN_SUM = {"min_terms": 8, "max_terms": 10, "min_digits": 1, "max_digits": 1}


def demonstrations(size: int) -> list[list[tuple[str, bool]]]:
    rng = random.Random(0)
    return [_demonstration(e.replace(" ", ""), rng) for e in expressions(size, **CHAIN_SUM)]
