"""Ranks that run together, or one after the other: the only place where operations ask which.

The ranks of a job run together. Those of a prediction are slabs of an image that does not fit into memory:
they run in their order, each to its end, so that memory for one slab is enough::

    together                       in order
    rank 0  |==============|       rank 0  |====|
    rank 1  |==============|       rank 1        |====|
    rank 2  |==============|       rank 2              |====|     -> time

In order, no rank can wait for a later one, which has not begun. Three things follow:

- **Data moves to later ranks only.** Operations place their outputs such that none reads an input of a later
  rank (``outputs_of``); operands of a function are cut by the same rule (``ending_first`` of
  ``layers/split/layout.py``). A window of 3 elements reads one element beyond its output::

      inputs              rank 0 |0 1 2 3|   rank 1 |4 5 6 7|
      outputs, together          |0 1 2 3|          |4 5 6 7|    3 and 4 read across the cut: both ranks wait
      outputs, in order          |0 1 2|          |3 4 5 6 7|    only rank 1 waits: for elements 2 and 3

- **Messages wait without a reader.** The writer of an ordinary channel waits for its reader two epochs later.
  In order, a reader reads when the writer has long ended: any number of messages lie in a ``Mailbox``.
- **Sums stop the order.** Every rank needs all others there, so all come to the same call before one goes on.
  The handles of this file then wait once for all ranks. With a wait for each message, the memory of the
  waiting rank would go to the disk and come back each time.

Operations are the same otherwise, and so are their results, but for rounding.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import DTypeLike

from distdl_rma.geometry.box import LEADING
from distdl_rma.geometry.decomposition import Decomposition
from distdl_rma.geometry.exchange import Exchange
from distdl_rma.geometry.halo import outputs_behind
from distdl_rma.geometry.intervals import Split
from distdl_rma.segments.channel import Channel
from distdl_rma.segments.collectives.all_push import AllPush
from distdl_rma.segments.collectives.allreduce import Allreduce
from distdl_rma.segments.collectives.reduction import Element
from distdl_rma.segments.machine import Machine
from distdl_rma.segments.mailbox import BufferedAllreduce, BufferedChannel, BufferedVectors

# Half-open range of the inputs that outputs [start, stop) of one dimension read.
Reads = Callable[[int, int], tuple[int, int]]
# Either family of handles has the methods that operations call.
Vectors = AllPush | BufferedVectors
Reduces = Allreduce | BufferedAllreduce


def in_order(machine: Machine) -> bool:
    """Whether the ranks run one after the other, without gradients; local, the same on all ranks.

    For operations that choose between kernels by what a backward costs: there is none.
    """
    return machine.mailbox is not None


def channel_of(machine: Machine, exchange: Exchange, dtype: DTypeLike, name: str) -> Channel:
    """Channel of an exchange, whose results peers may put to; local to make."""
    if machine.mailbox is not None:
        return BufferedChannel(machine.segments, exchange, dtype, name, machine.mailbox)
    return Channel(machine.segments, exchange, dtype, name, lands=True)


def vectors_of(machine: Machine, ranks: Sequence[int], count: int, name: str) -> Vectors:
    """Handle that brings small float64 vectors of ``count`` elements of all ranks to all; local to make."""
    if machine.mailbox is not None:
        return BufferedVectors(machine.segments, ranks, name, machine.mailbox)
    return AllPush(machine.segments, ranks, count, np.float64, name)


def reduction_of(
    machine: Machine, ranks: Sequence[int], count: int, element: str | Element, op: str, name: str
) -> Reduces:
    """Handle that reduces ``count`` elements over ranks, as ``handle(values)``; local to make."""
    if machine.mailbox is not None:
        where = machine.segments, ranks, name, machine.mailbox
        return BufferedAllreduce(*where, op=op, dtype=element)
    return Allreduce(machine.segments, ranks, count, element, op, name)


def outputs_of(
    machine: Machine, source: Decomposition, output: Decomposition, reads: Callable[[], Sequence[Reads]]
) -> Decomposition:
    """Decomposition of the outputs of windows: ``output``; in order, one that reads from earlier ranks only.

    Both decompositions are (batch, channel, *spatial), on one grid. ``reads`` returns one function for each
    spatial dimension; it is not called otherwise, since the tables of some windows take a while to make.
    """
    if machine.mailbox is None:
        return output
    found: dict[int, Split] = {}
    for d, reads_of in enumerate(reads(), LEADING):
        inputs, outputs = source.splits[d], output.splits[d]
        if inputs.parts == outputs.parts > 1:
            found[d] = outputs_behind(inputs, outputs.extent, _last_read(reads_of))
    return output.with_splits(found)


def _last_read(reads: Reads) -> Callable[[int], int]:
    return lambda output: reads(output, output + 1)[1]
