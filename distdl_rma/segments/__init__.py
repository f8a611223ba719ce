"""One-sided communication in a segment that the ranks of a machine share."""

from distdl_rma.segments.channel import Channel
from distdl_rma.segments.collectives.allgather import AllGather
from distdl_rma.segments.collectives.allreduce import Allreduce
from distdl_rma.segments.collectives.alltoall import AllToAll
from distdl_rma.segments.collectives.broadcast import Broadcast
from distdl_rma.segments.collectives.group import Group
from distdl_rma.segments.collectives.reduce import Reduce
from distdl_rma.segments.collectives.reduce_scatter import ReduceScatter
from distdl_rma.segments.manager import SegmentManager, SegmentStats
from distdl_rma.segments.memory.buffer import SegmentBuffer
from distdl_rma.segments.memory.queue import Queue
from distdl_rma.segments.memory.remote_buffer import RemoteArray, RemoteBuffer

__all__ = [
    "AllGather",
    "AllToAll",
    "Allreduce",
    "Broadcast",
    "Channel",
    "Group",
    "Queue",
    "Reduce",
    "ReduceScatter",
    "RemoteArray",
    "RemoteBuffer",
    "SegmentBuffer",
    "SegmentManager",
    "SegmentStats",
]
