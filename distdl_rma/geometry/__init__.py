"""Boxes, partitions and plans of data movement; needs only the standard library."""

from distdl_rma.geometry.box import Box
from distdl_rma.geometry.decomposition import Decomposition
from distdl_rma.geometry.distribution import Distribution
from distdl_rma.geometry.exchange import Exchange, Piece
from distdl_rma.geometry.halo import Stencil, Window
from distdl_rma.geometry.partition import Partition

__all__ = ["Box", "Decomposition", "Distribution", "Exchange", "Partition", "Piece", "Stencil", "Window"]


def __dir__() -> list[str]:
    return [*__all__, *(name for name in globals() if name.startswith("__"))]
