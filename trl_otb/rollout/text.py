"""The completions of one prompt, token by token, as text and numbers; and a rollout's repr."""

import math
from dataclasses import dataclass
from io import BytesIO
from typing import TYPE_CHECKING, Any

import torch

from ..baselines import completion_returns


if TYPE_CHECKING:
    from . import Rollout


# The numbers of tokens, and how they are called
VALUES = {"energy": "energy", "advantage": "advantage", "group_mean_advantage": "the group mean's advantage"}
IMPROBABLE = "energy above 1: another token was more than twice as likely"  # for ρ = 1


@dataclass
class Token:
    """A token to show; `values` has the names of [`VALUES`], and is empty for tool output."""

    text: str
    generated: bool
    values: dict[str, float]

    @property
    def improbable(self) -> bool:
        return self.values.get("energy", 0.0) > 1


@dataclass
class ShownCompletion:
    """The first tokens of a completion; `left_out` more are not shown."""

    reward: float
    tokens: list[Token]
    left_out: int

    @property
    def label(self) -> str:
        return "no reward" if math.isnan(self.reward) else f"reward {self.reward:.3g}"


@dataclass
class Group:
    """The completions of prompt number `number`; `values` are the names of the available values."""

    number: int
    prompt: str
    completions: list[ShownCompletion]
    values: list[str]

    def largest(self, value: str) -> float:
        """The largest absolute `value`; both kinds of advantage share one scale."""
        names = ["energy"] if value == "energy" else ["advantage", "group_mean_advantage"]
        tokens = [token for completion in self.completions for token in completion.tokens]
        sizes = [abs(token.values[name]) for token in tokens for name in names if name in token.values]
        return max(sizes, default=0.0) or 1.0


def read_group(rollout: "Rollout", prompt: int, max_tokens: int, max_completions: int | None = None) -> Group:
    """The completions of prompt number `prompt`, at most `max_completions` of them with `max_tokens` tokens each."""
    rows, tokenizer = rows_of_prompt(rollout, prompt), rollout.processing_class
    values = {"energy": rollout.energy, "advantage": rollout.advantages}
    values["group_mean_advantage"] = rollout.group_mean_advantages
    shape = rollout.mask[rows].shape
    columns = {k: x[rows].detach().float().cpu().expand(shape) for k, x in values.items() if x is not None}
    rewards, completions = completion_returns(rollout.rewards[rows]).tolist(), []
    for i, row in enumerate(range(rows.start, rows.stop)[:max_completions]):
        ids = rollout.completion_ids[row][rollout.completion_mask[row].bool()].tolist()
        generated, shown = rollout.mask[row].bool().tolist(), min(len(ids), max_tokens)
        numbers = {name: of[i, :shown].tolist() for name, of in columns.items()}
        tokens = [
            Token(text, generated[t], {name: of[t] for name, of in numbers.items() if generated[t]})
            for t, text in enumerate(token_texts(ids[:shown], tokenizer))
        ]
        completions.append(ShownCompletion(rewards[i], tokens, len(ids) - shown))
    prompt_ids = rollout.prompt_ids[rows.start][rollout.prompt_mask[rows.start].bool()].tolist()
    # Without special tokens, such as the placeholders of images
    text = tokenizer.decode(prompt_ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)
    return Group(prompt, text, completions, [*columns])


def rows_of_prompt(rollout: "Rollout", prompt: int) -> slice:
    """The rows of prompt number `prompt`; an `IndexError` if there is no such prompt."""
    prompts = (rollout.first_row + torch.arange(len(rollout))) // rollout.num_generations
    at = (prompts - prompts[0] == prompt).nonzero().flatten().tolist()
    if not at:
        raise IndexError(f"`prompt` is {prompt!r}: this rollout has prompts 0 to {int(prompts[-1] - prompts[0])}.")
    return slice(at[0], at[-1] + 1)


def token_texts(ids: list[int], tokenizer: Any) -> list[str]:
    """The text that each token adds; of several tokens that form one character, the last adds all of it."""

    def decode(some: list[int]) -> str:
        return tokenizer.decode(some, skip_special_tokens=False, clean_up_tokenization_spaces=False)

    texts, start, done = [], 0, 0  # a token's text may depend on the one before it: decoding begins there
    for end in range(1, len(ids) + 1):
        before, now = decode(ids[start:done]), decode(ids[start:end])
        if now.endswith("�") and end < len(ids):
            texts.append("")
            continue
        texts.append(now[len(before) :])
        start, done = done, end
    return texts


def visible(text: str) -> str:
    """`text` with symbols for line breaks and tabs; other unprintable characters are escaped."""
    signs = {"\n": "↵", "\t": "⇥", "\r": "␍"}
    return "".join(signs.get(c, c if c.isprintable() else ascii(c)[1:-1]) for c in text) or "·"


def as_text(group: Group) -> str:
    """Improbable tokens in ‹ ›, tool output in [ ]; of each completion the total energy and the range of advantages."""
    lines = [f"Prompt {group.number}: {visible(group.prompt)}", f"‹ ›: {IMPROBABLE}; [ ]: tool output."]
    for i, completion in enumerate(group.completions):
        head = f"completion {i}, {completion.label}"
        for name in group.values:
            numbers = [token.values[name] for token in completion.tokens if name in token.values] or [0.0]
            low, high = (f"{round(end, 2) + 0.0:.2f}" for end in (min(numbers), max(numbers)))  # no −0.00
            of_all = f"{sum(numbers):.2f}" if name == "energy" else low if low == high else f"{low} to {high}"
            head += f", {VALUES[name]} {of_all}"
        words = ""
        for token in completion.tokens:
            word = visible(token.text)
            words += f"[{word}]" if not token.generated else f"‹{word}›" if token.improbable else word
            words += "\n" if "\n" in token.text else ""
        more = f" … {completion.left_out:,} more tokens" if completion.left_out else ""
        lines += ["", head, words.replace("][", "") + more]
    return "\n".join(lines)


def summary(rollout: "Rollout") -> str:
    """A few lines on sizes, rewards, and which values are available."""
    n, generated, shown = rollout.num_generations, int(rollout.mask.sum()), int(rollout.completion_mask.sum())
    prompts = -(-(len(rollout) + rollout.first_row % n) // n)
    returns = completion_returns(rollout.rewards).cpu()
    scored = returns[~returns.isnan()]
    mean = f"mean {scored.mean():.4g}" if len(scored) > 0 else "none"
    missing = f"; {len(returns) - len(scored)} completions without" if len(scored) < len(returns) else ""
    kind = "one per completion" if rollout.rewards.dim() == 1 else "one per token"
    of = "per completion" if rollout.advantages is None or rollout.advantages.size(1) == 1 else "per token"
    tools = f", and {shown - generated:,} of tools" if shown > generated else ""
    energies = "none" if rollout.energy is None else "of all tokens"
    return (
        f"Rollout of {prompts} prompts, N = {n}: {len(rollout)} completions, {generated:,} tokens{tools}\n"
        f"rewards: {mean}, {kind}{missing}\nenergies: {energies}\nadvantages: {of}\nsee show(prompt=0), plot(path)"
    )


def new_figure(**options: Any) -> Any:
    """A matplotlib figure that notebooks display, without pyplot, whose import would choose a backend."""
    from matplotlib.figure import Figure

    class ShownFigure(Figure):
        def _repr_png_(self) -> bytes:
            picture = BytesIO()
            self.savefig(picture, format="png", dpi=80)
            return picture.getvalue()

    return ShownFigure(**options)
