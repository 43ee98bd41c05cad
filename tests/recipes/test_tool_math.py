"""recipes/tool_math.py: its tool, and the policy that learns to call it."""

import re

import pytest

from recipes import tool_math
from tests.recipes.conftest import result_of


def test_the_tool_is_held_to_what_the_arguments_say():
    tool = tool_math.calculator_tool(max_operations=1)
    assert tool.__name__ == "calculator" and tool("12+7") == "19"
    with pytest.raises(ValueError, match="more than 1"):
        tool("1+2+3")


@pytest.mark.slow
def test_the_recipe_teaches_the_policy(tmp_path, capsys):
    """A fifth of `accelerate launch recipes/tool_math.py`: held-out accuracy rises by at least 15 points."""
    flags = "--output_dir run --max_steps 20 --eval_strategy no --num_held_out_problems 100"
    tool_math.main([*flags.split(), "--disable_tqdm", "true", "--seed", "3", "--num_train_problems", "1000"])
    said = capsys.readouterr().out
    result = result_of(tmp_path / "run")
    assert result["after"]["mean"] - result["before"]["mean"] > 0.15
    calls = said.split("Held-out calls per completion, failed calls, turns:\n")[1].splitlines()[:2]
    (calls_before, failed_before, turns_before), (calls_after, failed_after, turns_after) = (
        [float(number) for number in line.split(":")[1].replace("%", "").split()] for line in calls
    )
    assert calls_after > calls_before and failed_after < failed_before and turns_after > turns_before
    assert re.search(r"before: '.*'; after: 'calculator\(", said.replace(" (wrong)", "").replace(" (right)", ""))
    assert (tmp_path / "run" / "training.png").stat().st_size > 10_000
