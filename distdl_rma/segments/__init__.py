"""One-sided communication between the ranks of a machine, in memory segments that all of them can reach."""

import warnings
from typing import Any

from distdl_rma.segments.channel import Channel
from distdl_rma.segments.collectives.allgather import Allgather, Bcast
from distdl_rma.segments.collectives.allreduce import Allreduce, Reduce, Reducescatter
from distdl_rma.segments.collectives.alltoall import Alltoall
from distdl_rma.segments.collectives.group import Group
from distdl_rma.segments.manager import SegmentManager, SegmentStats
from distdl_rma.segments.memory.buffer import SegmentBuffer
from distdl_rma.segments.memory.context import Queue
from distdl_rma.segments.memory.remote_buffer import RemoteArray, RemoteBuffer

__all__ = [
    "Allgather",
    "Allreduce",
    "Alltoall",
    "Bcast",
    "Channel",
    "Group",
    "Queue",
    "Reduce",
    "Reducescatter",
    "RemoteArray",
    "RemoteBuffer",
    "SegmentBuffer",
    "SegmentManager",
    "SegmentStats",
]

# Collectives have MPI's names. The former names are deprecated: layers use them too.
_FORMER = {"AllGather": Allgather, "AllToAll": Alltoall, "Broadcast": Bcast, "ReduceScatter": Reducescatter}


def __getattr__(name: str) -> Any:
    if name not in _FORMER:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    now = _FORMER[name]
    warnings.warn(f"segments.{name} is called {now.__name__}", DeprecationWarning, stacklevel=2)
    return now


def __dir__() -> list[str]:
    return [*__all__, *(name for name in globals() if name.startswith("__"))]
