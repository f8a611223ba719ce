"""The picture of docs/architecture.md: floors, rooms and who imports whom, drawn from the imports themselves.

``python docs/house.py`` writes docs/images/architecture.svg. What is above imports from below; arrows that
follow from others are left out. A folder shows how many files it has.
"""

from __future__ import annotations

import ast
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path

from sheet import INK, Canvas, svg

__all__ = ["drawn", "floors", "imports"]

PACKAGE = Path(__file__).parents[1] / "distdl_rma"
LEFT, WIDTH, GAP = 14.0, 65.0, 1.2
HEIGHT, BETWEEN = 1.6, 0.8  # of a room, and of the arrows between two rows
LONGEST = 7  # rooms in a row

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


def _draw(graph: Graph) -> Canvas:
    plan = floors(graph)
    total = sum((HEIGHT + BETWEEN) * len(rows) + BETWEEN + 0.4 for rows in plan.values()) + 6
    more = (
        "what is above imports from below; arrows that follow from others are left out; a number counts files"
    )
    canvas = Canvas(total, "Packages and their imports", more)
    top = 5.5
    for floor, rows in plan.items():
        height = (HEIGHT + BETWEEN) * len(rows) + BETWEEN
        canvas.box((LEFT - 1, top), (WIDTH + 2, height), facecolor="#F4F4F4", edgecolor="none", zorder=0)
        canvas.text((LEFT - 2, top + height / 2), floor, ha="right", fontsize=10, fontweight="bold")
        _draw_rows(canvas, rows, top, direct(between(graph, floor)))
        top += height + 0.4
    return canvas


def _draw_rows(canvas: Canvas, rows: list[list[Room]], top: float, below: Graph) -> None:
    ends: dict[str, tuple[float, float]] = {}
    for row in rows:
        left, top = LEFT, top + BETWEEN
        texts = [f"{room.name}  {len(room.files)}" if room.files else room.name for room in row]
        spare = (WIDTH - GAP * (len(row) - 1) - sum(map(len, texts))) / len(row)
        for room, text in zip(row, texts, strict=True):
            width = len(text) + spare
            colour = "white" if room.files else "#E4EEF6"
            canvas.box((left, top), (width, HEIGHT), facecolor=colour, zorder=2)
            canvas.text((left + width / 2, top + HEIGHT / 2), text, fontsize=8, zorder=4)
            ends[room.name] = left + width / 2, top
            left += width + GAP
        top += HEIGHT
    for upper, others in sorted(below.items()):
        for lower in sorted(others):
            (x, y), end = ends[upper], ends[lower]
            canvas.arrow((x, y + HEIGHT), end, color=INK, linewidth=0.6, mutation_scale=6, zorder=1)


def drawn() -> str:
    """SVG of the house as it stands."""
    graph = imports()
    return svg(lambda: _draw(graph))


if __name__ == "__main__":
    (Path(__file__).parent / "images" / "architecture.svg").write_text(drawn())
