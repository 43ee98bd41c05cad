"""Shows a rollout: its repr, a table, coloured completions, a picture."""

from typing import Any

from ..optional import require
from .colours import show
from .summary import summary
from .table import to_pandas


__all__ = ["plot", "show", "summary", "to_pandas"]


def plot(*args: Any) -> Any:
    """See [`~trl_otb.rollout.Rollout.plot`]."""
    require("matplotlib.figure", "A picture of a rollout")
    from .picture import plot  # which imports it

    return plot(*args)
