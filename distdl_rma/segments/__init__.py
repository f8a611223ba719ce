"""One-sided communication between the ranks of a machine, in memory segments that all of them can reach.

*How* data gets there: bytes and ranks, no tensors. This wing needs numpy, mpi4py and ``geometry``, never
torch: programs may use it alone, as ``examples/heat.py`` does.

Begin with ``machine.py``, the ranks of a job that know of each other's failures, and ``manager.py``, which
allocates buffers. ``memory`` has the buffers as users see them: put, get, notify, queues. ``channel.py``
sends the pieces of an exchange into two slots of each neighbour; ``collectives`` are handles with buffers
in the segment. Below, ``transport`` reaches a peer by load and store or by MPI RMA, and ``waiting`` is the
only place where a rank waits: it looks whether peers live, and words the errors. ``virtual_ranks`` are
threads of one process in place of MPI's, with ``rehearse``. ``consensus.py`` raises an error of one rank on
all of them.

The floors, from above to below, and what each adds::

    Consensus, together      ranks compare numbers; one outcome of local work
    Machine                  the ranks of a job; ends with them
    Channel, collectives     epochs: the same movement again and again, by flags that only grow
    SegmentBuffer            a block that peers put to, its notifications; handshake of addresses
    Waiter, PeerWatch        the only waits; who has failed, who is late
    Segment, Link            memory that all reach; near by load and store, far by MPI

One rule holds on all floors: data is written before its flag, by one writer, and read after the flag, and the
reader says when the place is free again. Most classes name their writer, their reader and that moment.
"""

from distdl_rma.segments.channel import Channel
from distdl_rma.segments.collectives.allgather import Allgather, Bcast
from distdl_rma.segments.collectives.allreduce import Allreduce
from distdl_rma.segments.collectives.group import Group
from distdl_rma.segments.manager import SegmentManager, SegmentStats
from distdl_rma.segments.memory.buffer import SegmentBuffer
from distdl_rma.segments.memory.context import Queue
from distdl_rma.segments.memory.remote_buffer import RemoteBuffer

__all__ = [
    "Allgather",
    "Allreduce",
    "Bcast",
    "Channel",
    "Group",
    "Queue",
    "RemoteBuffer",
    "SegmentBuffer",
    "SegmentManager",
    "SegmentStats",
]


def __dir__() -> list[str]:
    return [*__all__, *(name for name in globals() if name.startswith("__"))]
