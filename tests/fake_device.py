"""A device made of Python, for tests of what crosses between a tensor's device and the host's memory.

Torch takes it for a device like another: ``model.to("fake")``. A tensor on it is (storage, offset, shape,
strides), and the storage has no bytes that the host could look at::

    tensor on "fake"    storage without memory  --STORES-->  a storage of the host, which nobody else knows
    a kernel            torch's own kernel of the host, on the hidden storages
    numpy(), dlpack     raise
    a draw              raises: a device has another generator, whose numbers are not those of the host

Copies in both directions are counted for each thread, since virtual ranks are threads. A copy that is
asynchronous (``non_blocking``) is as late as it may be on a real device: until the device is waited for, the
host finds garbage in what comes down, and whoever overwrites what goes up meanwhile gets an error.
"""

from __future__ import annotations

import threading
import warnings
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch.utils import backend_registration
from torch.utils._pytree import tree_map

NAME = "fake"
_REGISTER = getattr(backend_registration, "_setup_privateuseone_for_python_backend", None)
needs_fake_device = pytest.mark.skipif(
    _REGISTER is None, reason=f"torch {torch.__version__} cannot register a device made of Python"
)
# What the host finds in memory to which an asynchronous copy has not come yet.
_GARBAGE = 0xA5


@dataclass
class Traffic:
    """Copies and bytes of one thread, and its copies that are under way."""

    ups: int = 0
    downs: int = 0
    up_nbytes: int = 0
    down_nbytes: int = 0
    # The bytes of each copy down; a number that is read one by one has its own.
    down_sizes: list[int] = field(default_factory=list)
    late: list[Callable[[], None]] = field(default_factory=list)
    # Of the generator.
    seed: int = 0
    # How many tensors the device has room for, if that is limited.
    room: float = float("inf")

    def catch_up(self, number: int | None = None) -> None:
        """Complete the first ``number`` copies that are under way, or all."""
        now, self.late = self.late[:number], self.late[len(self.late) if number is None else number :]
        for complete in now:
            complete()

    def up(self, nbytes: int) -> None:
        self.ups, self.up_nbytes = self.ups + 1, self.up_nbytes + nbytes

    def down(self, nbytes: int) -> None:
        self.downs, self.down_nbytes = self.downs + 1, self.down_nbytes + nbytes
        self.down_sizes.append(nbytes)


_TRAFFIC: dict[int, Traffic] = defaultdict(Traffic)


def traffic() -> Traffic:
    """That of this thread."""
    return _TRAFFIC[threading.get_ident()]


@contextmanager
def counted() -> Iterator[Traffic]:
    """Traffic within a ``with`` block."""
    mine = _TRAFFIC[threading.get_ident()] = Traffic(late=traffic().late, seed=traffic().seed)
    yield mine


class Event:
    """A point in the order of a thread's copies."""

    def __init__(self, **_: Any) -> None:
        self._number = 0

    def record(self, *_: Any) -> None:
        # Completed copies leave the list: the number is that of copies that were under way.
        self._waiting = [*traffic().late]

    def synchronize(self) -> None:
        mine = traffic()
        mine.catch_up(sum(each in self._waiting for each in mine.late))


class _Stream:
    """The one stream of the device, for parts of torch that ask any device for one."""

    def synchronize(self) -> None:
        traffic().catch_up()

    def wait_stream(self, other: object) -> None:
        """Everything is in order."""


_STREAM = _Stream()


class _Module(backend_registration._DummyBackendModule if _REGISTER else object):  # type: ignore[misc]
    """``torch.fake``."""

    Event = Event

    @staticmethod
    def Stream(*_: Any) -> _Stream:  # noqa: N802 - torch's name
        return _STREAM

    @staticmethod
    def synchronize(*_: Any) -> None:
        traffic().catch_up()

    @staticmethod
    def current_stream(*_: Any) -> _Stream:
        return _STREAM

    @staticmethod
    def stream(_: object) -> AbstractContextManager[None]:
        return nullcontext()

    # A generator that is never drawn from: its state is its seed.
    def manual_seed_all(self, seed: int) -> None:
        traffic().seed = seed

    def get_rng_state(self, *_: Any) -> torch.Tensor:
        return torch.tensor([traffic().seed % (1 << 63)], device="cpu").view(torch.uint8)

    def set_rng_state(self, state: torch.Tensor, *_: Any) -> None:
        traffic().seed = int(state.view(torch.int64))

    @staticmethod
    def get_amp_supported_dtype() -> list[torch.dtype]:
        return [torch.bfloat16, torch.float16]


# By the number of a storage of the device: the storage of the host; and back, a tensor of the device.
_STORES: dict[int, Any] = {}
_HANDLES: dict[tuple[int, torch.dtype], torch.Tensor] = {}


def _wrapped(raw: torch.Tensor) -> torch.Tensor:
    # The tensor of the device for one of the host.
    traffic().room -= 1
    if traffic().room < 0:
        raise torch.OutOfMemoryError(f"{NAME.upper()} out of memory. Tried to allocate {raw.nbytes} bytes")
    raw = raw.detach()
    store = raw.untyped_storage()
    key = store._cdata, raw.dtype
    if key not in _HANDLES:
        count = max(store.nbytes() // raw.element_size(), 1)
        _HANDLES[key] = handle = torch._C._acc.create_empty_tensor((count,), raw.dtype)
        _STORES[handle.untyped_storage()._cdata] = store
    place: Any = torch._C._dynamo.guards._reinterpret_tensor
    return place(_HANDLES[key], tuple(raw.shape), raw.stride(), raw.storage_offset())


def hidden(x: torch.Tensor) -> torch.Tensor:
    """The memory of a tensor of the device as a tensor of the host; for the device itself."""
    if x.device.type != NAME:
        return x
    store = _STORES[x.untyped_storage()._cdata]
    return torch.empty(0, dtype=x.dtype, device="cpu").set_(store, x.storage_offset(), x.size(), x.stride())


def _run(op: Any, *args: Any, **kwargs: Any) -> Any:
    # Any kernel.
    if torch.Tag.nondeterministic_seeded in op.tags and kwargs.get("generator") is None:
        raise RuntimeError(f"{op}: a device draws other numbers than the host")
    if op is torch.ops.aten._local_scalar_dense.default:
        traffic().catch_up()
        traffic().down(args[0].element_size())
    known: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    def down(x: Any) -> Any:
        if isinstance(x, torch.Tensor):
            if x.device.type == "cpu" and x.dim():
                raise RuntimeError(f"{op}: tensors are not on the same device, {NAME}")
            raw = hidden(x)
            known[id(raw)] = raw, x
            return raw
        return torch.device("cpu") if isinstance(x, torch.device) else x

    leaves = "device" in kwargs and torch.device(kwargs["device"]).type == "cpu"

    def up(x: Any) -> Any:
        if not isinstance(x, torch.Tensor) or leaves:
            return x
        return known[id(x)][1] if id(x) in known else _wrapped(x)

    with warnings.catch_warnings():
        # Torch itself passes results of another shape to some kernels.
        warnings.simplefilter("ignore")
        args, kwargs = tree_map(down, args), tree_map(down, kwargs)
        # A number in the place of a tensor is one of another kernel.
        numbers = any(
            a.type.kind() == "TensorType" and isinstance(x, (int, float))
            for a, x in zip(op._schema.arguments, args, strict=False)
        )
        found = (op.overloadpacket if numbers else op)(*args, **kwargs)
    for raw, x in known.values():
        if raw.shape != x.shape or raw.stride() != x.stride():
            # The kernel has resized it.
            x.data = _wrapped(raw)
    return tree_map(up, found)


def _ignored(_: object) -> None:
    pass


def _copy(source: torch.Tensor, target: torch.Tensor, non_blocking: bool = False) -> torch.Tensor:
    # Between the device and the host, in either direction, or on the device.
    mine, nbytes = traffic(), source.numel() * target.element_size()
    from_device, to_device = (x.device.type == NAME for x in (source, target))
    raw, place = hidden(source), hidden(target)
    if from_device and to_device:
        place.copy_(raw)
        return target
    if to_device:
        mine.up(nbytes)
    else:
        mine.down(nbytes)
    if not non_blocking:
        mine.catch_up()
        place.copy_(raw)
    elif to_device:
        place.copy_(raw)
        before = raw.clone()

        def unchanged() -> None:
            if not torch.equal(before.view(torch.uint8), raw.view(torch.uint8)):
                raise RuntimeError("memory of the host was changed before its copy to the device was over")

        mine.late.append(unchanged)
    else:
        found = raw.to(place.dtype).clone()
        place.view(torch.uint8).fill_(_GARBAGE)
        mine.late.append(lambda: _ignored(place.copy_(found)))
    return target


def _convolution(x: Any, w: Any, b: Any, *how: Any) -> torch.Tensor:
    return _run_plain(torch.convolution, x, w, b, *how)


def _convolution_backward(g: Any, x: Any, w: Any, *how: Any) -> Any:
    *steps, transposed, more, groups, mask = how
    channels = [w.shape[1] * groups if transposed else w.shape[0]]
    return _run_plain(
        torch.ops.aten.convolution_backward, g, x, w, channels, *steps, transposed, more, groups, mask
    )


def _run_plain(function: Any, *args: Any) -> Any:
    found = function(*tree_map(lambda x: hidden(x) if isinstance(x, torch.Tensor) else x, args))
    return tree_map(lambda x: _wrapped(x) if isinstance(x, torch.Tensor) else x, found)


_LIBRARIES: list[Any] = []


def register() -> torch.device:
    """Make torch know the device, once; return it."""
    if not _LIBRARIES:
        assert _REGISTER is not None
        _REGISTER(NAME, backend_module=_Module())
        everything, some = torch.library.Library("_", "IMPL"), torch.library.Library("aten", "IMPL")
        everything.fallback(_run, "PrivateUse1")
        everything.fallback(torch.library.fallthrough_kernel, "AutocastPrivateUse1")
        some.impl("_copy_from", _copy, "PrivateUse1")
        some.impl("convolution_overrideable", _convolution, "PrivateUse1")
        some.impl("convolution_backward_overrideable", _convolution_backward, "PrivateUse1")
        _LIBRARIES.extend([everything, some])
    return torch.device(NAME, 0)
