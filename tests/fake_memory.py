"""The memory of the device made of Python: storages that shrink and are placed, a limit, what is in use.

What torch asks of a device's allocator, for tests of code that moves whole storages: ``storage.nbytes()``,
``storage.resize_()``, ``tensor.set_(storage)``, and ``torch.OutOfMemoryError`` where there is a limit. The
bytes are those of the hidden storage of the host, which is resized in place of the device's.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from weakref import WeakSet

import torch

from tests import fake_device

_PLACED: Any = torch.ops.aten.set_.source_Storage_storage_offset
_META = torch._C.DispatchKeySet(torch._C.DispatchKey.Meta)
_STORAGE: Any = torch.UntypedStorage
_LIBRARIES: list[Any] = []
_MEMORIES: WeakSet[Any] = WeakSet()


class Use:
    """Bytes of the device that all threads use together: the most so far, and the ``limit``."""

    limit, most = 1 << 62, 0


def allocated() -> int:
    """Bytes of the device that are in use."""
    return sum(memory.store.nbytes() for memory in [*_MEMORIES])


@contextmanager
def limited(nbytes: int | None = None) -> Iterator[type[Use]]:
    """Context in which the device has so many bytes more than are in use; ``most`` are in use at once."""
    Use.most = allocated()
    Use.limit = Use.most + nbytes if nbytes is not None else 1 << 62
    try:
        yield Use
    finally:
        Use.limit = 1 << 62


def _take(nbytes: int) -> None:
    now = allocated() + nbytes
    if now > Use.limit:
        raise torch.OutOfMemoryError(f"FAKE out of memory. Tried to allocate {nbytes} bytes of the device")
    Use.most = max(Use.most, now)


def _set(x: torch.Tensor, storage: Any, offset: int, shape: Any, strides: Any = ()) -> torch.Tensor:
    # Torch's own of a device without memory.
    _PLACED.redispatch(_META, x, storage, offset, shape, strides)
    return x


def register() -> torch.device:
    """Make torch know the device with its memory, once; return it."""
    device = fake_device.register()
    if not _LIBRARIES:
        library = torch.library.Library("aten", "IMPL")
        library.impl("set_.source_Storage_storage_offset", _set, "PrivateUse1")
        _LIBRARIES.append(library)
        begin, nbytes, resize = fake_device.Memory.__init__, _STORAGE.nbytes, _STORAGE.resize_

        def begun(self: Any, store: Any) -> None:
            begin(self, store)
            _take(store.nbytes())
            _MEMORIES.add(self)

        def nbytes_of(self: Any) -> int:
            return int(self.memory.store.nbytes() if hasattr(self, "memory") else nbytes(self))

        def resized(self: Any, size: int) -> Any:
            if not hasattr(self, "memory"):
                return resize(self, size)
            _take(size - self.memory.store.nbytes())
            self.memory.store.resize_(size)
            return self

        fake_device.Memory.__init__ = begun  # type: ignore[method-assign]
        _STORAGE.nbytes, _STORAGE.resize_ = nbytes_of, resized
    return device
