"""The one adaptor between torch tensors and the numpy arrays of the segments; memory of large results."""

from __future__ import annotations

import threading
import weakref
from collections import OrderedDict, deque
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from math import prod
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from distdl_rma.errors import UnsupportedError
from distdl_rma.segments.transport.arena import Arena, Landing, own_arena

# All types of elements on a CPU. Code numbers travel between ranks, so the order is part of the protocol.
DTYPES: tuple[torch.dtype, ...] = (
    torch.float32,
    torch.float64,
    torch.float16,
    torch.bfloat16,
    torch.int64,
    torch.int32,
    torch.int16,
    torch.int8,
    torch.uint8,
    torch.uint16,
    torch.uint32,
    torch.uint64,
    torch.bool,
    torch.complex64,
    torch.complex128,
    torch.complex32,
    torch.float8_e4m3fn,
    torch.float8_e5m2,
)
# Dimensions of a tensor that ranks can tell each other of.
MAX_DIMS = 8
# What moves is bits: words of the same size, as torch and as numpy know them.
_WORDS: dict[int, tuple[torch.dtype, Any]] = {
    1: (torch.uint8, np.uint8),
    2: (torch.int16, np.int16),
    4: (torch.int32, np.int32),
    8: (torch.int64, np.int64),
    16: (torch.complex128, np.complex128),
}
# Types that are too short to be summed in, or that torch does not add: summed in another one.
_SUM_DTYPES: dict[torch.dtype, torch.dtype] = {
    torch.float16: torch.float32,
    torch.bfloat16: torch.float32,
    torch.float8_e4m3fn: torch.float32,
    torch.float8_e5m2: torch.float32,
    torch.complex32: torch.complex64,
    torch.uint16: torch.int64,
    torch.uint32: torch.int64,
    torch.uint64: torch.int64,
}
# Smaller results come from torch, whose allocator has touched such memory before.
SMALLEST_NBYTES = 1 << 18
# What is kept for later at most, in bytes of this process.
IDLE_NBYTES = 1 << 28
# Types that numpy has too.
_ALIKE: dict[torch.dtype, np.dtype[Any]] = {
    torch.float32: np.dtype(np.float32),
    torch.float64: np.dtype(np.float64),
    torch.float16: np.dtype(np.float16),
    torch.int64: np.dtype(np.int64),
    torch.int32: np.dtype(np.int32),
    torch.complex64: np.dtype(np.complex64),
    torch.complex128: np.dtype(np.complex128),
}


def numpy_dtype(dtype: torch.dtype, what: str) -> np.dtype[Any]:
    """Numpy type of the words that carry a torch type between ranks; ``what`` it was for, for errors."""
    if dtype not in DTYPES:
        raise UnsupportedError(f"{what}: dtype {dtype} is not supported; use one of {list(DTYPES)}")
    words: np.dtype[Any] = np.dtype(_WORDS[dtype.itemsize][1])
    return words


def reduction_dtype(dtype: torch.dtype) -> str:
    """Name by which the reductions of the segments know a torch type."""
    return str(dtype).removeprefix("torch.")


def sum_dtype(dtype: torch.dtype) -> torch.dtype:
    """Type in which elements of a type are summed."""
    return _SUM_DTYPES.get(dtype, dtype)


def trouble_with(x: object, what: str = "input") -> str:
    """What keeps a value from being a shard that can move; empty if nothing does."""
    if not isinstance(x, torch.Tensor):
        return f"{what} is of type {type(x).__name__}, wanted a tensor"
    if x.layout is not torch.strided or x.is_nested:
        return f"{what} has layout {'nested' if x.is_nested else x.layout}, wanted a dense tensor"
    if x.device.type != "cpu":
        return f"{what} is on device {x.device}, wanted a tensor on the CPU"
    if x.dtype not in DTYPES:
        return f"{what} has the unsupported dtype {x.dtype}, wanted one of {list(DTYPES)}"
    return f"{what} has {x.dim()} dimensions, wanted at most {MAX_DIMS}" if x.dim() > MAX_DIMS else ""


def as_array(tensor: torch.Tensor) -> NDArray[Any]:
    """Numpy view of a CPU tensor; no copy, no autograd. bfloat16 becomes uint16 words."""
    if tensor.dtype == torch.bfloat16:
        tensor = tensor.view(torch.uint16)
    return tensor.detach().numpy()


def as_tensor(array: NDArray[Any], dtype: torch.dtype | None = None) -> torch.Tensor:
    """Tensor view of an array, for instance of a segment buffer, as a type of the same size; no copy."""
    tensor = torch.from_numpy(array)
    return tensor if dtype is None or dtype == tensor.dtype else tensor.view(dtype)


def is_in_memory(tensor: torch.Tensor) -> bool:
    """Whether a tensor has all its elements in this process's memory, as ``as_words`` takes them."""
    return tensor.layout == torch.strided and tensor.device.type == "cpu"


def as_words(tensor: torch.Tensor) -> NDArray[Any]:
    """Bits of a CPU tensor as numpy words, in its shape; no copy, but of lazy conjugates or negatives."""
    plain = tensor.detach() if tensor.requires_grad else tensor
    # A real tensor may be a lazy negative too: the imaginary part of a conjugate.
    if plain.dtype.is_complex or plain.is_neg():
        plain = plain.resolve_conj().resolve_neg()
    word = _WORDS[plain.dtype.itemsize][0]
    try:
        return (plain if plain.dtype == word else plain.view(word)).numpy()
    except RuntimeError:
        if not plain._is_zerotensor():
            raise
    # A gradient of zeros that torch has no memory for.
    return as_words(torch.zeros(plain.shape, dtype=plain.dtype))


def autocast(*tensors: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
    """Cast as torch's autocast does for operations that gain from a shorter type; as they are without it."""
    if not torch.is_autocast_enabled("cpu"):
        return tensors
    dtype = torch.get_autocast_dtype("cpu")
    castable = (torch.float32, torch.float16, torch.bfloat16)
    # What is no tensor is refused later, by all ranks at once.
    return tuple(t.to(dtype) if isinstance(t, torch.Tensor) and t.dtype in castable else t for t in tensors)


_NOTHING = nullcontext()


def no_autocast() -> AbstractContextManager[object]:
    """Context without torch's autocast; free where that is off, as entering one without is not."""
    return torch.autocast("cpu", enabled=False) if torch.is_autocast_enabled("cpu") else _NOTHING


def zero_volume_tensor(
    b: int | None = None, dtype: torch.dtype | None = None, requires_grad: bool = False
) -> torch.Tensor:
    """Tensor without elements, which ranks without work pass and receive.

    Its shape is (b, 0) with the batch size ``b``, and (0,) if that is None; the rest as in torch.
    """
    return torch.empty((0,) if b is None else (b, 0), dtype=dtype, requires_grad=requires_grad)


_Block = NDArray[np.uint8]


def _fresh(nbytes: int) -> _Block:
    return np.empty(nbytes, np.uint8)


class _Loan(weakref.ref[NDArray[Any]]):
    # What torch holds of a block that is lent: with its last tensor it dies. ``finalize`` does more, and
    # takes several times as long.
    __slots__ = ("block",)
    block: _Block


class ResultPool:
    """Blocks of memory, kept from when the last tensor in them dies until one of the same size is made.

    A page that was never touched costs more than the copy into it. Of more than ``limit`` bytes what was idle
    for longest goes. Blocks of ``smallest`` bytes or more come from ``take`` and go to ``drop``.
    """

    def __init__(
        self,
        limit: int = IDLE_NBYTES,
        take: Callable[[int], _Block] = _fresh,
        drop: Callable[[_Block], object] = id,
        smallest: int = SMALLEST_NBYTES,
    ) -> None:
        self._limit, self._make, self._drop, self._smallest = limit, take, drop, smallest
        self._idle: OrderedDict[int, list[_Block]] = OrderedDict()
        self.idle_nbytes = 0
        # By the ``id`` of the block.
        self._lent: dict[int, _Loan] = {}
        # Blocks that came back, and whose turn it is to put them where they belong.
        self._returned: deque[_Block] = deque()
        self._lock = threading.Lock()

    def empty(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """Tensor of a shape and type, not initialised; it owns its memory like any other."""
        nbytes = prod(shape) * dtype.itemsize
        if nbytes < self._smallest:
            return torch.empty(tuple(shape), dtype=dtype)
        block, alike = self._take(nbytes), _ALIKE.get(dtype)
        # torch keeps this view for as long as any tensor lies in it, and nobody else has it.
        lent = block[:] if alike is None else np.ndarray(shape, alike, block)
        loan = self._lent[id(block)] = _Loan(lent, self._ended)
        loan.block = block
        if alike is not None:
            return torch.from_numpy(lent)
        # No view of another tensor: autograd lets only such be changed in place.
        storage, extents = torch.from_numpy(lent).untyped_storage(), torch.Size(shape)
        strides = [prod(extents[d + 1 :]) for d in range(len(extents))]
        return torch.empty(0, dtype=dtype).set_(storage, 0, extents, strides)

    def _take(self, nbytes: int) -> _Block:
        with self._lock:
            blocks = self._idle.get(nbytes)
            block = blocks.pop() if blocks else None
            self.idle_nbytes -= 0 if block is None else nbytes
        if self._returned:
            self._sort()
        return self._make(nbytes) if block is None else block

    def _ended(self, loan: Any) -> None:
        del self._lent[id(loan.block)]
        self._give_back(loan.block)

    def _give_back(self, block: _Block) -> None:
        # Runs wherever a tensor dies: on any thread, and in the middle of another call of the pool.
        self._returned.append(block)
        self._sort()

    def _sort(self) -> None:
        # Who holds the lock looks again after giving it up, so that nobody has to wait for it.
        while self._returned and self._lock.acquire(blocking=False):
            try:
                while self._returned:
                    self._keep(self._returned.popleft())
            finally:
                self._lock.release()

    def _keep(self, block: _Block) -> None:
        if block.nbytes > self._limit:
            self._drop(block)
            return
        while self.idle_nbytes + block.nbytes > self._limit and self._idle:
            _, old = self._idle.popitem(last=False)
            self.idle_nbytes -= sum(b.nbytes for b in old)
            for idle in old:
                self._drop(idle)
        self._idle.setdefault(block.nbytes, []).append(block)
        self._idle.move_to_end(block.nbytes)
        self.idle_nbytes += block.nbytes


_results = ResultPool()


def result(shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    """Memory for a result that leaves the library, not initialised."""
    if prod(shape) * dtype.itemsize < SMALLEST_NBYTES:
        return torch.empty(tuple(shape), dtype=dtype)
    return _results.empty(shape, dtype)


def landing(shape: Sequence[int], dtype: torch.dtype) -> Landing:
    """Memory for a result that other ranks of the node put to, not initialised, in the arena of this process.

    Kept and used again as that of other results. Only where there is an arena.
    """
    arena = own_arena()
    if arena is None:
        raise RuntimeError("no memory that other processes could put results to")
    with _making:
        if _landings.get(arena) is None:
            _landings[arena] = ResultPool(take=arena.take, drop=arena.drop, smallest=0)
    # Posted by a call before the one that returns it, which may train where this one only infers.
    with torch.inference_mode(False):
        tensor = _landings[arena].empty(shape, dtype)
    return Landing(as_words(tensor), arena.offset(tensor.data_ptr()), tensor)


_landings: dict[Arena, ResultPool] = {}
_making = threading.Lock()


def result_like(x: torch.Tensor) -> torch.Tensor:
    """Memory for a result of the shape, type and strides of a tensor, not initialised."""
    if x.nbytes < SMALLEST_NBYTES or not x.is_contiguous():
        return torch.empty_like(x)
    return _results.empty(x.shape, x.dtype)
