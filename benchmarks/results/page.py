"""Measured rows as Markdown, by themselves or within a page."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from benchmarks.results.history import Entry
from benchmarks.row import Row

HEAD = "| what | against | ratio | target | ours | baseline |\n|---|---|---:|---:|---:|---:|"
NONE = "Not measured on this machine yet."
# Between these lines a page belongs to whoever writes it from measurements.
BEGIN, END = "<!-- {name}: written by {command} -->", "<!-- {name}: end -->"


def table(entries: Iterable[Entry]) -> str:
    """A row per entry; ratios above their target are bold. Words where there are none."""
    lines = [_line(entry.row) for entry in entries]
    return "\n".join([HEAD, *lines]) if lines else NONE


def where(entries: Sequence[Entry]) -> str:
    """Of what, when, on how many ranks and by what the entries are."""
    runs: dict[tuple[str, str, str], list[Entry]] = {}
    for entry in entries:
        runs.setdefault((entry.commit, entry.time[:10], entry.software), []).append(entry)
    return "; ".join(
        f"commit {commit}, {day}, {software}, {ranks(found)}"
        + (f": {len(found)} of the rows" if len(runs) > 1 else "")
        for (commit, day, software), found in runs.items()
    )


def ranks(entries: Iterable[Entry]) -> str:
    """Numbers of ranks in words."""
    *others, last = sorted({entry.ranks for entry in entries})
    return f"{', '.join(map(str, others))} and {last} ranks" if others else f"{last} ranks"


def _line(row: Row) -> str:
    met = row.target is None or row.ratio <= row.target
    ratio = f"{row.ratio:.2f}"
    cells = (
        row.what,
        row.baseline,
        ratio if met else f"**{ratio}**",
        "" if row.target is None else f"{row.target:g}",
        _value(row.ours_us, row.ours_spread_us, row.unit),
        # A limit stands in the second column already.
        "" if row.baseline_spread_us == 0 and row.baseline[:1].isdigit() else _baseline(row),
    )
    return f"| {' | '.join(cells)} |"


def _baseline(row: Row) -> str:
    return _value(row.baseline_us, row.baseline_spread_us, row.unit)


def _value(middle: float, spread: float, unit: str) -> str:
    varies = f" ± {_number(spread, middle)}" if spread else ""
    return f"{_number(middle, middle)}{varies} {unit}"


def _number(value: float, scale: float) -> str:
    return f"{value:,.0f}" if scale >= 100 else f"{value:.3g}" if scale >= 10 else f"{value:.2g}"


def rewritten(text: str, name: str, command: str, content: str) -> str:
    """A page with other content between the lines of a name; ValueError where they are missing."""
    begin, end = BEGIN.format(name=name, command=command), END.format(name=name)
    before, found, rest = text.partition(begin)
    _, closed, after = rest.partition(end)
    if not (found and closed):
        raise ValueError(f"the page has no lines {begin!r} and {end!r} in this order")
    return f"{before}{begin}\n\n{content.strip()}\n\n{end}{after}"
