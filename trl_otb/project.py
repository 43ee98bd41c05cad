"""Project metadata, and what a model card says of it."""

import textwrap
import tomllib
from functools import cache
from importlib import metadata
from pathlib import Path


PAPER = {
    "title": "The Optimal Token Baseline: Variance Reduction for Long-Horizon LLM-RL",
    "id": "2602.07078",
    "citation": textwrap.dedent("""\
        @article{li2026optimal,
            title        = {{The Optimal Token Baseline: Variance Reduction for Long-Horizon LLM-RL}},
            author       = {Li and others},
            year         = 2026,
            eprint       = {arXiv:2602.07078},
        }"""),
}


@cache
def version() -> str:
    """The package's version, from the installed package or, if it is not installed, from pyproject.toml."""
    pyproject = Path(__file__).parents[1] / "pyproject.toml"
    project = tomllib.loads(pyproject.read_text()).get("project", {}) if pyproject.is_file() else {}
    return project["version"] if project.get("name") == "trl-otb" else metadata.version("trl-otb")


def model_card_section(model: str, baseline: str, num_generations: int, scale_rewards: str) -> str:
    """What a model card says of the baseline."""
    return (
        f"\n## Baseline\n\nTrained from `{model}` with trl_otb {version()}: `baseline={baseline!r}`, "
        f"`num_generations={num_generations}`, `scale_rewards={scale_rewards!r}`.\n"
    )
