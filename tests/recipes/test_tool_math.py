"""recipes/tool_math.py: its calculator, and the policy that learns to call it."""

import pytest

from recipes import tool_math
from tests.recipes.conftest import accuracies, log_of, question_and_answer


@pytest.mark.parametrize(
    ("expression", "value"),
    [
        ("12+7", "19"), (" (2 + 3) * -4 ", "-20"), ("6/3", "2"), ("1/4", "0.25"), ("7//2 + 7%2", "4"),
        ("2**10", "1024"), ("12 * (7 - 2.5)", "54"), ("10**39", "1" + 39 * "0"),
    ],
)  # fmt: skip
def test_the_calculator_works_out_arithmetic(expression, value):
    assert tool_math.calculator_tool(max_operations=50)(expression) == value


@pytest.mark.parametrize(
    ("expression", "message"),
    [
        ("1+2+3+4+5+6+7", "6 operations, more than 5"), ("__import__('os')", "is not arithmetic"),
        ("True", "is not arithmetic"), ("'%99999999d' % 5", "is not arithmetic"), ("9**999", "too large"),
        ("((9**99)**99)**99", "too large"),
        ("9**99", "at most 40 digits"), ("(-8)**0.5", "not a real number"), ("1e999", "at most 40 digits"),
        ("1/0", "zero"), ("12+", "invalid syntax"), ("1" * 201, "201 characters"), ("open(1)", "not defined"),
    ],
)  # fmt: skip
def test_the_calculator_refuses_anything_else(expression, message):
    """Quickly, and with an error that the policy can read."""
    with pytest.raises(Exception, match=message):
        tool_math.calculator_tool(max_operations=5)(expression)


def test_last_message_has_the_answer(data_file):
    options = tool_math.Options(dataset_name=data_file(question_and_answer(5)), instruction="Box it.")
    train, held_out, accuracy = tool_math.load_problems(options, seed=0)
    assert (len(train), len(held_out)) == (4, 1) and train["prompt"][0][0]["content"].endswith("\nBox it.")
    said = [[{"content": r"\boxed{5}"}, {"content": text}] for text in (r"\boxed{6}", r"\boxed{5}", None)]
    assert accuracy(said, ["6"] * 3) == [1, 0, 0]


@pytest.mark.slow
def test_the_recipe_teaches_the_policy(tmp_path):
    """A fifth of `accelerate launch recipes/tool_math.py`: held-out accuracy rises by at least 15 points."""
    flags = "--output_dir run --max_steps 20 --eval_strategy no --num_held_out_problems 100 --disable_tqdm true"
    tool_math.main([*flags.split(), "--seed", "3", "--num_train_problems", "1000"])
    before, after = accuracies(tmp_path / "run").values()
    assert after - before > 0.15
    first, *_, last = [e["eval_tools/call_frequency"] for e in log_of(tmp_path / "run") if "eval_loss" in e]
    assert last > first
