"""A rollout that shows itself."""

from pathlib import Path

from ..rollout import Rollout
from . import text
from .page import HEAD, Page, recorded


class ShownRollout(Rollout):
    """A [`~trl_otb.rollout.Rollout`] with its text and page."""

    def __repr__(self) -> str:
        return text.summary(self)

    def show(self, prompt: int = 0, max_tokens: int = 1000) -> None:
        """
        Print the completions of a prompt, by its index in this rollout, in colour where the terminal has it: the first
        two thirds of `max_tokens` tokens of each, and the last third. An `IndexError` if there is no such prompt.
        """
        text.show(self, prompt, max_tokens)

    def page(self, path: str | Path | None = None) -> Page:
        """A page of all prompts, with the numbers of each token, which notebooks show; written to `path`, if given."""
        page = Page(HEAD + recorded(self, "rollout", "trl_otb"))
        if path is not None:
            Path(path).write_text(page.text, encoding="utf-8")
        return page
