"""The figure of the page on scaling: what was checked, and what is predicted."""

from __future__ import annotations

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from benchmarks.results.picture import GREY, INK
from benchmarks.scaling.cases import CASES, Case
from benchmarks.scaling.forecast import ASSUMED, FAST, LARGE, SIZES, SLOW, checks, strong, weak, wires
from benchmarks.scaling.model import Constants
from benchmarks.scaling.page import PARTS, parts_of

# Paul Tol's colours, which colour-blind readers tell apart.
OF_PARTS = "#DDDDDD", "#88CCEE", "#44AA99", "#DDCC77", "#CC6677"
OF_WIRES = {SLOW: ("#882255", "-", "o"), FAST: ("#0077BB", "-", "s"), ASSUMED: ("#999933", "--", "^")}


def drawn(constants: Constants) -> Figure:
    """A row per network: steps that were checked, strong scaling, weak scaling."""
    figure = Figure(figsize=(11, 6.4), facecolor="white", layout="constrained")
    axes = figure.subplots(len(CASES), 3, width_ratios=(1.15, 1, 1))
    for row, case in zip(axes, CASES, strict=True):
        _checked(row[0], case, constants)
        _speedup(row[1], case, constants)
        _efficiency(row[2], case, constants)
    bars, lines = (axes[0][at].get_legend_handles_labels() for at in (0, 1))
    figure.legend(bars[0] + lines[0], bars[1] + lines[1], loc="outside lower center", ncols=5)
    return figure


def _checked(axes: Axes, case: Case, constants: Constants) -> None:
    found = [check for check in checks(constants) if check.case == case]
    left = [0.0] * len(found)
    for name, colour, at in zip(PARTS, OF_PARTS, range(len(PARTS)), strict=True):
        widths = [1e3 * parts_of(check.predicted)[at] for check in found]
        axes.barh(range(len(found)), widths, left=left, color=colour, label=f"predicted: {name}", height=0.55)
        left = [a + b for a, b in zip(left, widths, strict=True)]
    measured = [1e3 * check.measured for check in found]
    axes.plot(measured, range(len(found)), "D", color=INK, markersize=6, label="measured")
    axes.set_yticks(range(len(found)), [f"{check.ranks} ranks,\n{check.where}" for check in found])
    axes.set_ylim(len(found) - 0.5, -0.5)
    axes.set_xlabel("ms per step")
    _title(axes, f"Checked: {case.title}")


def _speedup(axes: Axes, case: Case, constants: Constants) -> None:
    for name, wire in wires(constants).items():
        colour, style, marker = OF_WIRES[name]
        seconds = [strong(case, constants, wire, size).seconds for size in SIZES]
        values = [seconds[0] / each for each in seconds]
        axes.plot(SIZES, values, style, color=colour, marker=marker, markersize=3.5, label=name)
    axes.plot(SIZES, SIZES, ":", color=GREY, label="ideal")
    axes.set_xscale("log", base=2)
    axes.set_yscale("log", base=2)
    _ranks(axes)
    shown = SIZES[::3]
    axes.set_yticks(shown, [f"{size:,}" for size in shown])
    axes.set_ylabel("times as fast as one process")
    _title(axes, f"Strong scaling: {'x'.join(map(str, LARGE[case.name]))}")


def _efficiency(axes: Axes, case: Case, constants: Constants) -> None:
    for name, wire in wires(constants).items():
        colour, style, marker = OF_WIRES[name]
        seconds = [weak(case, constants, wire, size).seconds for size in SIZES]
        values = [100 * seconds[0] / each for each in seconds]
        axes.plot(SIZES, values, style, color=colour, marker=marker, markersize=3.5)
    axes.axhline(100, color=GREY, linestyle=":")
    axes.set_xscale("log", base=2)
    axes.set_ylim(0, 105)
    _ranks(axes)
    axes.set_ylabel("efficiency, %")
    _title(axes, f"Weak scaling: {'x'.join(map(str, case.tile(2)))} per rank")


def _ranks(axes: Axes) -> None:
    shown = SIZES[::3]
    axes.set_xticks(shown, [f"{size:,}" for size in shown])
    axes.grid(color="#EEEEEE", linewidth=0.6)
    axes.set_xlabel("ranks")


def _title(axes: Axes, text: str) -> None:
    axes.set_title(text, loc="left", fontsize=9, fontweight="bold")
