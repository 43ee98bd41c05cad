"""The completions of a prompt, token by token, as data and in a terminal; and a rollout's repr."""

import functools
from typing import Any

import numpy
import torch
from rich.console import Console
from rich.text import Text

from ..baselines import completion_returns
from ..rollout import Rollout


IMPROBABLE = 1.5  # of energy: where it is above, another token had more than half of the probability
NOTHING = "·"  # the text of a token that has none
COLOURED = "blue: more of this, orange: less (advantage × √energy); "
LEGEND = "‹ ›: the policy was fairly sure of another token; [ ]: of tools"
COLOURS = {True: (0, 98, 190), False: (213, 84, 0)}  # of tokens with positive and negative numbers, as on the page


def group_data(rollout: Rollout, prompt: int, known: dict[int, str] | None = None) -> dict[str, Any]:
    """
    The completions of prompt number `prompt`, as JSON: text and numbers of each token, rounded to four digits; one
    number where all tokens have the same. `push` is advantage × √energy. `known` holds texts of tokens, by id.
    """
    rows, tokenizer = rows_of_prompt(rollout, prompt), rollout.shown.processing_class
    columns = {
        "advantage": rollout.advantages,
        "baseline": rollout.baselines,
        "energy": rollout.energy,
        "logp": rollout.logps,
        "grpo_advantage": rollout.group_mean_advantages,
    }
    if rollout.loss_energy is not None:
        for push, of in (("push", columns["advantage"]), ("grpo_push", columns["grpo_advantage"])):
            columns[push] = None if of is None else of * rollout.loss_energy.sqrt()
    numbers = {name: rounded(of[rows]) for name, of in columns.items() if of is not None}
    rewards, completions = completion_returns(rollout.rewards[rows]).tolist(), []
    known = {} if known is None else known
    for i, row in enumerate(range(rows.start, rows.stop)):
        ids = rollout.completion_ids[row][rollout.completion_mask[row].bool()].tolist()
        completions.append(
            {
                "reward": None if rewards[i] != rewards[i] else rewards[i],
                "tokens": [visible(text) if text else "" for text in token_texts(ids, tokenizer, known)],
                "generated": rollout.mask[row, : len(ids)].int().tolist(),
            }
            | {name: of[i, : len(ids)].tolist() for name, of in numbers.items()}
        )
    return {"prompt": prompt_text(rollout, rows.start), "completions": completions}


def prompt_text(rollout: Rollout, row: int) -> str:
    """Without special tokens, such as the placeholders of images."""
    ids = rollout.prompt_ids[row][rollout.prompt_mask[row].bool()].tolist()
    decode = rollout.shown.processing_class.decode
    return readable(decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False).strip())


def rounded(values: torch.Tensor) -> numpy.ndarray:
    """To four digits; what is not finite becomes 0."""
    x = numpy.nan_to_num(values.detach().double().cpu().numpy(), nan=0.0, posinf=0.0, neginf=0.0)
    digits = 10.0 ** (3 - numpy.floor(numpy.log10(numpy.abs(x), where=x != 0, out=numpy.zeros_like(x))))
    return numpy.round(x * digits) / digits


def rows_of_prompt(rollout: Rollout, prompt: int) -> slice:
    """The rows of prompt number `prompt`; an `IndexError` if there is no such prompt."""
    at = (prompt_numbers(rollout) == prompt).nonzero().flatten().tolist()
    if not at:
        raise IndexError(f"`prompt` is {prompt!r}: this rollout has prompts 0 to {prompts_in(rollout) - 1}.")
    return slice(at[0], at[-1] + 1)


def prompt_numbers(rollout: Rollout) -> torch.Tensor:
    """`(B,)`, from 0 on."""
    n = rollout.num_generations
    return (rollout.first_row % n + torch.arange(len(rollout))) // n


def prompts_in(rollout: Rollout) -> int:
    return int(prompt_numbers(rollout)[-1]) + 1


def token_texts(ids: list[int], tokenizer: Any, known: dict[int, str] | None = None) -> list[str]:
    """The text that each token adds, "·" if none; of several that form one character, "" and at the last all of it."""

    def decode(some: list[int]) -> str:
        return tokenizer.decode(some, skip_special_tokens=False, clean_up_tokenization_spaces=False)

    known = {} if known is None else known
    texts, start, done = [], 0, 0  # a token's text may depend on the one before it: decoding begins there
    for end in range(1, len(ids) + 1):
        text = known.get(ids[end - 1]) if 0 < done == end - 1 else None
        if text is None:
            before, now = decode(ids[start:done]), decode(ids[start:end])
            if now.endswith("�") and end < len(ids) and end - done < 4:  # bytes of a character
                texts.append("")
                continue
            text = now[len(before) :] or NOTHING
            if 0 < done == end - 1 and not text.endswith("�"):
                known[ids[done]] = text
        texts.append(text)
        start, done = done, end
    return texts


@functools.lru_cache(100_000)
def visible(text: str) -> str:
    """`text` with symbols for line breaks and tabs; other unprintable characters are escaped, but not joiners."""
    signs = {"\n": "↵", "\t": "⇥", "\r": "␍", "\u200c": "\u200c", "\u200d": "\u200d"}
    return "".join(signs.get(c, c if c.isprintable() else ascii(c)[1:-1]) for c in text) or NOTHING


@functools.lru_cache(100_000)
def readable(text: str) -> str:
    """As [`visible`], with its line breaks, and nothing where there is nothing."""
    return "\n".join(visible(line) if line else "" for line in text.split("\n"))


def show(rollout: Rollout, prompt: int, max_tokens: int) -> None:
    """See [`~trl_otb.display.shown.ShownRollout.show`]."""
    data, console, shown = group_data(rollout, prompt), Console(highlight=False), Text()

    def say(text: str, style: str = "", end: str = "\n") -> None:  # the terminal's encoding may lack a symbol
        shown.append(text.encode(console.encoding, "backslashreplace").decode(console.encoding) + end, style)

    of_run = (
        f"step {rollout.shown.step}, baseline {rollout.shown.baseline_name or 'unknown'}, N = {rollout.num_generations}"
    )
    say(f"Prompt {prompt} of {prompts_in(rollout)}, {of_run}", "bold")
    coloured = console.color_system is not None or console.is_jupyter
    say(f"{data['prompt']}\n{COLOURED * coloured}{LEGEND}", "dim")
    colour = next((name for name in ("push", "advantage") if name in data["completions"][0]), "")
    most = max((abs(x) for of in data["completions"] for x in of.get(colour, [])), default=0.0) or 1.0
    for i, of in enumerate(data["completions"]):
        head = "no reward" if of["reward"] is None else f"reward {of['reward']:.4g}"
        for name in ("advantage", "baseline"):
            values = [number(of, name, t) for t, generated in enumerate(of["generated"]) if generated and name in of]
            ends = dict.fromkeys(f"{round(x, 2) + 0.0:.2f}" for x in (min(values), max(values))) if values else ()
            head += f", {name} {' to '.join(ends)}" if ends else ""  # no −0.00
        say(f"\ncompletion {i}, {head}, {len(of['tokens'])} tokens", "bold")
        cut = range(max_tokens - max_tokens // 3, len(of["tokens"]) - max_tokens // 3)
        made = [True, *of["generated"], True]  # beside each token
        begin = 0  # of the tokens that form one character, which is shown once
        for t, word in enumerate(of["tokens"]):
            if not word and t + 1 < len(of["tokens"]) and t not in cut:
                continue
            first, begin = begin, t + 1
            if t in cut:
                word, style = f" … {len(cut):,} tokens are not shown … " if t == cut.start else "", "dim"
            elif not made[t + 1]:
                # Of each line
                opens, closes = made[first] or "↵" in of["tokens"][first - 1], made[t + 2] or "↵" in word
                word, style = f"{'[' * opens}{word}{']' * closes}", "italic dim"
            else:
                x = max((number(of, colour, i) for i in range(first, t + 1)), key=abs) / most
                parts = (round(255 - 0.6 * abs(x) * (255 - part)) for part in COLOURS[x > 0])
                style = f"black on rgb({','.join(map(str, parts))})"
                word = f"‹{word}›" if number(of, "energy", t) > IMPROBABLE else word
            say(word, style, end="\n" * ("↵" in word))
        say("")
    console.print(shown, soft_wrap=True, end="")  # at once, as a notebook makes a block of each call


def number(of: dict[str, Any], name: str, t: int) -> float:
    """Of token `t`; a column with one number holds it for all."""
    values = of.get(name, [0.0])
    return values[0 if len(values) == 1 else t]


def summary(rollout: Rollout) -> str:
    """Sizes and the mean reward."""
    returns, generated = completion_returns(rollout.rewards), int(rollout.mask.sum())
    return (
        f"Rollout of {prompts_in(rollout)} prompts, N = {rollout.num_generations}: {len(rollout)} completions, "
        f"{generated:,} generated tokens, mean reward {returns.nanmean().item():.4g}\nsee show(prompt=0), page(path)"
    )
