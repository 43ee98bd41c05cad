"""A matplotlib figure that notebooks display, without pyplot, whose import would choose a backend."""

from io import BytesIO

from matplotlib.figure import Figure


class ShownFigure(Figure):
    def _repr_png_(self) -> bytes:
        picture = BytesIO()
        self.savefig(picture, format="png", dpi=80)
        return picture.getvalue()
