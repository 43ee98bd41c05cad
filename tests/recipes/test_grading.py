"""How an answer is found in a completion and graded."""

import time

import pytest

from recipes.common.grading import final_text, find_answer, grade_mathematics


@pytest.mark.parametrize(
    ("completion", "answer"),
    [
        ("7", "7"),
        ("7-2=5", "5"),
        ("first <answer>1</answer>, no: <answer> 2\n</answer> is 3 = 4", "2"),
        (r"so \boxed{1} or rather \boxed{\frac{1}{2}}. x = 3", r"\frac{1}{2}"),
        (r"cut short \boxed{1", r"cut short \boxed{1"),
        ("", ""),
    ],
)
def test_find_answer(completion, answer):
    assert find_answer(completion) == answer


def test_the_text_of_a_conversation_is_its_last_message():
    assert final_text("5") == "5"
    assert final_text([{"role": "assistant", "content": "1"}, {"role": "assistant", "content": "2"}]) == "2"
    assert final_text([{"role": "assistant", "content": None}]) == ""


@pytest.mark.parametrize(
    ("answer", "gold", "grade"),
    [
        ("42", "42", 1.0),
        ("42.0", "42", 1.0),
        (r"\frac{1}{2}", "1/2", 1.0),
        ("0.5", r"\frac{1}{2}", 1.0),
        ("2 x + 2", "2(x+1)", 1.0),
        ("41", "42", 0.0),
        ("", "42", 0.0),
        ("no number", "42", 0.0),
        ("Paris", "Paris", 1.0),
        ("Rome", "Paris", 0.0),
        ("pairs", "Paris", 0.0),  # the same letters
        (r"\text{paris}.", "Paris", 1.0),
        ("New  York", "new york", 1.0),
        ("Newyork", "New York", 0.0),
        ("It is Paris", "Paris", 0.0),
        ("1 Paris", "Paris", 0.0),
        ("-Paris", "Paris", 0.0),
        ("yx", "xy", 1.0),
        ("4 apples", "4", 1.0),
        # How numbers are written
        ("0.00001", "1e-05", 1.0),
        ("1e-05", "0.00001", 1.0),
        ("e-5", "1e-05", 0.0),  # Euler's number
        ("1000", "1e3", 1.0),
        ("1E+3", "1000", 1.0),
        ("-2.5e-3", "-0.0025", 1.0),
        (".5e1", "5", 1.0),
        ("3e", "e3", 1.0),
        ("1/2", "½", 1.0),
        ("½", "0.5", 1.0),
        ("1 1/2", "1.5", 1.0),
        ("1.5", "1½", 1.0),
        ("-1 1/2", "-1.5", 1.0),
        ("1 1/2", "1", 0.0),
        ("x^2", "x²", 1.0),
        ("10⁻²", "0.01", 1.0),
        ("５", "5", 1.0),
        ("123456789012345678901234567890", "123456789012345678901234567890", 1.0),
        ("123456789012345678901234567891", "123456789012345678901234567890", 0.0),
        ("9007199254740993", "9007199254740992", 0.0),
        # Letters and words
        ("A", "A.", 1.0),
        ("A.", "A", 1.0),
        ("(A)", "A", 1.0),
        ("B.", "A", 0.0),
        ("on", "no", 0.0),
        ("No.", "no", 1.0),
        ("sey", "yes", 0.0),
        ("act", "cat", 0.0),
        ("saw", "was", 0.0),
        ("ba", "ab", 1.0),
        ("bca", "abc", 1.0),
        ("zyx", "xyz", 1.0),
        # Nothing
        ("", "", 0.0),
        (" ", "", 0.0),
        (".", "", 0.0),
    ],
)
def test_grade_mathematics(answer, gold, grade):
    assert grade_mathematics(answer, gold) == grade


def test_sentences_are_compared_at_once():
    gold = "On Monday, the old man walked slowly along the river and wrote a long letter. " * 4
    began = time.monotonic()
    assert grade_mathematics(gold.lower(), gold) == 1.0
    assert grade_mathematics(gold.replace("Monday", "Sunday"), gold) == 0.0
    assert time.monotonic() - began < 1


def test_what_takes_forever_to_work_out_is_wrong():
    began = time.monotonic()
    assert grade_mathematics("9^{9^{9^{9}}}", "42", seconds=1) == 0.0
    assert time.monotonic() - began < 20
