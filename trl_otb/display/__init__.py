"""A rollout for the eye: its repr, a table, its completions in colours, a picture."""

from .colours import show
from .picture import plot
from .summary import summary
from .table import to_pandas


__all__ = ["plot", "show", "summary", "to_pandas"]
