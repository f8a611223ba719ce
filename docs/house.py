"""The picture of docs/architecture.md: floors, rooms and who imports whom, drawn from the imports themselves.

``python docs/house.py`` writes docs/images/architecture.svg. What is above imports from below; arrows that
follow from others are left out.
"""

from __future__ import annotations

import ast
import textwrap
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path

from sheet import GREY, INK, Canvas, svg

__all__ = ["drawn", "floors", "imports"]

PACKAGE = Path(__file__).parents[1] / "distdl_rma"
LEFT, WIDTH, GAP = 12.0, 67.0, 1.2
LINE, HEAD, BETWEEN = 1.25, 2.2, 1.6
CHARACTERS = 1.72  # of a list of files, per unit of width
LONGEST = 6  # rooms in a row

Graph = dict[str, set[str]]


def imports(package: Path = PACKAGE) -> Graph:
    """Modules by their path below the package, such as ``ops.conv.kernels``, and those that each imports."""
    modules = {path: _name(package, path) for path in sorted(package.rglob("*.py"))}
    modules = {path: name for path, name in modules.items() if name}
    known = set(modules.values())
    return {name: _imported(path, package.name, known) - {name} for path, name in modules.items()}


def _name(package: Path, path: Path) -> str:
    return ".".join(path.relative_to(package).with_suffix("").parts).removesuffix("__init__").rstrip(".")


def _imported(path: Path, package: str, known: Collection[str]) -> set[str]:
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module and f"{node.module}.".startswith(f"{package}."):
            home = node.module.removeprefix(package).lstrip(".")
            inner = {f"{home}.{alias.name}".lstrip(".") for alias in node.names}
            found |= {name if name in known else home for name in inner}
    return found & set(known)


def between(graph: Mapping[str, Collection[str]], floor: str = "") -> Graph:
    """Who imports whom among the rooms of a floor, or among the floors."""
    prefix = f"{floor}." if floor else ""
    rooms: Graph = {}
    for name, others in graph.items():
        if name.startswith(prefix):
            room = name.removeprefix(prefix).split(".")[0]
            below = {o.removeprefix(prefix).split(".")[0] for o in others if o.startswith(prefix)}
            rooms.setdefault(room, set()).update(below - {room})
    return rooms


def levels(graph: Graph) -> dict[str, int]:
    """How far up each one is: above all that it imports. ``ValueError`` if there is a circle."""
    level: dict[str, int] = {}
    while len(level) < len(graph):
        ready = {one for one, below in graph.items() if one not in level and below <= level.keys()}
        if not ready:
            raise ValueError(f"a circle of imports among {sorted(graph.keys() - level.keys())}")
        level |= {one: max((level[other] + 1 for other in graph[one]), default=0) for one in ready}
    return level


def direct(graph: Graph) -> Graph:
    """The imports that do not follow from others."""

    def reached(one: str) -> set[str]:
        return graph[one].union(*(reached(other) for other in graph[one]))

    return {
        one: {o for o in below if not any(o in reached(p) for p in below)} for one, below in graph.items()
    }


@dataclass(frozen=True)
class Room:
    """A folder with its files, or a file that lies on the landing."""

    name: str
    files: tuple[str, ...]

    def lines(self, width: float) -> list[str]:
        """The files, as text of that width."""
        return textwrap.wrap(", ".join(self.files), int(width * CHARACTERS), break_long_words=False)


def floors(graph: Graph) -> dict[str, list[list[Room]]]:
    """Floors from above to below, each with rows of rooms from above to below, as far up as they can be."""
    house = between(graph)
    height = levels(house)
    found = {}
    for floor in sorted(house, key=lambda one: (-height[one], one)):
        inside = between(graph, floor)
        depth = levels({room: {o for o in inside if room in inside[o]} for room in inside})
        rooms = [_room(graph, floor, name) for name in sorted(inside)] or [Room(floor, ())]
        rows = [
            [room for room in rooms if depth.get(room.name, 0) == n] for n in sorted({0, *depth.values()})
        ]
        found[floor] = [part for row in rows for part in _fitting(row)]
    return found


def _fitting(row: list[Room]) -> list[list[Room]]:
    # Where a row is too long, folders come first; those of a row do not import each other.
    if len(row) <= LONGEST:
        return [row]
    folders, files = ([room for room in row if bool(room.files) is folder] for folder in (True, False))
    return [part[n : n + LONGEST] for part in (folders, files) for n in range(0, len(part), LONGEST)]


def _room(graph: Graph, floor: str, name: str) -> Room:
    home = f"{floor}.{name}."
    folders = {one.rpartition(".")[0] for one in graph}
    return Room(
        name,
        tuple(sorted(one.removeprefix(home) for one in graph if one.startswith(home) and one not in folders)),
    )


def _widths(row: list[Room]) -> list[float]:
    # Names fit; folders share what is left by the length of their lists.
    names = [[room.name + "...", *(file for file in room.files)] for room in row]
    wanted = [max(len(words[0]) * 0.7, *(len(w) / CHARACTERS + 1 for w in words)) for words in names]
    lengths = [sum(map(len, room.files)) for room in row]
    spare = WIDTH - sum(wanted) - GAP * (len(row) - 1)
    shares = [length / sum(lengths) if any(lengths) else 1 / len(row) for length in lengths]
    return [width + spare * share for width, share in zip(wanted, shares, strict=True)]


def _draw(graph: Graph) -> Canvas:
    plan = floors(graph)
    heights = {floor: [_height(row) for row in rows] for floor, rows in plan.items()}
    total = sum(sum(rows) + BETWEEN * (len(rows) + 1) + 1 for rows in heights.values()) + 6
    canvas = Canvas(
        total, "The house", "what is above imports from below; arrows that follow from others are left out"
    )
    top, bands = 5.5, {}
    for floor, rows in plan.items():
        bottom = top + sum(heights[floor]) + BETWEEN * (len(rows) + 1)
        canvas.box(
            (LEFT - 1, top), (WIDTH + 2, bottom - top), facecolor="#F4F4F4", edgecolor="none", zorder=0
        )
        canvas.text((LEFT - 2, top + BETWEEN + HEAD / 2), floor, ha="right", fontsize=10, fontweight="bold")
        _draw_rows(canvas, rows, heights[floor], top, direct(between(graph, floor)))
        bands[floor] = top, bottom
        top = bottom + 1
    return canvas


def _height(row: list[Room]) -> float:
    texts = (room.lines(width) for room, width in zip(row, _widths(row), strict=True))
    return HEAD + LINE * max(map(len, texts))


def _draw_rows(
    canvas: Canvas, rows: list[list[Room]], heights: list[float], top: float, below: Graph
) -> None:
    ends: dict[str, tuple[float, float, float]] = {}
    for row, height in zip(rows, heights, strict=True):
        left, top = LEFT, top + BETWEEN
        for room, width in zip(row, _widths(row), strict=True):
            lines = room.lines(width)
            size = HEAD + LINE * len(lines)
            colour = "white" if room.files else "#E4EEF6"
            canvas.box((left, top), (width, size), facecolor=colour, zorder=2)
            canvas.text((left + width / 2, top + HEAD / 2), room.name, fontsize=8.5, zorder=4)
            for n, line in enumerate(lines):
                at = left + width / 2, top + HEAD + LINE * (n + 0.3)
                canvas.text(at, line, fontsize=6.5, color=GREY, zorder=4)
            ends[room.name] = left + width / 2, top, top + size
            left += width + GAP
        top += height
    for upper, others in sorted(below.items()):
        for lower in sorted(others):
            start, end = (ends[upper][0], ends[upper][2]), (ends[lower][0], ends[lower][1])
            canvas.arrow(start, end, color=INK, linewidth=0.6, mutation_scale=6, zorder=1)


def drawn() -> str:
    """SVG of the house as it stands."""
    graph = imports()
    return svg(lambda: _draw(graph))


if __name__ == "__main__":
    (Path(__file__).parent / "images" / "architecture.svg").write_text(drawn())
