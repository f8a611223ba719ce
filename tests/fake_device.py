"""A device made of Python, for tests of what crosses between a tensor's device and the host's memory.

Torch takes it for a device like another: ``model.to("fake")``. A tensor on it is (storage, offset, shape,
strides), and the storage has no bytes that the host could look at::

    tensor on "fake"    storage without memory  --Memory-->  a storage of the host, which nobody else knows
    a kernel            torch's own kernel of the host, on the hidden storages
    numpy(), dlpack     raise
    a draw              raises: a device has another generator, whose numbers are not those of the host

Copies in both directions are counted for each thread, since virtual ranks are threads. A copy that is
asynchronous (``non_blocking``) is as late as it may be on a real device: until the device is waited for, the
host finds garbage in what comes down, and whoever overwrites what goes up meanwhile gets an error.

Kernels run when they are launched, which is one of the orders that a device may choose. What would differ
in another order is found by clocks, not by delay: a delayed kernel shows one bad order, clocks show that one
exists. Each kernel and copy has a number in its stream, and a stream knows which numbers of other streams are
over before its next kernel, by events and by waits of the host::

    compute stream      kernel 1 . . . . . . . . . . . . kernel 2 reads y: is copy 1 over before it?
                            | event                         | only if the stream waits for its event
    stream of copies        +----> copy 1 writes y . . . . event

Memory knows its last write and the reads since, with their numbers. ``Race`` is raised where a kernel or a
copy touches memory that another stream has written, or overwrites what another reads, and the order of both
is open; and where memory is freed while a stream that has not allocated it may still use it, unless
``record_stream`` tells the allocator.
"""

from __future__ import annotations

import threading
import warnings
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import count
from typing import Any

import pytest
import torch
from torch.utils import backend_registration
from torch.utils._pytree import tree_leaves, tree_map

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
    # The bytes of each copy up, and down; a number that is read one by one has its own.
    up_sizes: list[int] = field(default_factory=list)
    down_sizes: list[int] = field(default_factory=list)
    # With stream and number.
    late: list[tuple[int, int, Callable[[], None]]] = field(default_factory=list)
    # The number of each stream's last kernel for which the thread has waited.
    seen: dict[int, int] = field(default_factory=dict)
    # Of the generator.
    seed: int = 0
    # How many tensors the device has room for, if that is limited.
    room: float = float("inf")

    def catch_up(self, now: dict[int, int]) -> None:
        """Wait for kernels of these numbers, and complete the copies among them."""
        _merge(self.seen, now)
        over = [late for late in self.late if now.get(late[0], 0) >= late[1]]
        self.late = [late for late in self.late if late not in over]
        for *_, complete in over:
            complete()
        if RACES:
            raise Race(RACES.pop())

    def up(self, nbytes: int) -> None:
        self.ups, self.up_nbytes = self.ups + 1, self.up_nbytes + nbytes
        self.up_sizes.append(nbytes)

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
    mine = _TRAFFIC[threading.get_ident()] = Traffic(
        late=traffic().late, seen=traffic().seen, seed=traffic().seed, room=traffic().room
    )
    yield mine


class Race(RuntimeError):
    """The result depends on when the device does what."""


class Stream(torch.Stream):
    """Work in order; ``now`` has the number of each stream's last kernel that is over before the next one."""

    _numbers = count(1)

    def __new__(cls, *_: Any, **__: Any) -> Any:
        return super().__new__(cls, stream_id=next(cls._numbers), device_index=0, device_type=_TYPE)

    def __init__(self, *_: Any, **__: Any) -> None:
        self.now: dict[int, int] = {}
        _STREAMS[self.stream_id] = self

    def launch(self) -> int:
        """The number of a new kernel, which the host launches now."""
        _merge(self.now, traffic().seen)
        self.now[self.stream_id] = self.now.get(self.stream_id, 0) + 1
        return self.now[self.stream_id]

    def record_event(self, event: Any = None) -> Event:
        event = event or Event()
        event.record(self)
        return event

    def wait_event(self, event: Event) -> None:
        _merge(self.now, event.now)

    def wait_stream(self, other: Stream) -> None:
        self.wait_event(other.record_event())

    def synchronize(self) -> None:
        self.record_event().synchronize()


class Event:
    """A point in the order of a stream."""

    def __init__(self, **_: Any) -> None:
        self.now: dict[int, int] = {}

    def record(self, stream: Stream | None = None) -> None:
        self.now = dict((stream or _current()).now)

    def query(self) -> bool:
        """Whether it is certain that the event is over: only where the host has waited for it."""
        return all(traffic().seen.get(stream, 0) >= number for stream, number in self.now.items())

    def synchronize(self) -> None:
        traffic().catch_up(self.now)


def _merge(into: dict[int, int], other: dict[int, int]) -> None:
    into.update({stream: max(number, into.get(stream, 0)) for stream, number in other.items()})


# Of PrivateUse1, which the device is for torch.
_TYPE = 20
_STREAMS: dict[int, Stream] = {}
_LOCAL = threading.local()


def _current() -> Stream:
    # All threads begin with one and the same stream, as those of CUDA do.
    if not hasattr(_LOCAL, "stream"):
        _LOCAL.stream = _STREAMS.get(1) or Stream()
    found: Stream = _LOCAL.stream
    return found


class _Module(backend_registration._DummyBackendModule if _REGISTER else object):  # type: ignore[misc]
    """``torch.fake``."""

    Event = Event
    Stream = Stream

    @staticmethod
    def synchronize(*_: Any) -> None:
        for stream in _STREAMS.values():
            stream.synchronize()

    @staticmethod
    def current_stream(*_: Any) -> Stream:
        return _current()

    @staticmethod
    @contextmanager
    def stream(stream: Stream) -> Iterator[None]:
        before, _LOCAL.stream = _current(), stream
        try:
            yield
        finally:
            _LOCAL.stream = before

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


class Memory:
    """The bytes of a storage of the device, and who has used them; an attribute of the storage."""

    def __init__(self, store: Any) -> None:
        self.store, self.owner = store, _current()
        self.written = self.owner.stream_id, 0
        self.read: dict[int, int] = {}
        self.recorded = {self.owner.stream_id}

    def touch(self, stream: Stream, number: int, writes: bool, who: object) -> None:
        """Note the use by a kernel; ``Race`` if it has no order with an earlier one."""
        for other, last in [self.written, *(self.read.items() if writes else ())]:
            if stream.now.get(other, 0) < last:
                raise Race(f"{who} on {stream.stream_id} does not wait for what {other} does with its memory")
        if writes:
            self.written, self.read = (stream.stream_id, number), {}
        else:
            self.read[stream.stream_id] = number

    def freed(self) -> None:
        """Its memory is given to the next kernel of its owner."""
        over = dict(self.owner.now)
        _merge(over, traffic().seen)
        for other, last in (self.written, *self.read.items()):
            if other not in self.recorded and over.get(other, 0) < last:
                RACES.append(f"memory of {self.owner.stream_id} is freed while {other} may use it")

    def __del__(self) -> None:
        # Errors have nobody to catch them here.
        self.freed()


# Of memory that was freed too early; for the next one that waits for the device.
RACES: list[str] = []


def _wrapped(raw: torch.Tensor, known: Iterable[torch.Tensor] = ()) -> torch.Tensor:
    # The tensor of the device for one of the host, which may be a view of ``known`` tensors of the device.
    traffic().room -= 1
    if traffic().room < 0:
        raise torch.OutOfMemoryError(f"{NAME.upper()} out of memory. Tried to allocate {raw.nbytes} bytes")
    # Of zeros that are not there yet torch has no memory.
    raw = torch.zeros_like(raw, device="cpu") if raw._is_zerotensor() else raw.detach()
    store, memory = raw.untyped_storage(), None
    for base in known:
        found = base.untyped_storage().memory  # type: ignore[attr-defined]
        if found.store._cdata == store._cdata:
            memory = found
            if base.dtype == raw.dtype:
                break
    else:
        elements = max(store.nbytes() // raw.element_size(), 1)
        base = torch._C._acc.create_empty_tensor((elements,), raw.dtype)
        base.untyped_storage().memory = memory or Memory(store)  # type: ignore[attr-defined]
    place: Any = torch._C._dynamo.guards._reinterpret_tensor
    offset = raw.storage_offset() - base.storage_offset()
    return _alike(place(base.detach(), tuple(raw.shape), raw.stride(), offset), raw)


def _alike(x: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    # Conjugates and negatives are marks of a tensor, not of its memory.
    torch._C._set_conj(x, like.is_conj())
    torch._C._set_neg(x, like.is_neg())
    return x


def hidden(x: torch.Tensor) -> torch.Tensor:
    """The memory of a tensor of the device as a tensor of the host; for the device itself."""
    if x.device.type != NAME:
        return x
    store = x.untyped_storage().memory.store  # type: ignore[attr-defined]
    raw = torch.empty(0, dtype=x.dtype, device="cpu")
    return _alike(raw.set_(store, x.storage_offset(), x.size(), x.stride()), x)


def _touch(who: Any, reads: Iterable[torch.Tensor], writes: Iterable[torch.Tensor]) -> int:
    # One kernel, or copy, of the current stream; its number.
    stream = _current()
    number = stream.launch()
    for some, changes in ((reads, False), (writes, True)):
        for x in some:
            if x.device.type == NAME and x.numel():
                x.untyped_storage().memory.touch(stream, number, changes, who)  # type: ignore[attr-defined]
    return number


_INDEXING = {"aten::index", "aten::index_put", "aten::_index_put_impl_"}


def _run(op: Any, *args: Any, **kwargs: Any) -> Any:
    # Any kernel.
    if torch.Tag.nondeterministic_seeded in op.tags and kwargs.get("generator") is None:
        raise RuntimeError(f"{op}: a device draws other numbers than the host")
    if op is torch.ops.aten._local_scalar_dense.default:
        _current().synchronize()
        traffic().down(args[0].element_size())
    if op is torch.ops.aten.record_stream.default:
        args[0].untyped_storage().memory.recorded.add(args[1].stream_id)
        return None
    # Views, and memory that is only allocated, touch no bytes.
    if not (op.is_view or "empty" in op.name()):
        changed = [x for x, a in zip(args, op._schema.arguments, strict=False) if _is_written(a)]
        changed += [kwargs[a.name] for a in op._schema.arguments if a.name in kwargs and _is_written(a)]
        _touch(op, _tensors((args, kwargs)), _tensors(changed))
    known: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
    # CUDA's kernels do so too.
    takes_from_host = op.name().partition(".")[0] in _INDEXING

    def down(x: Any) -> Any:
        if isinstance(x, torch.Tensor):
            if x.device.type == "cpu" and x.dim() and not takes_from_host:
                raise RuntimeError(f"{op}: tensors are not on the same device, {NAME}")
            raw = hidden(x)
            known[id(raw)] = raw, x
            return raw
        return torch.device("cpu") if isinstance(x, torch.device) else x

    leaves = "device" in kwargs and torch.device(kwargs["device"]).type == "cpu"

    def up(x: Any) -> Any:
        if not isinstance(x, torch.Tensor) or leaves:
            return x
        return known[id(x)][1] if id(x) in known else _wrapped(x, inputs)

    inputs = _tensors((args, kwargs))
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
            x.data = _wrapped(raw, inputs)
    return tree_map(up, found)


def _is_written(argument: Any) -> bool:
    return argument.alias_info is not None and bool(argument.alias_info.is_write)


def _tensors(found: Any) -> list[torch.Tensor]:
    return [x for x in tree_leaves(found) if isinstance(x, torch.Tensor) and x.device.type == NAME]


def _stride(x: torch.Tensor, *place: Any) -> torch.Tensor:
    # In place, as of ``transpose_``: torch would look for the bytes.
    x.data = x.as_strided(*place)
    return x


def _ignored(_: object) -> None:
    pass


def _copy(source: torch.Tensor, target: torch.Tensor, non_blocking: bool = False) -> torch.Tensor:
    # Between the device and the host, in either direction, or on the device.
    mine, nbytes = traffic(), source.numel() * target.element_size()
    from_device, to_device = (x.device.type == NAME for x in (source, target))
    raw, place = hidden(source), hidden(target)
    stamp = _current().stream_id, _touch("a copy", [source], [target])
    if from_device and to_device:
        place.copy_(raw)
        return target
    if to_device:
        mine.up(nbytes)
    else:
        mine.down(nbytes)
    if not non_blocking:
        _current().synchronize()
        place.copy_(raw)
    elif to_device:
        place.copy_(raw)
        before = raw.clone()

        def unchanged() -> None:
            if not torch.equal(*(torch.atleast_1d(each).view(torch.uint8) for each in (before, raw))):
                raise RuntimeError("memory of the host was changed before its copy to the device was over")

        mine.late.append((*stamp, unchanged))
    else:
        found = raw.to(place.dtype).clone()
        torch.atleast_1d(place).view(torch.uint8).fill_(_GARBAGE)
        mine.late.append((*stamp, lambda: _ignored(place.copy_(found))))
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
    _touch(function, _tensors(args), ())
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
        some.impl("as_strided_", _stride, "PrivateUse1")
        for mark in ("Conjugate", "Negative"):
            # Else a copy of such a tensor would be copied first.
            some.impl("_copy_from", torch.library.fallthrough_kernel, mark)
        some.impl("convolution_overrideable", _convolution, "PrivateUse1")
        some.impl("convolution_backward_overrideable", _convolution_backward, "PrivateUse1")
        _LIBRARIES.extend([everything, some])
        # Torch would copy the memory of a storage.
        copied = torch.Tensor.__deepcopy__

        def deepcopy(x: torch.Tensor, memo: dict[int, Any]) -> torch.Tensor:
            if x.device.type != NAME or id(x) in memo:
                return copied(x, memo)
            memo[id(x)] = twin = x.detach().clone().requires_grad_(x.requires_grad)
            return twin

        torch.Tensor.__deepcopy__ = deepcopy  # type: ignore[method-assign]
    return torch.device(NAME, 0)
