"""Collectives of a group driven by hand: a script after the other, with delays, against what they mean."""

from __future__ import annotations

import random
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
from torch.distributed import ReduceOp

from distdl_rma.process_group.node_slots import Call
from distdl_rma.process_group.reducers import reducer_of
from distdl_rma.segments.manager import SegmentManager

import torch  # isort: skip

SUM = ReduceOp.SUM


def drive(manager: SegmentManager, script: Iterator[None], late: random.Random) -> None:
    """Take a script to its end; now and then this rank looks away."""
    deadline = time.monotonic() + 30
    for _ in script:
        manager.progress()
        if late.random() < 0.01:
            time.sleep(1e-3)
        if time.monotonic() > deadline:
            raise TimeoutError("a script does not end")


def check(manager: SegmentManager, caller: Any, way: Any, most: int) -> None:
    """Every kind of script on vectors of no, some and many elements; ``most`` is what fits into one round."""
    me, size, late = way.me, way.size, random.Random(manager.rank)
    sum_of = reducer_of(SUM, torch.float64, size)
    for step, count in enumerate((0, 1, 9, most // 3, most, 3 * most + 5) * 2):
        rows = [np.arange(count, dtype=np.float64) * (rank + 1) + step for rank in range(size)]
        root = step % size
        caller.call = Call(f"all_reduce {count}")
        x = rows[me].copy()
        drive(manager, way.reduce(x, sum_of, None), late)
        assert np.array_equal(x, sum(rows))
        caller.call = Call(f"reduce {count}")
        x = rows[me].copy()
        drive(manager, way.reduce(x, sum_of, root), late)
        assert np.array_equal(x, sum(rows) if me == root else rows[me])
        caller.call = Call(f"reduce_scatter {count}")
        parts, out = [rows[me] + 100 * part for part in range(size)], np.empty(count)
        drive(manager, way.reduce_scatter(parts, out, sum_of), late)
        assert np.array_equal(out, sum(rows) + 100 * me * size)
        bytes_of = [row.view(np.uint8)[: row.nbytes - rank] for rank, row in enumerate(rows)]
        outs = [np.zeros(part.size, np.uint8) for part in bytes_of]
        caller.call = Call(f"spread {count}")
        drive(manager, way.spread([part.size for part in bytes_of], bytes_of[me], outs), late)
        assert all(map(np.array_equal, outs, bytes_of))
        caller.call = Call(f"spread {count} of one")
        whole = rows[root].view(np.uint8)
        mine, given = (whole if me == root else whole[:0]), np.zeros(whole.size, np.uint8)
        sizes, outs = [whole.size * (rank == root) for rank in range(size)], [None] * size
        outs[root] = given
        drive(manager, way.spread(sizes, mine, outs), late)
        assert np.array_equal(given, whole)
        caller.call = Call("deal")
        sends = [np.full(count + me + 2 * rank, me * size + rank, np.uint8) for rank in range(size)]
        outs = [np.zeros(count + rank + 2 * me, np.uint8) for rank in range(size)]
        drive(manager, way.deal(sends, outs), late)
        assert all((out == rank * size + me).all() for rank, out in enumerate(outs))
        caller.call = Call("barrier")
        drive(manager, way.barrier(), late)
