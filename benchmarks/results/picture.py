"""Ratios of rows with their targets and their last values, as a picture."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from io import StringIO
from typing import Any

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from benchmarks.results.history import Entry

SMALLEST = 0.01
INK, GREY, MET, MISSED, BEFORE = "#222222", "#666666", "#0077BB", "#CC3311", "#BBBBBB"
# Text stays text, in the reader's own font; nothing depends on the day or is drawn at random.
STYLE: dict[Any, Any] = {
    "font.family": "sans-serif",
    "font.sans-serif": ["DejaVu Sans"],
    "font.size": 8,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.edgecolor": GREY,
    "xtick.color": GREY,
    "ytick.color": INK,
    "text.color": INK,
    "axes.labelcolor": INK,
    "legend.frameon": False,
    "svg.fonttype": "none",
    "svg.hashsalt": "distdl_rma",
}


def svg(draw: Callable[[], Figure]) -> str:
    """Draw a figure in the style of this folder, whatever style the user has."""
    with mpl.rc_context(), StringIO() as file:
        mpl.rcdefaults()
        mpl.rcParams.update(STYLE)
        draw().savefig(file, format="svg", metadata={"Date": None, "Creator": None})
        return "\n".join(line.rstrip() for line in file.getvalue().splitlines()) + "\n"


def ratios(entries: Sequence[Entry], before: Mapping[tuple[str, str], Entry], title: str) -> Figure:
    """A line per row: the ratio with its spread, a tick at the target, and the ratio of the run before."""
    figure = Figure(figsize=(10, 1.2 + 0.19 * len(entries)), facecolor="white", layout="constrained")
    axes = figure.add_subplot()
    for at, entry in enumerate(entries):
        _one(axes, at, entry, before.get(entry.key))
    axes.set_yticks(range(len(entries)), [f"{e.row.what} | {e.row.baseline}" for e in entries])
    axes.set_ylim(len(entries) - 0.4, -0.6)
    axes.set_xscale("log")
    axes.xaxis.set_major_formatter("{x:g}")
    axes.axvline(1.0, color=GREY, linewidth=0.6, zorder=0)
    axes.grid(axis="y", color="#EEEEEE", linewidth=0.6, zorder=0)
    axes.tick_params(axis="y", length=0)
    axes.set_xlabel("ratio to the baseline: lower is better")
    axes.set_title(title, loc="left", fontsize=9, fontweight="bold")
    _legend(axes)
    return figure


def _one(axes: Axes, at: int, entry: Entry, before: Entry | None) -> None:
    row = entry.row
    if before is not None:
        axes.plot(max(before.row.ratio, SMALLEST), at, "o", color=BEFORE, markersize=5, zorder=1)
    met = row.target is None or row.ratio <= row.target
    style: dict[str, Any] = {"color": MET if met else MISSED, "markersize": 5, "zorder": 3}
    # Zero, and what is below it, has no place on a logarithmic scale.
    shown = max(row.ratio, SMALLEST)
    below = min(entry.spread, shown - SMALLEST)
    axes.errorbar(shown, at, xerr=[[below], [entry.spread]], fmt="o" if met else "D", **style)
    if row.target is not None:
        axes.plot(row.target, at, "|", color=INK, markersize=9, zorder=2)


def _legend(axes: Axes) -> None:
    shown: tuple[tuple[str, str, str], ...] = (
        ("o", MET, "target met, or none"),
        ("D", MISSED, "target missed"),
        ("|", INK, "target"),
        ("o", BEFORE, "the run before"),
    )
    marks = [
        axes.plot([], [], marker, color=colour, label=label, markersize=6)[0]
        for marker, colour, label in shown
    ]
    # Above the rows: wherever else it stood, a row would lie under it.
    axes.legend(handles=marks, loc="lower right", bbox_to_anchor=(1, 1), ncols=len(marks), fontsize=7)
