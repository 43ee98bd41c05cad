"""Short sums and differences that a careless pupil works out: the warm start of math.py's toy policy."""

import random


ALPHABET = "0123456789+-="
# Options of `reasoning_gym:chain_sum`; recipes/math_cpu.yaml asks for the same problems.
CHAIN_SUM = {"min_terms": 2, "max_terms": 3, "min_digits": 1, "max_digits": 1}


def expressions(size: int, **options) -> list[str]:
    """Expressions such as `"3 + 4 - 2"`, from reasoning-gym."""
    import reasoning_gym

    problems = reasoning_gym.create_dataset("chain_sum", size=size, seed=1, **options)
    return [problem["metadata"]["expression"] for problem in problems]


def demonstrations(size: int) -> list[list[tuple[str, bool]]]:
    rng = random.Random(0)
    return [
        [(e.replace(" ", "") + "=", False), (_demonstration(e, rng) + "<eos>", True)]
        for e in expressions(size, **CHAIN_SUM)
    ]


def _demonstration(expression: str, rng: random.Random) -> str:
    """
    For `"3 + 4 - 2"`, `"7-2=5"` with partial results seven times in ten, otherwise `"5"`. Each computed number is
    wrong one time in five.
    """

    def work_out(value: int) -> int:
        return value + rng.choice([-10, -2, -1, 1, 2, 10]) if rng.random() < 0.2 else value

    first, *rest = expression.split()
    terms = [int(sign + digits) for sign, digits in zip(rest[::2], rest[1::2], strict=True)]
    if rng.random() < 0.3:
        return str(work_out(int(first) + sum(terms)))
    written, value = "", int(first)
    for i, term in enumerate(terms, start=1):
        value = work_out(value + term)
        written += str(value)
        if i < len(terms):
            written += "".join(f"{left:+d}" for left in terms[i:]) + "="
    return written
