"""Staging: what crosses between tensors on a device and the memory of the host, which segments know.

A halo has many pieces, and a copy between device and host takes as long as a kernel: pieces travel as one::

    device    | piece | piece |  --a kernel packs-->  |piece|piece|         |piece|piece| --views--> y[...]
                                                           | one copy            ^ one copy
    host                          arrays for a put  <--  |piece|piece|         |piece|piece|  <--  a segment

A device of ``ASYNCHRONOUS`` has two streams for copies beside that of the kernels. ``to_host`` starts its
copy; its caller launches the kernels that need no other rank, and waits for the copy then. ``from_host`` does
not wait: kernels that are launched later do so on the device::

    kernels   pack . interior . . . . . . . . . . . . . . . . . . . . . . rim
               | event                                                     ^ event
    down       +--> copy                                                   |
                      | event                                              |
    host       launches   waits, put . . . waits for peers   packs         |
                                                              |            |
    up                                                        +--> copy ---+

The invariant of memory: what a copy goes down from is kept, and not written to, until the host has waited for
it; what it comes up to is allocated by the stream of the copy, and torch is told that kernels use it. Memory
of the host is torch's pinned memory, which torch gives to nobody before the copy is over. The segment itself
is not pinned: most of its pages do not exist before they are used, and pinning would provide them all.

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
# Types of devices whose autocast converts what the lists of ``split/calls/autocast.py`` say.
AUTOCASTING = ["cpu", "cuda", "xpu"]
# Streams of copies of each thread: virtual ranks would wait for each other's.
_STREAMS = threading.local()
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
        flats = [part.detach().reshape(-1) for part in parts]
        # Kept for the copy.
        self._flat = flat = flats[0] if len(flats) == 1 else torch.cat(flats)
        self._host = _memory(flat.numel(), flat.dtype, device)
        with COPIES.timed(down=flat.nbytes), _beside(device, "down") as copies:
            self._host.copy_(flat, non_blocking=copies is not None)
            if copies is not None:
                self._event = copies.record_event()

    @property
    def is_over(self) -> bool:
        """Whether ``wait`` would not block."""
        return self._event is None or bool(self._event.query())

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
    """Raise ``UnsupportedError`` within autocast of a device whose conversions rules do not know."""
    if device.type not in AUTOCASTING and torch.is_autocast_enabled(device.type):
        known = ", ".join(AUTOCASTING)
        raise UnsupportedError(
            f"torch.autocast({device.type!r}) of split tensors is not exact: leave it off; {known} have it"
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
    arrays: Iterable[NDArray[Any]],
    count: int,
    dtype: torch.dtype,
    device: torch.device,
    out: torch.Tensor | None = None,
) -> list[torch.Tensor]:
    """Tensors on a device of arrays of words, which hold ``count`` elements together and are read in order.

    Each array may change as soon as the next one is asked for, as those of a segment do. The tensors lie in
    ``out``, whose last use the host has waited for, or in new memory.
    """
    host, shapes, at = _memory(count, dtype, device), list[tuple[int, ...]](), 0
    words = as_words(host)
    for array in arrays:
        words[at : at + array.size].reshape(array.shape)[...] = array
        shapes.append(array.shape)
        at += array.size
    with COPIES.timed(up=host.nbytes), _beside(device, "up") as copies:
        there = torch.empty(count, dtype=dtype, device=device) if out is None else out
        there.copy_(host, non_blocking=copies is not None)
    if copies is not None:
        there.record_stream(torch.get_device_module(device).current_stream(device))
    parts = there.split([*map(_volume, shapes)])
    return [part.view(shape) for part, shape in zip(parts, shapes, strict=True)]


@contextmanager
def _beside(device: torch.device, way: str) -> Iterator[Any]:
    # On this thread's stream of copies, which is behind ("down") or before ("up") the kernels that the block
    # stands between, or has no order with them ("ahead"); yields it. None where a copy waits by itself.
    if device.type not in ASYNCHRONOUS:
        yield None
        return
    module, known, name = torch.get_device_module(device), vars(_STREAMS), f"{way} {device}"
    if name not in known:
        known[name] = module.Stream(device)
    kernels, copies = module.current_stream(device), known[name]
    if way == "down":
        copies.wait_stream(kernels)
    with module.stream(copies):
        yield copies
    if way == "up":
        kernels.wait_stream(copies)


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
    """A started copy of tensors of the host to a device, beside its kernels and those of other copies.

    One thread may start it, and another one may take the tensors: its kernels wait on the device.

    Examples
    --------
    >>> up = Ascent([torch.ones(2)], torch.device("cuda"))
    >>> [x.device.type for x in up.wait()]
    ['cuda']
    """

    def __init__(self, tensors: Sequence[torch.Tensor], device: torch.device) -> None:
        self._device, self._event = device, None
        hosts = [_memory(x.numel(), x.dtype, device).view(x.shape).copy_(x) for x in tensors]
        with COPIES.timed(up=sum(x.nbytes for x in hosts)), _beside(device, "ahead") as copies:
            late = copies is not None
            self._there = [torch.empty_like(x, device=device).copy_(x, non_blocking=late) for x in hosts]
            if copies is not None:
                self._event = copies.record_event()

    def wait(self) -> list[torch.Tensor]:
        """The tensors on the device, for kernels that this thread launches; does not block the host."""
        if self._event is not None:
            kernels = torch.get_device_module(self._device).current_stream(self._device)
            kernels.wait_event(self._event)
            for x in self._there:
                x.record_stream(kernels)
        return self._there


def _memory(count: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    # Torch keeps pinned memory for its next user, but not before the device has read it.
    return torch.empty(count, dtype=dtype, device="cpu", pin_memory=device.type == "cuda")


def _volume(shape: tuple[int, ...]) -> int:
    return int(np.prod(shape, dtype=np.int64))
