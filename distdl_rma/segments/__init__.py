"""One-sided communication in a segment that the ranks of a machine share."""

from distdl_rma.segments.allgather import AllGather
from distdl_rma.segments.allreduce import Allreduce
from distdl_rma.segments.alltoall import AllToAll
from distdl_rma.segments.broadcast import Broadcast
from distdl_rma.segments.buffer import SegmentBuffer
from distdl_rma.segments.channel import Channel
from distdl_rma.segments.group import Group
from distdl_rma.segments.manager import SegmentManager, SegmentStats
from distdl_rma.segments.queue import Queue
from distdl_rma.segments.reduce import Reduce
from distdl_rma.segments.reduce_scatter import ReduceScatter
from distdl_rma.segments.remote import RemoteArray, RemoteBuffer

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
