"""What pages say of the gain: tables and sentences, all of the same numbers."""

from __future__ import annotations

import math
import statistics
import textwrap
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

from benchmarks.gains.networks import NETWORKS
from benchmarks.gains.rows import RANKS, alone, counted, on_one_rank, part
from benchmarks.gains.store import Kept, Measured
from benchmarks.results import page
from benchmarks.row import Row
from benchmarks.scaling.cases import CASES, Case
from benchmarks.scaling.forecast import NODE, SLOW, on
from benchmarks.scaling.model import Constants, step_seconds
from benchmarks.scaling.page import table

COMMAND = "python -m benchmarks.gains docs"
# Where a machine has fewer cores than ranks.
DASH = "-"
COLUMNS = 140
SMALL, LARGE, VOLUME = "unet-128", "unet-1024", "scaffold-64"
VOLUMES_SHOWN = VOLUME, "scaffold-96"
IMAGES, VOLUMES = CASES
# Networks of the model, with a wire and a number of ranks: slices, then blocks.
GRIDS = (
    (IMAGES, (512, 512), NODE, ((4, 1), (2, 2))),
    (IMAGES, (512, 512), SLOW, ((64, 1), (8, 8))),
    (VOLUMES, (64, 64, 64), NODE, ((4, 1, 1), (2, 2, 1))),
    (VOLUMES, (64, 64, 64), SLOW, ((8, 1, 1), (4, 2, 1), (2, 2, 2))),
)


@dataclass(frozen=True)
class Gain:
    """The rows of a network by their number of ranks; None where this machine has none."""

    name: str
    measured: Measured

    @property
    def shown(self) -> str:
        return NETWORKS[self.name].shown

    def time(self, size: int) -> Row | None:
        """A step, beside one process with as many threads as ranks."""
        return self._scaling("strong", size, alone(size))

    def kernels(self, size: int) -> Row | None:
        """A step, beside one rank with as many threads, which has the same kernels."""
        return self._scaling("strong", size, on_one_rank(size))

    def weak(self, size: int) -> Row | None:
        """A step, beside one rank that has the work of one of them."""
        return self._scaling("weak", size, part(size))

    def memory(self, size: int) -> Row | None:
        """Peak memory of a rank, beside one process.

        That of the one process depends on chance. It was measured for each number of ranks: the median stands
        for all of them.
        """
        what = f"peak memory of a rank of {{}}, unmodified {NETWORKS[self.name].what}"
        rows = {each: self.measured.row(what.format(each), "one process") for each in RANKS}
        row, alone = rows[size], [each.baseline_us for each in rows.values() if each]
        return row and replace(row, baseline_us=statistics.median(alone))

    def _scaling(self, kind: str, size: int, baseline: str) -> Row | None:
        what = f"{kind} scaling, {NETWORKS[self.name].what}, {counted(size, 'rank')}"
        return self.measured.row(what, baseline)


def blocks(kept: Kept, constants: Constants) -> dict[str, dict[str, str]]:
    """What stands between the lines of a page, by page and name."""
    found = kept.networks
    gains = [Gain(name, measured) for name, measured in found.items()]
    return {
        "README.md": {"gains": in_short(gains)},
        "docs/scaling.md": {"gains": f"{of(found)}\n\n{everything(gains)}", "kernels": kernels(found)},
        "docs/benchmarks.md": {"gains": in_words(gains), "scaffold": scaffold(kept)},
        "docs/convert.md": {"sizes": sizes(found), "grids": grids(constants)},
    }


def written(text: str, contents: Mapping[str, str]) -> str:
    """A page with its contents, sentences in lines of the usual width."""
    for name, content in contents.items():
        parts = [
            part if part.startswith("|") else textwrap.fill(part, COLUMNS, break_on_hyphens=False)
            for part in content.split("\n\n")
        ]
        text = page.rewritten(text, name, COMMAND, "\n\n".join(parts))
    return text


def of(found: Mapping[str, Measured]) -> str:
    """Of which runs the numbers are."""
    told: dict[str, list[str]] = {}
    for name, each in found.items():
        run = f"{each.machine}, commit {each.commit}, {each.time[:10]}, {each.software}"
        told.setdefault(run, []).append(NETWORKS[name].shown)
    runs = [f"{run} ({'; '.join(names)})" for run, names in told.items()] if len(told) > 1 else list(told)
    return f"Measured on {'; '.join(runs)}."


def everything(gains: list[Gain]) -> str:
    """The table that owns the numbers: a row per network and number of ranks."""
    heads = (
        "network, ranks",
        "ms a step",
        "one process, as many threads",
        "ratio",
        "of one rank, as many threads",
        "of one rank with its part alone",
        "MiB of a rank",
        "one process",
        "ratio",
    )
    rows = []
    for gain in gains:
        for size in RANKS:
            time, memory = gain.time(size), gain.memory(size)
            rows.append(
                (
                    f"{gain.shown}, {counted(size, 'rank')}",
                    *((_ms(time, True), _ms(time, False), _ratio(time)) if time else (DASH,) * 3),
                    _ratio(gain.kernels(size)) if size > 1 else "",
                    _ratio(gain.weak(size)) if size > 1 else "",
                    *((_mib(memory, True), _mib(memory, False), _ratio(memory)) if memory else (DASH,) * 3),
                )
            )
    return table(heads, rows)


def in_short(gains: list[Gain]) -> str:
    """The same in a table of few columns."""
    heads = (
        "training step, one sample",
        "time on 2 ranks",
        "memory of each of 2 ranks",
        "of each of 4 ranks",
    )
    rows = []
    for gain in gains:
        time, two, four = gain.time(2), gain.memory(2), gain.memory(4)
        rows.append(
            (
                gain.shown,
                f"**{_ratio(time)}**: {time.ours_us / 1e3:,.0f} of {time.baseline_us / 1e3:,.0f} ms"
                if time
                else DASH,
                f"**{_ratio(two)}**: {two.ours_us:,.0f} of {two.baseline_us:,.0f} MiB" if two else DASH,
                _ratio(four),
            )
        )
    return table(heads, rows)


def kernels(found: Mapping[str, Measured]) -> str:
    """How much of the gain of volumes is that of kernels."""
    said = []
    for name in VOLUMES_SHOWN:
        gain, extents = Gain(name, found[name]), " x ".join(map(str, NETWORKS[name].shape))
        said.append(
            f"on {extents} one rank takes {_ratio(gain.time(1))} of the time of the network alone on one"
            f" thread, by its kernels, and two ranks {_ratio(gain.kernels(2))} of the time of one rank with"
            " two threads, by the cut"
        )
    return f"Of the 3-D U-Net: {'; '.join(said)}."


def in_words(gains: list[Gain]) -> str:
    """A sentence for a page of many other rows."""
    said = "; ".join(
        f"{gain.shown}: {_ratio(gain.time(2))} of the time, {_ratio(gain.memory(2))} of the memory"
        for gain in gains
    )
    return f"On 2 ranks, of one process with 2 threads: {said}."


def scaffold(kept: Kept) -> str:
    """A step of ScaFFold's network, and whole trainings."""
    gain = Gain(VOLUME, kept.networks[VOLUME])
    time, memory = gain.time(2), gain.memory(2)
    if time is None or memory is None:
        return page.NONE
    extents = " x ".join(map(str, NETWORKS[VOLUME].shape))
    step = (
        f"A step of one volume of {extents} with 8 to 32 channels, in single precision, takes"
        f" {time.ours_us / 1e3:,.0f} ms on 2 ranks of one thread. The model alone with 2 threads takes"
        f" {time.baseline_us / 1e3:,.0f} ms: the ratio is {_ratio(time)}. Each rank needs {_ratio(memory)} of"
        " the memory of the model alone."
    )
    heads = (
        "trained to a Dice of 0.95",
        "seconds",
        "epochs",
        "Dice",
        "largest difference of losses",
        "of scores",
    )
    rows = [
        (
            counted(each.ranks, "rank"),
            f"{each.seconds:.1f}" if each.ranks <= kept.cores else DASH,
            f"{each.epochs}",
            f"{each.dice:.4f}",
            f"{each.losses:.1e}" if each.ranks > 1 else "",
            f"{each.scores:.1e}" if each.ranks > 1 else "",
        )
        for each in kept.trainings
    ]
    return f"{step}\n\n{table(heads, rows)}"


def sizes(found: Mapping[str, Measured]) -> str:
    """Where two ranks begin to gain."""
    small, large = (Gain(name, found[name]) for name in (SMALL, LARGE))
    return (
        f"On 2 ranks the {small.shown}, takes {_ratio(small.time(2))} of the time of one process with 2"
        f" threads, the {large.shown}, {_ratio(large.time(2))}. Beside one rank that has half of the image"
        f" alone, and so no neighbour, they take {_ratio(small.weak(2))} and {_ratio(large.weak(2))}."
    )


def grids(constants: Constants) -> str:
    """Predicted steps of slices and blocks."""
    rows = []
    for case, shape, wire, shapes in GRIDS:
        where = "a node" if wire == NODE else f"nodes of 2 ranks, {wire.rpartition(', ')[2]}"
        extents = " x ".join(map(str, shape))
        cells = list(_forecasts(case, shape, wire, shapes, constants))
        rows.append(
            (
                f"{case.name}, {extents}, {math.prod(shapes[0])} ranks of {where}",
                *cells,
                *[""] * (3 - len(cells)),
            )
        )
    heads = "step, as a part of that of slices", "slices", "blocks in two dimensions", "in three"
    return table(heads, rows)


def _forecasts(
    case: Case, shape: tuple[int, ...], wire: str, shapes: tuple[tuple[int, ...], ...], constants: Constants
) -> Iterator[str]:
    """Steps of grids as parts of the first one's: their seconds are those of another machine."""
    first = None
    for grid in shapes:
        size = math.prod(grid)
        network = on(constants, constants.wires[wire], (1, 1, *grid), size if wire == NODE else 2)
        step = step_seconds(replace(case, shape=shape), constants, network)
        first = first or step.seconds
        name, halos = " x ".join(map(str, grid)), f"halos {100 * step.halos / step.seconds:.0f} %"
        yield f"{name}: {step.seconds / first:.2f}, {halos}"


def _ratio(row: Row | None) -> str:
    return DASH if row is None else f"{row.ratio:.2f}"


def _ms(row: Row, ours: bool) -> str:
    middle, spread = (row.ours_us, row.ours_spread_us) if ours else (row.baseline_us, row.baseline_spread_us)
    return f"{middle / 1e3:,.0f} ± {spread / 1e3:,.0f}"


def _mib(row: Row, ours: bool) -> str:
    return f"{row.ours_us if ours else row.baseline_us:,.0f}"
