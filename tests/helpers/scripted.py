"""
Turns of a policy that are written in advance, through TRL's own loop of tool calls: only what is sampled is replaced.
"""

import json
import re


END = "<|im_end|>"


def call(name: str, **arguments) -> str:
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


def add(a: int, b: int) -> int:
    """Adds two integers.

    Args:
        a: First number.
        b: Second number.
    """
    return a + b


async def multiply(a: int, b: int) -> int:
    """Multiplies two integers.

    Args:
        a: First number.
        b: Second number.
    """
    return a * b


def fail(a: int) -> int:
    """Always fails.

    Args:
        a: A number.
    """
    raise RuntimeError("out of order")


def chatter(length: int) -> str:
    """Says a lot.

    Args:
        length: How much.
    """
    return "z" * length


TOOLS = [add, multiply, fail, chatter]
# By completion of a group: its turns. Its number stands in front, so that later turns know whose they are.
TURNS = [
    [call("add", a=2, b=3), call("multiply", a=5, b=7), "= 35"],  # a sync and an async tool, one after the other
    ["= 5, said at once"],
    ['<tool_call>\n{"name": "add", "argum'],  # a malformed call is no call
    [call("fail", a=1), call("unknown", a=1) + call("add", a=1, b=1) + call("multiply", a=2, b=2), "= none"],
    [call("chatter", length=1000), "never reached"],  # a result beyond max_completion_length is rolled back
    [call("chatter", length=150), "this turn is cut in the middle " * 20],
    [call("add", a=2, b=3), "= 5"],
    [call("add", a=1, b=1), call("add", a=2, b=2), call("add", a=4, b=4), call("add", a=8, b=8), "= 16"],
]


def next_turn(text: str, turns: list[list[str]], row: int | None = None) -> str:
    """The turn that follows on `text`, the conversation so far; its first names the `row`."""
    if row is not None:
        return f"@{row} {turns[row % len(turns)][0]}{END}"
    row = int(re.search(r"@(\d+) ", text).group(1))
    asked = text[text.index(f"@{row} ") :].count("<|im_start|>assistant")
    return turns[row % len(turns)][asked] + END


def script_turns(monkeypatch, turns=TURNS, rows_before=lambda trainer: 0):
    """Let GRPOTrainer generate as ever and then put the script's tokens in the place of what was sampled."""
    from trl import GRPOTrainer

    generate = GRPOTrainer._generate_single_turn

    def scripted(self, prompt_ids, images, multimodal_fields, *args, **kwargs):
        generate(self, prompt_ids, images, multimodal_fields, *args, **kwargs)
        tokenizer, ids = self.processing_class, []
        for row, prompt in enumerate(prompt_ids):
            text = tokenizer.decode(prompt)
            first = "@" not in text
            turn = next_turn(text, turns, rows_before(self) + row if first else None)
            ids.append(tokenizer.encode(turn, add_special_tokens=False))
        return ids, None

    monkeypatch.setattr(GRPOTrainer, "_generate_single_turn", scripted)
