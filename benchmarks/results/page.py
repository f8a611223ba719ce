"""Measured rows as Markdown, by themselves or within a page."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Sequence

from benchmarks.results.history import Entry
from benchmarks.row import Row

HEAD = "| what | against | ratio | target | ours | baseline |\n|---|---|---:|---:|---:|---:|"
# Name, size, and form of a row of a function; the name may have commas.
FUNCTION = re.compile(r"^function (.*), ((?:\d+x)+\d+|\d+ tokens of \d+)(?:, (bfloat16|time added))?$")
FORMS = "", "bfloat16", "time added", "volume", "volume bfloat16"
HEAD_OF_FUNCTIONS = (
    "| function | of | float32 | bfloat16 | small, time added | of a volume, float32 | bfloat16 |\n"
    "|---|---|---|---|---|---|---|"
)
NONE = "Not measured on this machine yet."
# Between these lines a page belongs to whoever writes it from measurements.
BEGIN, END = "<!-- {name}: written by {command} -->", "<!-- {name}: end -->"


def table(entries: Iterable[Entry]) -> str:
    """A row per entry; ratios above their target are bold. Words where there are none."""
    lines = [_line(entry.row) for entry in entries]
    return "\n".join([HEAD, *lines]) if lines else NONE


def side_by_side(entries: Iterable[Entry]) -> str:
    """A row for what was measured, with ratio, target and own time against each baseline."""
    found: dict[str, dict[str, Row]] = defaultdict(dict)
    for entry in entries:
        what, of, kind = entry.row.what.rpartition(", peak memory")
        # The memory of a step stands beside its time.
        column = f"peak memory{kind}, {entry.row.baseline}" if of else entry.row.baseline
        found[f"{what}, training step" if of else kind][column] = entry.row
    against = list(dict.fromkeys(baseline for rows in found.values() for baseline in rows))
    lines = [f"| what | {' | '.join(against)} |", f"|---|{'---|' * len(against)}"]
    lines += [
        f"| {what} | {' | '.join(_form(rows.get(baseline)) for baseline in against)} |"
        for what, rows in found.items()
    ]
    return "\n".join(lines) if found else NONE


def functions(entries: Iterable[Entry]) -> str:
    """A row per function and size: its forms side by side, those farthest from a target first."""
    forms: dict[tuple[str, str], dict[str, Row]] = defaultdict(dict)
    beside: list[tuple[str, str, str, Row]] = []
    for row in (entry.row for entry in entries):
        name, size, form = _parts(row)
        if form == "time added":
            beside.append((name, size, form, row))
        elif size.count("x") == 2:
            # A function of volumes stands beside that of images: convolution 3x3x3 beside convolution 3x3.
            flat = re.sub(r"(\d)x\1x\1", r"\1x\1", name).replace("trilinear", "bilinear")
            beside.append((flat, size, f"volume {form}".strip(), row))
        else:
            forms[name, size][form] = row
    for name, size, form, row in beside:
        # Beside the first size of the function.
        key = next((key for key in forms if key[0] == name), (name, size))
        forms[key][form] = row

    def worst(found: dict[str, Row]) -> float:
        return max(row.ratio / (row.target or 1.0) for row in found.values())

    lines = [
        f"| {name} | {size} | {' | '.join(_form(found.get(form)) for form in FORMS)} |"
        for (name, size), found in sorted(forms.items(), key=lambda item: worst(item[1]), reverse=True)
    ]
    return "\n".join([HEAD_OF_FUNCTIONS, *lines]) if lines else NONE


def _parts(row: Row) -> tuple[str, str, str]:
    found = FUNCTION.match(row.what)
    if found is None:
        raise ValueError(f"no row of a function: {row.what!r}")
    return found[1], found[2], found[3] or ""


def _form(row: Row | None) -> str:
    if row is None:
        return ""
    limit = row.baseline if row.baseline[:1].isdigit() else row.target and f"{row.target:g}"
    return f"{_ratio(row)}{f' of {limit}' * bool(limit)}, {_value(row.ours_us, row.ours_spread_us, row.unit)}"


def _ratio(row: Row) -> str:
    met = row.target is None or row.ratio <= row.target
    return f"{row.ratio:.2f}" if met else f"**{row.ratio:.2f}**"


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
    cells = (
        row.what,
        row.baseline,
        _ratio(row),
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
