"""Which MPI tests run on how many ranks, and with which of their seeds.

Without ``--day`` all of them run, as in ``make test-all``. With the number of a day, as in ``make room``, a
test runs on 2 and 3 ranks, or on the numbers of ranks that ``@pytest.mark.sizes(1, 2, 3, 4)`` gives it, its
module or a parameter; where there are several such marks, on those that all of them name. A test of random
cases, made by ``over_seeds``, runs on 1 to 4 ranks, on each of them with a third of the seeds, every day
another: every seed runs every day, on 2 ranks, or on 3, or on 1 and 4. So do tests that are marked
``in_turn(3, 4)``, with the numbers of ranks on which a third of them is enough for a day: dear cases of one
law, each of which runs on the other numbers every day. Tests without MPI that are marked ``slow``, since they
start jobs, run every third day.

With ``--once``, as in ``make test``, every MPI test runs every day, on one of its numbers of ranks, and on
each of them within as many days as there are. Those in turn, and all in some folders, rest a day then.

With ``--among 2,4``, as in ``make test-hosts``, an MPI test runs on those of these numbers of ranks that are
its own, in turn, and rests a day then.

With ``--seldom``, as in ``make test-openmpi``, an MPI test runs once in thirty days, on one of its numbers of
ranks, and one without MPI once in ten days.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Collection, Iterable
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.run_mpi import RANKS_OF_DAYS

if TYPE_CHECKING:
    from mpi4py import MPI

    from distdl_rma import Partition

ALL = (1, 2, 3, 4)
USUAL = (2, 3)
# Ranks see each other's memory in other ways on one rank and on nodes of equal and unequal size; a run on two
# hosts has its own numbers of ranks.
USUAL_IN = {"segments": ALL, "hosts": ALL}
SEEDS = "seed", "seeds"
SELDOM_WITHOUT_MPI = 10
LAYERS = Path(__file__).parent / "layers"
# Functions have many forms each; more ranks cut tensors in more ways than two do, not in others.
IN_TURN_BELOW = {LAYERS / "split" / "functions": (3, 4)}
# Here many tests hold one law for many functions and layers: each rests a day when it has run on all its
# numbers of ranks.
RESTING_BELOW = (*IN_TURN_BELOW, LAYERS / "partitioned")


# Whether a test is among those of a day on a number of ranks, 0 for one without MPI.
Chosen = Callable[[pytest.Item, int, int], bool]


def over_seeds(count: int, each: int = 1) -> pytest.MarkDecorator:
    """Parametrize a test over ``seed``, or with several for each test over the range ``seeds``.

    Small cases belong together: between two tests all ranks wait for each other.
    """
    if each == 1:
        return pytest.mark.parametrize("seed", range(count), ids=lambda seed: f"seed {seed}")
    ranges = [range(first, min(first + each, count)) for first in range(0, count, each)]
    return pytest.mark.parametrize("seeds", ranges, ids=lambda some: f"seeds {some[0]}-{some[-1]}")


def check_each(
    check: Callable[[Partition, MPI.Intracomm, int], None],
    P_world: Partition,
    comm: MPI.Intracomm,
    seeds: Iterable[int],
) -> None:
    """Check the random cases of these seeds; an error says which one it was."""
    for seed in seeds:
        try:
            check(P_world, comm, seed)
        except BaseException as error:
            error.add_note(f"seed {seed} on {comm.size} ranks")
            raise


def runs(item: pytest.Item, size: int, day: int) -> bool:
    """Whether a test is among those of a day on a number of ranks, 0 for one without MPI."""
    place = place_among_seeds(item) if size else None
    slow = not size and item.get_closest_marker("slow") is not None
    if slow or size in sizes_in_turn(item):
        place = place_among_cases(item)
    todays = place is None or (place + size + day) % 3 == 0
    return todays and (not size or size in sizes(item))


def runs_once(item: pytest.Item, size: int, day: int) -> bool:
    """Whether a test is among those of a day where each runs on one number of ranks a day."""
    if not size or place_among_seeds(item) is not None:
        return runs(item, size, day)
    own: list[int | None] = [*sorted(sizes(item))]
    if sizes_in_turn(item) or any(item.path.is_relative_to(folder) for folder in RESTING_BELOW):
        own.append(None)
    return own[(place_among_cases(item) + day) % len(own)] == size


def runs_among(numbers: Collection[int]) -> Chosen:
    """Whether a test is among those of a day where each takes turns over some numbers of ranks only."""

    def chosen(item: pytest.Item, size: int, day: int) -> bool:
        if place_among_seeds(item) is not None:
            return runs(item, size, day)
        own: list[int | None] = [*sorted({*sizes(item)} & {*numbers}), None]
        return own[(place_among_cases(item) + day) % len(own)] == size

    return chosen


def runs_seldom(item: pytest.Item, size: int, day: int) -> bool:
    """Whether a test is among those of a day where each runs once in many; ``size`` is 0 without MPI."""
    place = zlib.crc32(item.nodeid.encode())
    if not size:
        return (place + day) % SELDOM_WITHOUT_MPI == 0
    today = day % len(RANKS_OF_DAYS)
    days = [at for at, ranks in enumerate(RANKS_OF_DAYS) if ranks in sizes(item)]
    return days[place % len(days)] == today and size == RANKS_OF_DAYS[today]


def sizes(item: pytest.Item) -> Collection[int]:
    """Numbers of ranks on which a test runs every day."""
    marks = [set(mark.args) for mark in item.iter_markers("sizes")]
    usual = ALL if place_among_seeds(item) is not None else USUAL_IN.get(item.path.parent.name, USUAL)
    wanted = set.intersection(*marks) if marks else usual
    least = max((mark.kwargs.get("min_size", 1) for mark in item.iter_markers("mpi")), default=1)
    return [size for size in wanted if size >= least] or [least]


def sizes_in_turn(item: pytest.Item) -> set[int]:
    """Numbers of ranks on which a third of the tests like this one are enough for a day."""
    marks = [mark.args for mark in item.iter_markers("in_turn")]
    below = [numbers for path, numbers in IN_TURN_BELOW.items() if item.path.is_relative_to(path)]
    return {number for numbers in (*marks, *below) for number in numbers}


def place_among_seeds(item: pytest.Item) -> int | None:
    """Which of the tests over its seeds a test is, None for one that has no seeds."""
    places = item.callspec.indices if isinstance(item, pytest.Function) and hasattr(item, "callspec") else {}
    return next((places[name] for name in SEEDS if name in places), None)


def place_among_cases(item: pytest.Item) -> int:
    """A number for each test of a file, so that cases of a function take turns, and functions do."""
    name, indices = item.name.partition("[")[0], {}
    if isinstance(item, pytest.Function) and hasattr(item, "callspec"):
        indices = item.callspec.indices
    return zlib.crc32(name.encode()) + sum(indices.values())
