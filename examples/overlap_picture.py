"""A picture of traces: ``python examples/overlap_picture.py TRACE.json ... --output PICTURE.png``.

Each rank has a band: below what it does, above what travels meanwhile.
"""

from __future__ import annotations

import argparse
import json
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from matplotlib.figure import Figure
from matplotlib.patches import Patch

if TYPE_CHECKING:
    from matplotlib.axes import Axes

# By kind, from start to fuse as the document has them; what is not listed is the last of its list.
DOES = {
    "start": "#ff7f00",
    "local": "#2b7bba",
    "wait": "#ef8a80",
    "remote": "#56c7b5",
    "fuse": "#8e5ea2",
    "scale": "#9ecae1",
    "agree": "#969696",
}
TRAVELS = {"exchange": "#a6611a", "norm allreduce": "#7fbc41", "allreduce": "#1b7837"}
BACKWARD = "#f3f1ec"
WIDTH_INCHES, BAND_INCHES, REST_INCHES = 13, 0.95, 1.5
DOES_HEIGHT, TRAVELS_HEIGHT = 0.42, 0.4
# Shorter ones would be too thin to be seen: a share of the whole time.
LEAST_WIDTH = 0.0012
CHARACTERS_PER_WIDTH = 165


@dataclass(frozen=True)
class Bar:
    """An event of a trace, in milliseconds."""

    kind: str
    name: str
    begin: float
    end: float
    backward: bool = False


@dataclass
class Band:
    """What a rank does, and what travels for it."""

    does: list[Bar]
    travels: list[Bar]


def bands(trace: Mapping[str, Any]) -> dict[int, Band]:
    """Bars of each rank of a trace."""
    found: dict[int, Band] = defaultdict(lambda: Band([], []))
    begun: dict[int, float] = {}
    for row in trace["traceEvents"]:
        if row["ph"] == "M":
            continue
        band, kind, at = found[row["pid"]], row["cat"], row["ts"] / 1e3
        name = row["name"].removeprefix(f"{kind} ")
        if row["ph"] == "X":
            band.does.append(Bar(kind, name, at, at + row["dur"] / 1e3, row["args"]["backward"]))
        elif row["ph"] == "b":
            begun[row["id"]] = at
        else:
            band.travels.append(Bar(travelling(kind, name), name, begun[row["id"]], at))
    return dict(sorted(found.items()))


def travelling(kind: str, name: str) -> str:
    """Kind of what travels; norms have allreduces of their own."""
    if kind == "allreduce" and "(norm" in name:
        return "norm allreduce"
    return kind if kind in TRAVELS else "exchange"


def in_rows(bars: Sequence[Bar]) -> list[list[Bar]]:
    """Bars in as few rows as hold them side by side."""
    rows: list[list[Bar]] = []
    for bar in sorted(bars, key=lambda bar: bar.begin):
        free = next((row for row in rows if row[-1].end <= bar.begin), None)
        if free is None:
            rows.append(free := [])
        free.append(bar)
    return rows


def draw(traces: Mapping[str, Mapping[str, Any]], path: Path) -> None:
    """Write a picture of some traces, by title, one below the other and on one scale of time."""
    panels = {title: bands(trace) for title, trace in traces.items()}
    bars = [bar for panel in panels.values() for band in panel.values() for bar in band.does + band.travels]
    latest = max((bar.end for bar in bars), default=1.0)
    heights = [BAND_INCHES * len(panel) for panel in panels.values()]
    figure = Figure((WIDTH_INCHES, sum(heights) + REST_INCHES * len(panels)), dpi=100, layout="constrained")
    axes = figure.subplots(len(panels), squeeze=False, sharex=True, height_ratios=heights)[:, 0]
    for part, (title, panel) in zip(axes, panels.items(), strict=True):
        part.set_title(title, loc="left", fontsize=11)
        draw_panel(part, panel, latest)
    axes[-1].set_xlabel("milliseconds")
    kinds = {bar.kind for bar in bars}
    patches = [Patch(color=colour, label=kind) for kind, colour in (DOES | TRAVELS).items() if kind in kinds]
    patches.append(Patch(color=BACKWARD, label="backward"))
    figure.legend(handles=patches, loc="outside lower center", ncols=len(patches), frameon=False, fontsize=9)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path)


def draw_panel(axes: Axes, panel: Mapping[int, Band], latest: float) -> None:
    """Draw the bands of all ranks, the first on top."""
    thin = LEAST_WIDTH * latest
    for at, band in enumerate(panel.values()):
        shade_backward(axes, band, at)
        for bar in sorted(band.does, key=lambda bar: (bar.begin, -bar.end)):
            draw_bar(axes, bar, (at + 0.02, DOES_HEIGHT), DOES.get(bar.kind, DOES["agree"]), thin)
            label(axes, bar, at + 0.02 + DOES_HEIGHT / 2, latest)
        rows = in_rows(band.travels)
        height = TRAVELS_HEIGHT / max(len(rows), 2)
        for number, row in enumerate(rows):
            # Towards what the rank does: the first row is next to it.
            bottom = at - (number + 1) * height
            for bar in row:
                draw_bar(axes, bar, (bottom, 0.85 * height), TRAVELS[bar.kind], thin)
    axes.set_yticks(range(len(panel)), [f"rank {rank}" for rank in panel])
    axes.set(xlim=(0, 1.01 * latest), ylim=(len(panel) - 0.45, -0.5))
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.tick_params(left=False)


def draw_bar(axes: Axes, bar: Bar, extent: tuple[float, float], colour: str, thin: float) -> None:
    width = max(bar.end - bar.begin, thin)
    axes.broken_barh([(bar.begin, width)], extent, facecolors=colour, edgecolors="white", linewidth=0.2)


def label(axes: Axes, bar: Bar, middle: float, latest: float) -> None:
    """Write the name of a layer into what it computes, where it fits."""
    if bar.kind == "local" and (bar.end - bar.begin) / latest * CHARACTERS_PER_WIDTH > len(bar.name):
        centre = (bar.begin + bar.end) / 2
        axes.text(centre, middle, bar.name, ha="center", va="center", color="white", fontsize=7, clip_on=True)


def shade_backward(axes: Axes, band: Band, at: int) -> None:
    back = [bar for bar in band.does if bar.backward]
    if back:
        begin, end = min(bar.begin for bar in back), max(bar.end for bar in back)
        axes.broken_barh([(begin, end - begin)], (at - 0.46, 0.93), facecolors=BACKWARD, zorder=0)


def main() -> None:
    parser = argparse.ArgumentParser(prog="overlap_picture.py", description="Draw traces.")
    parser.add_argument(
        "traces", type=Path, nargs="+", help="files in Chrome's trace format, of this library"
    )
    parser.add_argument("--output", type=Path, default=Path("overlap.png"), help="picture (%(default)s)")
    chosen = parser.parse_args()
    draw({path.stem: json.loads(path.read_text()) for path in chosen.traces}, chosen.output)


if __name__ == "__main__":
    main()
