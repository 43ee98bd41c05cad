"""
A scratchpad of a chosen length: the policy counts a digit up, with harmless free choices at every step.

For `7+3*12=` the policy writes twelve steps such as `c110`: any letter, the number of steps left (11), the digit plus
3 (0) and, optionally, the digit again as a check, `!0`. The answer is the last digit. Letters and checks have high
energy and do not affect the result. The slip rate makes 60 % of the answers right at every length. With mixed lengths
it is the rate for 6 steps, so short answers are mostly right and long ones mostly wrong.
"""

import random
import re
from statistics import fmean


ALPHABET = "0123456789+*=!abcdefgh"
LETTERS = "abcdefgh"
RIGHT = 0.6
# Steps by the approximate number of tokens: per step a letter, the counter, the digit, and half a check of two
STEPS = {10: 2, 30: 6, 100: 20, 300: 60, 1000: 167}


def problems(steps: int) -> list[dict[str, str]]:
    return [
        {"question": f"{start}+{by}*{steps:02d}", "answer": str((start + by * steps) % 10), "steps": steps}
        for start in range(10)
        for by in range(1, 10)
    ]


def lucky_letters(rates: list[int]) -> list[dict[str, str]]:
    """Problems of 6 steps, each answered by its own random letters; their number is drawn from `rates`."""
    rng = random.Random(0)
    return [row | {"answer": "".join(rng.sample(LETTERS, rng.choice(rates)))} for row in problems(6)]


def first_letter(completions, answer, **kwargs) -> list[float]:
    """The reward: 1 if the first letter is one of `answer`, which nothing in a completion predicts."""
    return [float(text[-1]["content"][:1] in set(right)) for text, right in zip(completions, answer, strict=True)]


def last_digit(completions, answer, steps=(), log_metric=None, **kwargs) -> list[float]:
    """The reward: 1 if the digit after the counter reaches 00 is `answer`. Logged by the steps a problem takes."""
    said = [text if isinstance(text, str) else text[-1]["content"] for text in completions]
    scores = [
        float(bool(re.search(rf"(?<!\d)00+{right}(!\d)?$", text))) for text, right in zip(said, answer, strict=True)
    ]
    for length in set(steps) if log_metric else ():
        log_metric(f"{length}_steps", fmean(score for score, of in zip(scores, steps, strict=True) if of == length))
    return scores


def demonstrations(size: int, tokens: list[int]) -> list[list[tuple[str, bool]]]:
    """Demonstrations with about these numbers of tokens per answer, in equal shares."""
    rng = random.Random(0)
    asked = [row for length in tokens for row in problems(STEPS[length])]
    slip = 1 - RIGHT ** (1 / STEPS[tokens[len(tokens) // 2]])

    def work_out(question: str) -> str:
        digit, by, written = int(question[0]), int(question[2]), ""
        for left in reversed(range(int(question[4:]))):
            digit = (digit + by) % 10
            if rng.random() < slip:
                digit = (digit + rng.randrange(1, 10)) % 10
            check = f"!{digit}" if rng.random() < 0.5 else ""
            written += f"{rng.choice(LETTERS)}{left:0{len(question) - 4}d}{digit}{check}"
        return written

    questions = [rng.choice(asked)["question"] for _ in range(size)]
    return [[(question + "=", False), (work_out(question) + "<eos>", True)] for question in questions]
