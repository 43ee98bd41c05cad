"""The calculator under attack, the embedded pupil's conversations, and recipes/tool_math.py as a user runs it."""

import random
import subprocess
import sys
import time
from pathlib import Path

import pytest
from trl.chat_template_utils import is_chat_template_prefix_preserving, parse_response, supports_tool_calling

from recipes import tool_math
from recipes.common import calculator_dialogues, policies, training
from recipes.common.calculator import MAX_DIGITS, evaluate


ROOT = Path(__file__).resolve().parent.parent


# The calculator


@pytest.mark.parametrize(
    ("expression", "value"),
    [
        ("12+7", 19),
        ("-16 - -4", -12),
        (" 2 * (3 + 4) ", 14),
        ("7 / 2", 3.5),
        ("8 / 2", 4),
        ("7 // 2 - 7 % 2", 2),
        ("2 ** 10", 1024),
        ("2 ** -1", 0.5),
        ("-2 ** 2", -4),
        ("1_000 + 0x10", 1016),
        ("1.5e3", 1500.0),
        (f"{10**39} + 1", 10**39 + 1),
    ],
)
def test_arithmetic(expression, value):
    result = evaluate(expression)
    assert result == value and type(result) is type(value)


ATTACKS = [
    "__import__('os').system('touch /tmp/x')",
    "open('/etc/passwd').read()",
    "().__class__.__mro__[1].__subclasses__()",
    "(lambda: 1)()",
    "[x for x in (1, 2)]",
    "x := 5",
    "1 if 1 else 2",
    "1 < 2",
    "1 and 2",
    "not 1",
    "~1",
    "1 << 100",
    "1 | 2",
    "1 @ 2",
    "'a' * 3",
    "b'a'",
    "f'{1}'",
    "True + 1",
    "None",
    "...",
    "1j",
    "(-1) ** 0.5",
    "nan",
    "1e999",
    "1e999 - 1e999",
    "9 ** 9 ** 9",
    "9 ** 999999999",
    "2 ** 1e308",
    "10.0 ** 300",
    "0 ** -1",
    "1 / 0",
    "1 % 0",
    "1.0 // 0",
    f"{10**40}",
    "9" * 199,
    f"{10**39} * 10",
    "9**40*9**40",
    "(" * 99 + "1" + ")" * 99 + "+",
    "(" * 101,
    "-" * 199,
    "1" + "+1" * 200,
    "1" + "+1" * 60,
    "1" * 100_000_000,
    "\x00",
    "1\n2",
    "import os",
    "",
    " ",
    "12+",
    "٣ + ٤ +",
]


@pytest.mark.parametrize("expression", ATTACKS, ids=lambda e: repr(e[:24]))
def test_the_calculator_cannot_be_broken(expression):
    began = time.perf_counter()
    with pytest.raises(ValueError):
        evaluate(expression)
    assert time.perf_counter() - began < 0.5


def test_random_text_is_worked_out_or_refused():
    """Whatever comes out is a bounded number, or a ValueError."""
    rng = random.Random(0)
    alphabet = ["0", "1", "9", "99", "0.5", "1e9", "+", "-", "*", "**", "/", "//", "%", "(", ")", " ", "~", "x", ","]
    worked_out = 0
    for _ in range(20_000):
        expression = "".join(rng.choice(alphabet) for _ in range(rng.randrange(1, 12)))
        try:
            value = evaluate(expression)
        except ValueError:
            continue
        worked_out += 1
        assert type(value) in (int, float) and abs(value) < 10**MAX_DIGITS
    assert worked_out > 1000


@pytest.mark.parametrize("expression", [5, None, ["1+1"], {"a": 1}])
def test_what_is_no_text_is_refused(expression):
    with pytest.raises(ValueError, match="not text"):
        evaluate(expression)


def test_a_call_can_be_held_to_few_operations():
    assert evaluate("12-7", max_operations=1) == 5
    with pytest.raises(ValueError, match="2 operations, more than 1"):
        evaluate("12-7+1", max_operations=1)


# The embedded pupil's conversations


@pytest.fixture(scope="module")
def tokenizer():
    return policies.character_tokenizer(policies.WARM_STARTS["calculator"])


def call(expression):
    return {"type": "function", "function": {"name": "calculator", "arguments": {"expression": expression}}}


def test_conversations_are_written_as_they_were_demonstrated(tokenizer):
    assert supports_tool_calling(tokenizer) and is_chat_template_prefix_preserving(tokenizer)
    messages = [
        {"role": "user", "content": "12+7-35"},
        {"role": "assistant", "content": "", "tool_calls": [call("12+7")]},
        {"role": "tool", "name": "calculator", "content": "19"},
        {"role": "assistant", "content": "", "tool_calls": [call("19-")]},
        {"role": "tool", "name": "calculator", "content": "{'error': 'no'}"},
    ]
    text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert text == "12+7-35>[12+7]<eos>{19}>[19-]<eos>{?}>"
    assert tokenizer.decode(tokenizer(text)["input_ids"]) == text


@pytest.mark.parametrize(
    ("said", "calls", "content"),
    [
        ("[12+7]<eos>", ["12+7"], ""),
        ("=-16<eos>", None, "=-16"),
        ("[12+7<eos>", ["12+7<eos>"], ""),  # left open: a call that the calculator refuses
        ("12+7]<eos>", None, None),
        ("[1+1][2+2]<eos>", ["1+1", "2+2"], ""),
    ],
)
def test_what_the_pupil_says_is_read(tokenizer, said, calls, content):
    prefix = tokenizer("12+7-35>")["input_ids"]
    message = parse_response(tokenizer, tokenizer(said)["input_ids"], prefix=prefix)
    assert [c["function"]["arguments"]["expression"] for c in message.get("tool_calls") or []] == (calls or [])
    assert content is None or (message.get("content") or "") == content


def test_demonstrations_are_dialogues_with_slips():
    dialogues = calculator_dialogues.demonstrations(2000)
    written = ["".join(text for text, _ in segments) for segments in dialogues]
    assert set("".join(written).replace("<eos>", "")) <= set(calculator_dialogues.ALPHABET)
    right = 0
    for segments in dialogues:
        problem, answer = segments[0][0][:-1], segments[-1][0]
        right += answer == f"={evaluate(problem)}<eos>"
        for (said, by_policy), (shown, by_tool) in zip(segments[1:-1:2], segments[2:-1:2], strict=False):
            assert by_policy and not by_tool
            body = said.removesuffix("<eos>")[1:]
            try:
                result = str(evaluate(body[:-1], max_operations=1)) if body[-1] == "]" else "?"
            except ValueError:
                result = "?"
            assert shown == f"{{{result}}}>"
    guesses = sum(len(segments) == 2 and segments[1][0][0] == "=" for segments in dialogues)
    calls = [said for segments in dialogues for said, by_policy in segments if by_policy and said[0] == "["]
    assert sum("]" not in said for said in calls) == pytest.approx(0.06 * len(calls), rel=0.2)
    assert guesses == pytest.approx(0.35 * 2000, rel=0.1)
    assert 0.3 < right / 2000 < 0.5


# The recipe


def test_the_tool_is_held_to_what_the_arguments_say():
    (tool,) = tool_math.calculator_tool(tool_math.ToolMathArguments(max_operations=1))
    assert tool("12+7") == "19"
    with pytest.raises(ValueError, match="more than 1"):
        tool("1+2+3")
    with pytest.raises(ValueError, match="`max_operations` is 0"):
        tool_math.ToolMathArguments(max_operations=0)


@pytest.mark.slow
def test_a_wrong_option_is_one_line(tmp_path):
    done = subprocess.run(
        [sys.executable, str(ROOT / "recipes" / "tool_math.py"), "--max_operations", "0"],
        cwd=tmp_path, capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 1
    assert "tool_math.py: error: `max_operations` is 0" in done.stderr and "Traceback" not in done.stderr


@pytest.mark.slow
@pytest.mark.parametrize("baseline", ["otb", "group_mean"])
def test_the_recipe_teaches_the_policy(tmp_path, capsys, baseline):
    """Half of `accelerate launch recipes/tool_math.py`: held-out accuracy rises by at least 25 points."""
    flags = ["--output_dir", str(tmp_path), "--baseline", baseline, "--max_steps", "50", "--save_steps", "25"]
    training.run(tool_math.RECIPE, [*flags, "--disable_tqdm", "true", "--seed", "3"])
    said = capsys.readouterr().out
    before, after = (float(said.split(f"accuracy {w}")[1].split(":")[1].split("%")[0]) for w in ("before", "after"))
    assert after - before > 25
    calls = said.split("Held-out calls a completion, failed calls, turns:\n")[1].splitlines()[:2]
    (calls_before, failed_before, turns_before), (calls_after, failed_after, turns_after) = (
        [float(number) for number in line.split(":")[1].replace("%", "").split()] for line in calls
    )
    assert calls_after > calls_before and failed_after < failed_before and turns_after > turns_before
    assert (tmp_path / "training.png").stat().st_size > 10_000 and (tmp_path / "checkpoint-25").is_dir()
