"""Packages that only tables and pictures need, imported on first use."""

import importlib
from functools import cache
from io import BytesIO
from typing import Any


def require(module: str, purpose: str) -> Any:
    """
    Import `module`.

    Raises:
        ImportError: It is not installed. The message names the purpose and the line that installs it.
    """
    try:
        return importlib.import_module(module)
    except ImportError as error:
        package = module.partition(".")[0]
        raise ImportError(f"{purpose} needs {package}, which is not installed: pip install {package}") from error


def new_figure(**options: Any) -> Any:
    """A matplotlib figure that notebooks display, without pyplot, whose import would choose a backend."""
    require("matplotlib.figure", "A picture")
    return _shown_figure()(**options)


@cache
def _shown_figure() -> Any:
    from matplotlib.figure import Figure

    class ShownFigure(Figure):
        def _repr_png_(self) -> bytes:
            picture = BytesIO()
            self.savefig(picture, format="png", dpi=80)
            return picture.getvalue()

    return ShownFigure
