"""Double-buffered reductions whose result all ranks get."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import numpy as np
import numpy.typing as npt
from mpi4py import MPI

from distdl_rma.geometry.exchange import fingerprint
from distdl_rma.geometry.split import Balanced
from distdl_rma.segments.collectives.all_push import AllPush
from distdl_rma.segments.collectives.engine.double_buffered import Algorithm, Collective, SteppedAlgorithm
from distdl_rma.segments.collectives.engine.node_layout import NodeLayout, check_count, one_round_is_better
from distdl_rma.segments.collectives.engine.reduction import Array, Reduction, element_of, without_fp_errors
from distdl_rma.segments.collectives.engine.team import Team
from distdl_rma.segments.manager import SegmentManager
from distdl_rma.segments.waiting.wait_reason import WaitReason

_READY, _DONE = range(2)


class Allreduce(Collective):
    """Reduction over some ranks, double buffered: write to ``active``, start, go on, wait, read ``result``.

    The result takes the place of the operand in its buffer. Bitwise the same on all ranks and from run to
    run: every element is reduced in one place, on a node in the order of ``ranks``; 16-bit floats in
    float32, with one rounding at the end. Across nodes MPI's reductions combine the sums of the nodes, and
    what the minimum of a NaN is, is theirs to say.

    Parameters
    ----------
    manager
        Segment manager of the machine.
    ranks
        Rank ids that take part, in the order of summation, this one included.
    count
        Number of elements; 0 is legal.
    dtype
        float16 to 64, complex64 or 128, int8 to 64, uint8 to 64, bool, or the text ``"bfloat16"``:
        ``active`` and ``result`` are then uint16 arrays that hold the bits.
    op
        ``"sum"``, ``"mean"``, ``"prod"``, ``"min"`` or ``"max"``. Integers wrap around, as in numpy and
        torch. There is no mean of integers, no order of complex numbers, and no sum of bool: ``"max"`` is
        whether any is true, ``"min"`` and ``"prod"`` whether all are.
    name
        For messages, alike on all ranks.
    one_round
        Whether everyone's vector goes to everyone at any size, for latency, on up to 32 ranks; otherwise
        only if it is small.
    divisor
        What a mean divides by; the number of ranks if None.

    Raises
    ------
    ShapeError
        If count, dtype, op or divisor is none of these, or they do not go together.
    PartitionError
        If ranks are listed twice, not of the machine, or without this one.

    Notes
    -----
    Interface document, sections 3.1 and 4.1; requirement A15.
    """

    def __init__(
        self,
        manager: SegmentManager,
        ranks: Sequence[int],
        count: int,
        dtype: npt.DTypeLike | str = np.float32,
        op: str = "sum",
        name: str = "allreduce",
        *,
        one_round: bool = False,
        divisor: int | None = None,
    ) -> None:
        self.element = element_of(dtype, name)
        self.count, self.dtype, self.op = check_count(count, name), self.element.storage, op
        layout = NodeLayout.checked(ranks, manager.segment.direct_nodes, manager.rank, name)
        divisor = len(layout.ranks) if divisor is None else divisor
        reduction = Reduction(op, self.element, divisor, name)
        nbytes = self.count * self.dtype.itemsize
        plan = fingerprint(type(self).__name__, self.element.name, op, divisor)
        algorithm: Algorithm
        if one_round_is_better(len(layout.ranks), nbytes, one_round):
            algorithm = _OneRound(manager, layout, self.count, reduction, name, plan)
        else:
            algorithm = _shares(manager, layout, self.count, reduction, name, plan)
        super().__init__(manager, layout.ranks, name, algorithm)


class _OneRound:
    """Everyone pushes its vector to everyone, each reduces all of them in the same order."""

    needs_progress = False

    def __init__(
        self,
        manager: SegmentManager,
        layout: NodeLayout,
        count: int,
        reduction: Reduction,
        name: str,
        plan: int,
    ) -> None:
        terms = f"collective=Allreduce\n{reduction.terms}"
        self._round = AllPush(manager, layout.ranks, count, reduction.element.storage, name, plan, terms)
        me = layout.ranks.index(manager.rank)
        self.operands = self.results = tuple(rows[me] for rows in self._round.rows)
        self._reduce = tuple(
            _reducer(reduction, rows, out) for rows, out in zip(self._round.rows, self.results, strict=True)
        )
        self.connect, self._push, self._arrived = self._round.connect, self._round.push, self._round.arrived
        self._begun = self._done = 0
        self.broken = ""

    def begin(self, step: int) -> None:
        """Push this rank's vector."""
        self._begun = step
        self._push()

    def advance(self) -> bool:
        """Reduce, once everything has arrived; return whether that is done, or broken."""
        step = self._begun
        if self._done != step:
            if not self._arrived():
                return False
            try:
                # In place: never twice.
                self._done = step
                self._reduce[step & 1]()
            except BaseException as error:
                self.broken = repr(error)
                raise
        return True

    def waiting(self) -> WaitReason:
        """Which ranks the step waits for."""
        return self._round.missing()

    def close(self) -> None:
        """Give the memory back as soon as everything has arrived."""
        # Others may still write for a step that broke: its memory is not used again.
        if not self.broken:
            self._round.close()


def _reducer(reduction: Reduction, rows: list[Array], out: Array) -> Callable[[], object]:
    # Everything that can be looked up before is: a small step takes a few microseconds in all.
    if len(rows) == 2 and reduction.element.exact and reduction.op == "sum":
        first, second = rows
        calm = without_fp_errors(np.add)
        return lambda: calm(first, second, out)
    return lambda: reduction.reduce(rows, (out,))


def _shares(
    manager: SegmentManager, layout: NodeLayout, count: int, reduction: Reduction, name: str, plan: int
) -> SteppedAlgorithm:
    """Each of some ranks of a node reduces a share by direct load; MPI combines shares of different nodes."""
    element = reduction.element
    across = layout.lane_ranks
    team = Team(
        manager,
        layout,
        count,
        element.storage,
        across,
        name,
        plan,
        f"collective=Allreduce\n{reduction.terms}",
    )
    share = slice(*layout.share(count))
    size = share.stop - share.start
    me, number = layout.here.index(layout.me), len(layout.nodes)
    parts = [Balanced(size, number).interval(node) for node in range(number)]
    lengths = [stop - start for start, stop in parts]
    # The sums of this node, and this rank's part of the sums of all nodes, in the type of the reduction.
    sums = np.empty(size if number > 1 else 0, element.wide)
    part = np.empty(lengths[layout.my_node] if number > 1 else 0, element.wide)
    loads = (len(layout.here) - 1) * bool(size)
    stores = layout.allreduce_stores(count)

    def script(parity: int) -> Iterator[None]:
        team.tell(_READY, layout.holders)
        if layout.lane is not None:
            yield from team.hear(_READY, layout.here)
            if size:
                yield from reduce(parity)
            team.tell(_DONE, layout.here)
        yield from team.hear(_DONE, layout.holders)

    def reduce(parity: int) -> Iterator[None]:
        rows = [row[share] for row in team.rows[parity]]
        team.count_gets(loads, loads * rows[me].nbytes)
        targets = [rows[me], *(row for at, row in enumerate(rows) if at != me)]
        if number == 1:
            reduction.reduce(rows, targets)
        else:
            reduction.partial(rows, sums)
            yield from combine(targets[0])
            for target in targets[1:]:
                target[...] = targets[0]
        team.count_puts(len(stores), sum(span.size for span in stores) * element.storage.itemsize)

    def combine(mine: Array) -> Iterator[None]:
        # Every element is reduced on one node and copied to the others: bitwise the same on all.
        request = team.comm.Ireduce_scatter(sums, part, lengths, reduction.mpi)
        yield from team.complete(request, sums.nbytes)
        finished = part if element.exact else np.empty(part.size, element.storage)
        reduction.finish(part, finished)
        itemsize = element.storage.itemsize
        counts = [itemsize * length for length in lengths]
        offsets = [itemsize * start for start, _ in parts]
        request = team.comm.Iallgatherv(
            [finished.view(np.uint8), MPI.BYTE], [mine.view(np.uint8), (counts, offsets), MPI.BYTE]
        )
        yield from team.complete(request, finished.nbytes)

    return SteppedAlgorithm(manager, team, script, team.mine, team.mine, name)
