"""How an answer is found in a completion, and whether it is right."""

import re


WORDS = re.compile(r"[^\W\d_]+([\s.,;:!?'’-]+[^\W\d_]+)*[\s.!?]*")
LONG_WORD = re.compile(r"[^\W\d_]{4}")  # what is shorter may be variables: xy and yx are equal


def final_text(completion: str | list[dict]) -> str:
    """A completion's text; for a conversation, its last message."""
    return completion if isinstance(completion, str) else completion[-1].get("content") or ""


def find_answer(text: str) -> str:
    """The last `<answer>…</answer>`, else the last `\\boxed{…}`, else the text after the last `=`, else all of it."""
    tagged = re.findall(r"<answer>(.*?)</answer>", text, flags=re.DOTALL)
    if tagged:
        return tagged[-1].strip()
    start = text.rfind(r"\boxed{")
    if start >= 0:
        depth, begin = 1, start + len(r"\boxed{")
        for end in range(begin, len(text)):
            depth += {"{": 1, "}": -1}.get(text[end], 0)
            if depth == 0:
                return text[begin:end].strip()
    return text.split("=")[-1].strip()


def grade_mathematics(answer: str, gold: str, entry: int | None = None, seconds: int = 3) -> float:
    """
    1.0 if two answers of unknown form are equal, to the letter or as mathematics (math-verify), else 0.0.

    A `gold` of words is compared word by word, whatever its capitals and its full stop: as mathematics, letters are
    factors, of which anagrams are equal and a sentence takes seconds. An answer that takes longer than `seconds` to
    work out, such as 9^9^9^9, is wrong. Call it in the main thread: math-verify keeps time by its signals.
    """
    from math_verify import parse, verify

    if answer == gold:
        return 1.0
    if WORDS.fullmatch(gold) and LONG_WORD.search(gold):
        return float(_words(answer) == _words(gold))
    # Both as LaTeX, which reads 1/2, \frac{1}{2} and 0.5 alike
    gold_parsed, answer_parsed = (parse(f"${text}$", parsing_timeout=seconds) for text in (gold, answer))
    return float(verify(gold_parsed, answer_parsed, timeout_seconds=seconds))


def _words(text: str) -> list[str]:
    return re.findall(r"[^\W_]+|[^\s\w.!?]", re.sub(r"\\(?:text|mathrm|textbf)\{(.*?)\}", r"\1", text).casefold())
