"""A matplotlib figure that a notebook shows, without pyplot, which would choose a backend for whoever imports it."""

from io import BytesIO

from matplotlib.figure import Figure


class ShownFigure(Figure):
    def _repr_png_(self) -> bytes:
        picture = BytesIO()
        self.savefig(picture, format="png", dpi=80)
        return picture.getvalue()
