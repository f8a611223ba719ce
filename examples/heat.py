"""Heat in a rod, by one-sided communication alone: ``mpiexec -n 2 python -m mpi4py examples/heat.py``.

The ends of the rod are kept at 0. Each rank has a piece of the rod. It puts its end values into its
neighbours' halo, computes the inner points while the values travel, then its first and last point. The result
is bitwise that of one process. Neither torch nor a neural network is needed: ``docs/one-sided.md``.
"""

from __future__ import annotations

import sys

import numpy as np

from distdl_rma import Machine

POINTS, STEPS, R = 101, 250, 0.25
LEFT, RIGHT = 0, 1


def main() -> int:
    """Compute the rod on all ranks and on each rank alone, and compare."""
    with Machine(segment_size="1MiB") as machine:
        segments, rank, size = machine.segments, machine.rank, machine.size
        rod = np.exp(-(np.linspace(-6, 6, POINTS) ** 2))
        pieces = np.array_split(rod, size)
        u = np.pad(pieces[rank], 1)  # between the ends of the neighbours
        sides = {side: peer for side, peer in ((LEFT, rank - 1), (RIGHT, rank + 1)) if 0 <= peer < size}
        halo = segments.get_segment_buffer(4 * 8, notifications=4, owner="halo")
        slots = halo.view(np.float64, (2, 2))  # parity of the step, side
        ends = halo.exchange(dict.fromkeys(sides.values(), ()), label="halo")

        # No acknowledgement is needed: a neighbour writes a slot again two steps later, after it has waited
        # for values that this rank put after it had read the slot.
        for step in range(STEPS):
            parity = step % 2
            for side, peer in sides.items():
                slot = 2 * parity + 1 - side  # this rank is to the right of its left neighbour
                ends[peer].put_notify(u[1:2] if side == LEFT else u[-2:-1], index=slot, offset=8 * slot)
            new = u.copy()
            new[2:-2] += R * (u[3:-1] - 2 * u[2:-2] + u[1:-3])
            for side in sides:
                halo.notify_wait(2 * parity + side)
                u[-side] = slots[parity, side]
            for i in (1, -2):
                new[i] += R * (u[i + 1] - 2 * u[i] + u[i - 1])
            u = new

        whole = machine.group().allgather([len(piece) for piece in pieces], np.float64, name="rod")
        whole.active[:] = u[1:-1]
        whole.start()
        for _ in range(STEPS):
            padded = np.pad(rod, 1)
            rod = rod + R * (padded[2:] - 2 * rod + padded[:-2])
        equal = np.array_equal(whole.wait(), rod)
        if rank == 0:
            print(f"{size} ranks, {STEPS} steps: {'bitwise' if equal else 'not'} the result of one process")
        return 0 if equal else 1


if __name__ == "__main__":
    sys.exit(main())
