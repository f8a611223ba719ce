"""Boxes, partitions and plans of data movement; needs only the standard library.

*Which* data goes where, as exact integers: no memory, no ranks that run, no tensors. One process can play
all ranks, so that tests compare plans by ``==``.

Begin with ``box.py``, half-open boxes of indices. ``partition.py`` and ``decomposition.py`` say which rank
has which box of a tensor, ``halo.py`` which box a window reads, and ``exchange.py`` makes of owned and of
needed boxes the pieces that travel. Every movement of this package is an ``Exchange``, and its adjoint is
the transposed one. ``gathering.py`` and ``trees.py`` plan collectives, ``distribution.py`` the shares of a
machine.

>>> Box.of_shape((6, 8)).volume
48
"""

from distdl_rma.geometry.box import Box
from distdl_rma.geometry.decomposition import Decomposition
from distdl_rma.geometry.distribution import Distribution
from distdl_rma.geometry.exchange import Exchange, Piece
from distdl_rma.geometry.halo import Stencil, Window
from distdl_rma.geometry.partition import Partition

__all__ = ["Box", "Decomposition", "Distribution", "Exchange", "Partition", "Piece", "Stencil", "Window"]


def __dir__() -> list[str]:
    return [*__all__, *(name for name in globals() if name.startswith("__"))]
