"""A peer's memory seen as an array."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import numpy.typing as npt

from distdl_rma.errors import ShapeError
from distdl_rma.segments.memory.array_bytes import ArrayLayout
from distdl_rma.segments.memory.queue import Queue, check_queue
from distdl_rma.segments.memory.remote_memory import Fetch, RemoteMemory
from distdl_rma.segments.memory.values import as_values
from distdl_rma.segments.transport.rma_peer import ByteRuns


class RemoteArray:
    """A peer's memory as an array: ``there[2:4, ::2] = x`` puts, ``there[0]`` gets.

    Slices are those of numpy: integers, slices and an ellipsis. A put does not block for the transfer, and
    ``x`` may be changed on return. A get blocks and returns an array of its own.
    """

    def __init__(self, memory: RemoteMemory, layout: ArrayLayout, offset: int) -> None:
        self._memory, self._layout = memory, layout
        self._begin = memory.begin + offset
        self._near = memory.near_view(offset, layout.dtype, layout.shape)

    @property
    def dtype(self) -> np.dtype[Any]:
        """Type of the elements."""
        return self._layout.dtype

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the whole array."""
        return self._layout.shape

    def __setitem__(self, key: Any, data: Any) -> None:
        """Put; data of another shape is broadcast, data of another type is taken if nothing is lost."""
        self.put(key, data)

    def __getitem__(self, key: Any) -> npt.NDArray[Any]:
        """Get; blocking."""
        part = self._layout.part(key)
        out = np.empty(part.shape, self.dtype)
        if self._near is None:
            fetch = Fetch(part.runs(self._begin), None, out)
        else:
            fetch = Fetch(ByteRuns((0,), part.nbytes), self._near[part.key], out)
        self._memory.get([fetch])
        return out

    def __len__(self) -> int:
        """Number of rows."""
        if not self.shape:
            raise TypeError("len() of a peer's array without dimensions")
        return self.shape[0]

    def __iter__(self) -> Iterator[npt.NDArray[Any]]:
        """Get row after row; blocking."""
        return (self[row] for row in range(len(self)))

    def __array__(self, dtype: npt.DTypeLike | None = None, copy: bool | None = None) -> npt.NDArray[Any]:
        """Get all; blocking."""
        if copy is False:
            raise ValueError("a peer's array cannot be seen without a copy")
        whole = self[...]
        return whole if dtype is None else whole.astype(dtype, copy=False)

    def __repr__(self) -> str:
        return f"RemoteArray(of rank {self._memory.peer}, {self.dtype}, shape {self.shape})"

    def put(self, key: Any, data: Any, queue: Queue | None = None) -> None:
        """Put to a slice, posted to a queue; ``data`` may be changed on return all the same."""
        if queue is not None:
            check_queue(queue, "put")
        part = self._layout.part(key)
        source = as_values(data, self.dtype, "put")
        memory = self._memory
        memory.check_open()
        try:
            if self._near is not None:
                # Straight to its place: packing would be one more pass over the data.
                self._near[part.key] = source
            else:
                packed = np.empty(part.shape, self.dtype)
                packed[...] = source
                memory.put(part.runs(self._begin), packed.reshape(-1).view(np.uint8), queue)
        except ValueError as error:
            raise ShapeError(f"put: {error}") from None
        memory.counters.puts += 1
        memory.counters.bytes_put += part.nbytes
