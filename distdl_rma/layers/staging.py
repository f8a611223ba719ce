"""Staging: what crosses between tensors on a device and the memory of the host, which segments know.

A halo has many pieces, and a copy between device and host takes as long as a kernel: pieces travel as one::

    device    | piece | piece |  --a kernel packs-->  |piece|piece|         |piece|piece| --views--> y[...]
                                                           | one copy            ^ one copy
    host                          arrays for a put  <--  |piece|piece|         |piece|piece|  <--  a segment

``to_host`` only starts its copy: the caller launches the kernels that need no other rank, and waits then. A
device of ``ASYNCHRONOUS`` computes meanwhile. What goes up needs no wait: later kernels of the device run
behind it, and the memory of the host that it is read from is nobody else's.

Tensors on the CPU need none of this. Their callers ask ``x.is_cpu``, and take views (``as_words``): no copy,
and no call more.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from itertools import accumulate
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from distdl_rma.errors import UnsupportedError
from distdl_rma.layers.dtypes import as_words

# Types of devices that copy to and from pinned memory while host and device go on.
ASYNCHRONOUS = {"cuda"}
_LESS = "; smaller batches, more ranks, or distdl_rma.spill() need less memory of a rank"


class Copies(threading.local):
    """Bytes that this thread has copied down and up, and its seconds in these copies; they only grow.

    Seconds are those of starting a copy and of waiting for it: what passes meanwhile costs the step nothing.
    Of each thread, since virtual ranks are threads.
    """

    def __init__(self) -> None:
        self.down = self.up = 0
        self.seconds = 0.0

    @contextmanager
    def timed(self, down: int = 0, up: int = 0) -> Iterator[None]:
        """Context of a copy of so many bytes."""
        begin = time.perf_counter()
        try:
            yield
        finally:
            self.down, self.up = self.down + down, self.up + up
            self.seconds += time.perf_counter() - begin


COPIES = Copies()


class Descent:
    """A started copy of tensors of one dtype from their device to the host.

    Examples
    --------
    >>> down = to_host([torch.ones(2), torch.zeros(1, 1)])
    >>> [part.shape for part in down.wait()]
    [(2,), (1, 1)]
    """

    def __init__(self, parts: Sequence[torch.Tensor]) -> None:
        self._shapes, self._event = [tuple(part.shape) for part in parts], None
        device = parts[0].device
        with COPIES.timed(down=sum(part.nbytes for part in parts)):
            flat = torch.cat([part.detach().reshape(-1) for part in parts])
            late = device.type in ASYNCHRONOUS
            self._host = _memory(flat.numel(), flat.dtype, device).copy_(flat, non_blocking=late)
            if late:
                self._event = torch.get_device_module(device).Event()
                self._event.record()

    def wait(self) -> list[NDArray[Any]]:
        """The tensors' bits as words, in their shapes; blocking."""
        if self._event is not None:
            with COPIES.timed():
                self._event.synchronize()
        ends = [*accumulate(map(_volume, self._shapes))]
        words = np.split(as_words(self._host), ends[:-1])
        return [part.reshape(shape) for part, shape in zip(words, self._shapes, strict=True)]


def backward_in_this_thread() -> None:
    """Make this thread run the backwards that it begins, also those of tensors on devices; local.

    Torch has one thread for all backwards of a device in a process, but what ranks do in turn is of one
    thread, which virtual ranks have each for itself.
    """
    torch._C._set_multithreading_enabled(False)


def refuse_autocast(device: torch.device) -> None:
    """Raise ``UnsupportedError`` within autocast of a device, which rules do not know."""
    if device.type != "cpu" and torch.is_autocast_enabled(device.type):
        raise UnsupportedError(
            f"torch.autocast({device.type!r}) of split tensors is not exact yet: leave it off"
        )


def explain_memory(error: BaseException, name: str, among: Iterable[Any] = ()) -> None:
    """Add to an error about the memory of a device what was computed, of which tensors, and what to do."""
    if isinstance(error, torch.OutOfMemoryError) and not str(error).endswith(_LESS):
        tensors = [x for x in among if isinstance(x, torch.Tensor)]
        given = "".join(f", {tuple(x.shape)} of {x.dtype} on {x.device}" for x in tensors)
        error.args = (f"{name}{given}: {error}{_LESS}",)


def to_host(parts: Sequence[torch.Tensor]) -> Descent:
    """Start to copy tensors of one device and dtype, at least one, to the host; does not wait."""
    refuse_autocast(parts[0].device)
    return Descent(parts)


def from_host(
    arrays: Iterable[NDArray[Any]], count: int, dtype: torch.dtype, device: torch.device
) -> list[torch.Tensor]:
    """Tensors on a device of arrays of words, which hold ``count`` elements together and are read in order.

    Each array may change as soon as the next one is asked for, as those of a segment do.
    """
    host, shapes, at = _memory(count, dtype, device), list[tuple[int, ...]](), 0
    words = as_words(host)
    for array in arrays:
        words[at : at + array.size].reshape(array.shape)[...] = array
        shapes.append(array.shape)
        at += array.size
    there = torch.empty(count, dtype=dtype, device=device)
    with COPIES.timed(up=there.nbytes):
        there.copy_(host, non_blocking=device.type in ASYNCHRONOUS)
    parts = there.split([*map(_volume, shapes)])
    return [part.view(shape) for part, shape in zip(parts, shapes, strict=True)]


def down(x: torch.Tensor) -> torch.Tensor:
    """The tensor itself if it is on the CPU; else a copy there, which has been waited for."""
    if x.is_cpu:
        return x
    with COPIES.timed(down=x.nbytes):
        return x.cpu()


def up(x: torch.Tensor, device: torch.device) -> torch.Tensor:
    """The tensor itself if it is on the device; else a copy there."""
    if x.device == device:
        return x
    with COPIES.timed(up=x.nbytes):
        return x.to(device)


class Ascent:
    """Copies up that run beside the kernels of a device, in a stream of their own; used by one thread.

    Without a stream, as on a device that is not ``ASYNCHRONOUS``, each copy waits.
    """

    def __init__(self, device: torch.device) -> None:
        self._device, self._module = device, torch.get_device_module(device)
        self._stream = self._module.Stream(device) if device.type in ASYNCHRONOUS else None

    def copied(self, x: torch.Tensor) -> torch.Tensor:
        """Copy of a tensor of the CPU on the device; blocking."""
        if self._stream is None:
            return up(x, self._device)
        with self._module.stream(self._stream):
            (y,) = from_host([as_words(x)], x.numel(), x.dtype, self._device)
        self._stream.synchronize()
        return y


def _memory(count: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    # Torch keeps pinned memory for its next user, but not before the device has read it.
    return torch.empty(count, dtype=dtype, device="cpu", pin_memory=device.type == "cuda")


def _volume(shape: tuple[int, ...]) -> int:
    return int(np.prod(shape, dtype=np.int64))
