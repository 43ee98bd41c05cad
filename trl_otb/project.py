"""What pyproject.toml says of the project, from an installation or, where there is none, from the checkout."""

import re
import tomllib
from functools import cache
from importlib import metadata
from pathlib import Path


@cache
def _installed_or_checkout() -> tuple[str, list[str]]:
    pyproject = Path(__file__).parents[1] / "pyproject.toml"
    project = tomllib.loads(pyproject.read_text()).get("project", {}) if pyproject.is_file() else {}
    if project.get("name") == "trl-otb":
        return project["version"], project["dependencies"]
    distribution = metadata.distribution("trl-otb")
    return distribution.version, distribution.requires or []


def version() -> str:
    """The package's version."""
    return _installed_or_checkout()[0]


def trl_requirement() -> str:
    """The versions of TRL that the tests have passed with, as a requirement: `"trl>=…,<…"`."""
    return next(requirement for requirement in _installed_or_checkout()[1] if re.match(r"trl\b", requirement))
