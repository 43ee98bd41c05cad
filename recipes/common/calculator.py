"""A calculator for untrusted text: a few operators on numbers, in bounded time, size and depth."""

import ast
import operator


MAX_CHARACTERS = 200
MAX_DIGITS = 40  # of any intermediate result

OPERATORS = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
    ast.Pow: operator.pow,
    ast.UAdd: operator.pos,
    ast.USub: operator.neg,
}


def evaluate(expression: str, max_operations: int = 50) -> int | float:
    """
    The value of an arithmetic expression in Python's syntax: numbers, parentheses, and + - * / // % **.

    The expression is never executed: its syntax tree is walked, and any other node is rejected. It may have at most
    `MAX_CHARACTERS` characters, which also bounds the depth, and `max_operations` binary operations; anything else
    raises a `ValueError`. The value is an integer if the exact result is one and no operand is a float.
    """
    if not isinstance(expression, str):
        raise ValueError(f"the expression is a {type(expression).__name__}, not text")
    if len(expression) > MAX_CHARACTERS:
        raise ValueError(f"the expression has {len(expression)} characters, more than {MAX_CHARACTERS}")
    try:
        tree = ast.parse(expression.strip(), mode="eval")
    except (SyntaxError, ValueError, MemoryError, RecursionError) as error:
        raise ValueError(f"{expression!r} is not an arithmetic expression") from error
    operations = sum(isinstance(node, ast.BinOp) for node in ast.walk(tree))
    if operations > max_operations:
        raise ValueError(f"the expression has {operations} operations, more than {max_operations}")
    try:
        return _value(tree.body)
    except (ZeroDivisionError, OverflowError) as error:
        raise ValueError(f"{expression!r} has no value: {error}") from error


def _value(node: ast.expr) -> int | float:
    if isinstance(node, ast.Constant) and type(node.value) in (int, float):
        return _bounded(node.value)
    if isinstance(node, ast.UnaryOp) and type(node.op) in OPERATORS:
        return OPERATORS[type(node.op)](_value(node.operand))
    if isinstance(node, ast.BinOp) and type(node.op) in OPERATORS:
        left, right = _value(node.left), _value(node.right)
        if isinstance(node.op, ast.Pow):
            # Checked in advance: only a power can grow without bound
            bits = left.bit_length() if isinstance(left, int) else 1
            if max(bits, 1) * abs(right) > 4 * MAX_DIGITS:
                raise ValueError(f"the power {left} ** {right} is too large")
        if isinstance(node.op, ast.Div) and isinstance(left, int) and isinstance(right, int) and right != 0:
            return left // right if left % right == 0 else left / right
        return _bounded(OPERATORS[type(node.op)](left, right))
    raise ValueError(f"{ast.unparse(node)[:40]!r} is not arithmetic on numbers")


def _bounded(value: int | float | complex) -> int | float:
    if isinstance(value, complex) or value != value or abs(value) >= 10**MAX_DIGITS:
        raise ValueError(f"an intermediate result is not real or has more than {MAX_DIGITS} digits")
    return value
