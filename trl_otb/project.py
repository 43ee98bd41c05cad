"""Project metadata, from the installed package or, if it is not installed, from pyproject.toml."""

import tomllib
from functools import cache
from importlib import metadata
from pathlib import Path


@cache
def version() -> str:
    """The package's version."""
    pyproject = Path(__file__).parents[1] / "pyproject.toml"
    project = tomllib.loads(pyproject.read_text()).get("project", {}) if pyproject.is_file() else {}
    return project["version"] if project.get("name") == "trl-otb" else metadata.version("trl-otb")
