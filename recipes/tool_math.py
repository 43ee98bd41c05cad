"""
Train a policy that calls a calculator, over several turns, with the Optimal Token Baseline.

    accelerate launch recipes/tool_math.py                                         # no hub, no GPU: recipes/tool_math_cpu.yaml
    accelerate launch recipes/tool_math.py --baseline group_mean                   # the same run with GRPO's own baseline
    accelerate launch --config_file recipes/accelerate/zero3.yaml recipes/tool_math.py --config recipes/tool_math_zero3.yaml
"""

import os
import sys


# A neighbour is called math.py: as long as this folder is on the path, `import random` would import it for the library's.
_RECIPES = os.path.dirname(os.path.abspath(__file__))
sys.path[:] = [os.path.dirname(_RECIPES)] + [p for p in sys.path if os.path.abspath(p or os.curdir) != _RECIPES]

from collections.abc import Callable
from dataclasses import dataclass, field

from recipes.common.calculator import evaluate
from recipes.common.training import Recipe, RecipeArguments, launch


@dataclass
class ToolMathArguments(RecipeArguments):
    instruction: str = field(
        default=(
            "Work out every number with the calculator, step by step, and look at each result before the next call. Put "
            r"your final answer within \boxed{}."
        ),
        metadata={"help": "Added to every problem; the embedded policy gets the bare expression."},
    )
    max_operations: int = field(
        default=50, metadata={"help": "Operations that one call of the calculator may hold, at least 1."}
    )

    def __post_init__(self):
        if self.max_operations < 1:
            raise ValueError(f"`max_operations` is {self.max_operations}: it must be at least 1.")


def calculator_tool(args: ToolMathArguments) -> list[Callable]:
    def calculator(expression: str) -> str:
        """
        Works out an arithmetic expression.

        Args:
            expression: Numbers, parentheses, and + - * / // % **, such as 12 * (7 - 2.5).

        Returns:
            The result.
        """
        return str(evaluate(expression, args.max_operations))

    return [calculator]


RECIPE = Recipe(
    name="tool_math.py",
    embedded="calculator",
    configs={"embedded": "tool_math_cpu.yaml"},
    arguments=ToolMathArguments,
    tools=calculator_tool,
)

if __name__ == "__main__":
    launch(RECIPE, sys.argv[1:])
