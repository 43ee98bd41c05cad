"""Finds the answer in a completion and grades it."""

import re
import unicodedata


WORDS = re.compile(r"[^\W\d_]+([\s.,;:!?'’-]+[^\W\d_]+)*[\s.!?]*")
# Fewer than four letters may be a product of variables, where xy equals yx, unless they read as a word: no, two, cat
LONG_WORD = re.compile(r"[^\W\d_]{4}")
SHORT_WORD = re.compile(r"(?i)(?=[a-z]*[eiou])[a-z]{2,3}|(?=[a-z]*a)(?=[a-z]*[e-w])[a-z]{3}")


def final_text(completion: str | list[dict]) -> str:
    """The text of a completion; of a conversation, its last message."""
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
    1.0 if the answers are equal, literally or as mathematics (math-verify), else 0.0.

    A `gold` made of words is compared word by word, ignoring case and the full stop: as mathematics, letters would be
    factors, anagrams would be equal, and a sentence would take seconds. An answer that takes longer than `seconds` to
    evaluate, such as 9^9^9^9, is wrong, and so is an empty one. Call it in the main thread: math-verify uses signals.
    """
    from math_verify import parse, verify

    answer, gold = (text.strip().rstrip(".").rstrip() for text in (answer, gold))
    if answer == gold or not answer:
        return float(bool(answer))
    if WORDS.fullmatch(gold) and (LONG_WORD.search(gold) or SHORT_WORD.fullmatch(gold)):
        return float(_words(answer) == _words(gold))
    # Both as LaTeX, which reads 1/2, \frac{1}{2} and 0.5 alike
    gold_parsed, answer_parsed = (parse(f"${_latex(text)}$", parsing_timeout=seconds) for text in (gold, answer))
    return float(verify(gold_parsed, answer_parsed, timeout_seconds=seconds))


def _latex(text: str) -> str:
    """Rewrite what LaTeX would misread: ½, x², 1 1/2, and 1e-5, whose e is not Euler's number."""
    text = re.sub("[⁰¹²³⁴-⁹⁻]+", lambda power: f"^{{{power[0]}}}", text)
    text = re.sub("[¼-¾⅐-⅞]", lambda fraction: f" {fraction[0]}", text)
    text = unicodedata.normalize("NFKC", text).replace("⁄", "/").strip()
    text = re.sub(r"(?<![\d./])(\d+) +(\d+)/(\d+)", r"(\1+\2/\3)", text)
    return re.sub(r"(?<![A-Za-z\d.])(\d+\.?\d*|\.\d+)[eE]([+-]?\d+)(?!\.?\d)", r"(\1*10^{\2})", text)


def _words(text: str) -> list[str]:
    return re.findall(r"[^\W_]+|[^\s\w.!?]", re.sub(r"\\(?:text|mathrm|textbf)\{(.*?)\}", r"\1", text).casefold())
