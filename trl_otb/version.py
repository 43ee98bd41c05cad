"""The release, which pyproject.toml reads."""

__version__ = "0.14.2"
