"""What the figures of this folder are drawn with: a sheet, tensors on it, and one colour per rank."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from io import StringIO
from typing import Any

import matplotlib as mpl
from matplotlib.colors import to_rgb
from matplotlib.figure import Figure
from matplotlib.patches import Circle, FancyArrowPatch, Rectangle

from distdl_rma.geometry.box import Box
from distdl_rma.geometry.partition import Partition

__all__ = ["FRAME", "GREY", "HATCHED", "STAYS", "SUM", "Canvas", "Plane", "Point", "svg"]

Point = tuple[float, float]
Style = dict[str, Any]

# Paul Tol's muted colours, which colour-blind readers tell apart, and three more.
PALETTE = (
    *("#88CCEE", "#DDCC77", "#CC6677", "#44AA99", "#332288", "#999933"),
    *("#AA4499", "#117733", "#882255", "#EE7733", "#0077BB", "#777777"),
)
INK, GREY = "#222222", "#666666"
STAYS: Style = {"arrowstyle": "-", "linestyle": ":"}
SUM: Style = {"color": "#999999", "linewidth": 2.4, "zorder": 0.5}
HATCHED: Style = {"faint": True, "hatch": "////", "linewidth": 0.6}
FRAME: Style = {"facecolor": "none", "linewidth": 2.0, "zorder": 2.5}
# Text stays text, in the reader's own font; nothing depends on the day or is drawn at random.
STYLE: dict[Any, Any] = {
    "font.family": "sans-serif",
    "font.sans-serif": ["DejaVu Sans"],
    "hatch.linewidth": 0.7,
    "svg.fonttype": "none",
    "svg.hashsalt": "distdl_rma",
}


class Canvas:
    """A white sheet with x to the right and y downwards, 80 units of ten pixels wide."""

    def __init__(self, height: float, title: str, more: str = "") -> None:
        self.figure = Figure(figsize=(80 * 7.5 / 72, height * 7.5 / 72), facecolor="white")
        self.axes = self.figure.add_axes((0, 0, 1, 1))
        self.axes.set(xlim=(0, 80), ylim=(height, 0))
        self.axes.set_axis_off()
        self.title((2, 2), title, more)

    def text(self, at: Point, text: str, **style: Any) -> None:
        """Write a text around a point."""
        default: Style = {"ha": "center", "va": "center", "fontsize": 9, "color": INK}
        self.axes.text(*at, text, **default | style)

    def title(self, at: Point, text: str, more: str = "") -> None:
        """Write in bold what follows below, and a line about it."""
        self.text(at, text, ha="left", fontsize=10, fontweight="bold")
        self.text((at[0], at[1] + 2.2), more, ha="left", color=GREY)

    def box(self, at: Point, size: Point, rank: int | None = None, text: str = "", **style: Any) -> None:
        """Draw a rectangle in a rank's colour; ``faint`` with much white in it."""
        colour = "white" if rank is None else shade(rank, style.pop("faint", False))
        default: Style = {"facecolor": colour, "edgecolor": INK, "linewidth": 0.8, "clip_on": False}
        self.axes.add_patch(Rectangle(at, *size, **default | style))
        if text:
            red, green, blue = to_rgb(colour)
            dark = 0.3 * red + 0.59 * green + 0.11 * blue < 0.5
            patch = {"facecolor": colour, "edgecolor": "none", "pad": 1} if "hatch" in style else None
            middle = at[0] + size[0] / 2, at[1] + size[1] / 2
            self.text(middle, text, color="white" if dark else INK, bbox=patch)

    def name(self, at: Point, text: str) -> None:
        """Write the name of a tensor."""
        self.text(at, text, fontsize=11, fontweight="bold")

    def badge(self, at: Point, rank: int) -> None:
        """Write a rank id where several colours or lines meet."""
        self.axes.add_patch(Circle(at, 1.15, facecolor="white", edgecolor=INK, linewidth=0.8, zorder=4))
        self.text(at, str(rank), zorder=5)

    def line(self, *points: Point, **style: Any) -> None:
        """Draw a line through points."""
        default: Style = {"color": INK, "linewidth": 1.0, "solid_capstyle": "butt", "clip_on": False}
        self.axes.plot(*zip(*points, strict=True), **default | style)

    def arrow(self, start: Point, end: Point, **style: Any) -> None:
        """Draw an arrow from one point to another."""
        default: Style = {
            "arrowstyle": "-|>",
            "mutation_scale": 9,
            "color": INK,
            "linewidth": 1.1,
            "zorder": 3,
        }
        patch = FancyArrowPatch(start, end, shrinkA=0, shrinkB=0, clip_on=False, **default | style)
        self.axes.add_patch(patch)

    def thread(self, start: Point, end: Point, rank: int | None, width: float) -> None:
        """Draw a line in a rank's colour, or a dark one above all of these."""
        style: Style = {"zorder": 1.6} if rank is None else {"color": shade(rank), "zorder": 1.5}
        self.line(start, end, linewidth=width, **style)


@dataclass(frozen=True)
class Plane:
    """A tensor on a canvas: from global indices to places.

    The last dimension goes to the right, the one before downwards, and so does a third, in steps of a
    pitch, one index at a time.
    """

    canvas: Canvas
    at: Point
    cell: Point
    pitch: float = 0

    def apart(self, P: Partition, rank: int, right: float, down: float) -> Plane:
        """Where a rank's shard is drawn, with gaps between the shards."""
        row, column = (0, *P.index_of(rank))[-2:]
        return replace(self, at=(self.at[0] + right * column, self.at[1] + down * row))

    def place(self, box: Box) -> tuple[Point, Point]:
        """Corner and size of a box."""
        (first, _), (top, bottom), (left, right) = ((0, 1), (0, 1), *box.bounds)[-3:]
        corner = self.at[0] + left * self.cell[0], self.at[1] + first * self.pitch + top * self.cell[1]
        return corner, ((right - left) * self.cell[0], (bottom - top) * self.cell[1])

    def point(self, box: Box, x: float = 0.5, y: float = 0.5) -> Point:
        """A point of a box, its middle unless told otherwise."""
        (left, top), (width, height) = self.place(box)
        return left + x * width, top + y * height

    def box(self, box: Box, rank: int | None = None, text: str = "", **style: Any) -> None:
        """Draw a box of global indices."""
        self.canvas.box(*self.place(box), rank, text, **style)

    def shard(self, box: Box, rank: int) -> None:
        """Draw a box with lines between its elements and the rank in the middle."""
        self.box(box, rank)
        rows, columns = (1, *box.shape)[-2:]
        thin: Style = {"color": "white", "linewidth": 0.5, "zorder": 1}
        for n in range(1, columns):
            self.canvas.line(*(self.point(box, n / columns, y) for y in (0, 1)), **thin)
        for n in range(1, rows):
            self.canvas.line(*(self.point(box, x, n / rows) for x in (0, 1)), **thin)
        self.canvas.badge(self.point(box), rank)


def shade(rank: int, faint: bool = False) -> str:
    """Colour of a rank."""
    rgb = [round(255 * (1 - 0.35 * (1 - c) if faint else c)) for c in to_rgb(PALETTE[rank])]
    return "#{:02x}{:02x}{:02x}".format(*rgb)


def svg(draw: Callable[[], Canvas]) -> str:
    """Draw a figure; its text is the same on every day."""
    with mpl.rc_context(), StringIO() as file:
        # Whatever style the user has.
        mpl.rcdefaults()
        mpl.rcParams.update(STYLE)
        draw().figure.savefig(file, format="svg", metadata={"Date": None, "Creator": None})
        return "\n".join(line.rstrip() for line in file.getvalue().splitlines()) + "\n"
