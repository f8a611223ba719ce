"""One-sided communication in a segment that the ranks of a machine share."""

from distdl_rma.segments.allgather import AllGather
from distdl_rma.segments.allreduce import Allreduce
from distdl_rma.segments.buffer import RemoteBuffer, SegmentBuffer
from distdl_rma.segments.channel import Channel
from distdl_rma.segments.manager import SegmentManager

__all__ = ["AllGather", "Allreduce", "Channel", "RemoteBuffer", "SegmentBuffer", "SegmentManager"]
