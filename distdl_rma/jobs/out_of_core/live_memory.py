"""Memory of the results of functions that is alive, and what their kernels need for themselves.

A mode of torch sees every function that a forward calls, below autograd, and its results. It keeps weak
references to their memory, so that it knows at any time what is alive, without keeping anything alive::

    function      makes      alive after it           peak
    conv1         y1         x, y1                    with the copies in the kernel's order of channels
    relu_         -          x, y1                    in place: nothing is made
    conv2         y2         y1, y2                   x has died

What a kernel takes for itself is seen by nobody. It is computed here from shapes, for those that take much:
convolutions, products of batches, Fourier transforms. The numbers are of torch's CPU kernels and of oneDNN;
where they vary with the processor, the largest is taken. Too much costs more slabs, too little
costs the job.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from functools import lru_cache
from math import prod
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

# Channels of a block of oneDNN's order of elements, on the processors with the longest vectors; and numbers
# of channels of an input whose order stays.
_CHANNELS_OF_BLOCK, _CHANNELS_IN_ORDER = 16, (1, 3)
_ATEN = torch.ops.aten
_PRODUCTS = {_ATEN.bmm, _ATEN.baddbmm}
_TRANSFORMS = {_ATEN._fft_r2c, _ATEN._fft_c2r, _ATEN._fft_c2c}
# A slab's plan of a convolution is as large as those of so many other functions.
_CALLS_OF_CONVOLUTION = 7
# With the place of the argument that says whether it is transposed.
_CONVOLUTIONS = {_ATEN.convolution: 6, _ATEN._convolution: 6, _ATEN.mkldnn_convolution: None}


class LiveMemory(TorchDispatchMode):
    """Context that notes the memory which functions make in it, as long as it is alive.

    With ``counts``, ``peak`` is the largest number of bytes that were alive at once, those which kernels need
    for themselves included. ``weight_nbytes`` is what they need for the weights of a layer, beside that;
    ``calls`` is the number of functions that were called, of which a convolution counts as several.
    Views, results in given memory and memory that torch does not make are not noted.
    """

    def __init__(self, counts: bool = False) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._counts = counts
        self._alive: dict[int, tuple[StorageWeakRef, int]] = {}
        self.peak = self.weight_nbytes = self.calls = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run a function and note its results."""
        found = func(*args, **(kwargs or {}))
        self.calls += _CALLS_OF_CONVOLUTION if func.overloadpacket in _CONVOLUTIONS else 1
        if _makes_memory(func):
            for y in _tensors(found):
                storage = y.untyped_storage()
                self._alive[storage._cdata] = StorageWeakRef(storage), storage.nbytes()
        if self._counts:
            self._alive = {key: each for key, each in self._alive.items() if not each[0].expired()}
            own = _of_kernel(func, args, found)
            self.peak = max(self.peak, own + sum(nbytes for _, nbytes in self._alive.values()))
            if func.overloadpacket in _CONVOLUTIONS:
                self.weight_nbytes = max(self.weight_nbytes, 2 * args[1].nbytes)
        return found

    def storages(self) -> Iterator[torch.UntypedStorage]:
        """Memory that is alive."""
        for key, (reference, _) in [*self._alive.items()]:
            storage: Any = torch.UntypedStorage._new_with_weak_ptr(reference.cdata)
            if storage is None:
                del self._alive[key]
            else:
                yield storage


@lru_cache(maxsize=4096)
def _makes_memory(func: Any) -> bool:
    return all(each.alias_info is None for each in func._schema.returns)


def _tensors(found: Any) -> Iterable[torch.Tensor]:
    if type(found) in (tuple, list):
        return (y for each in found for y in _tensors(each))
    ordinary = isinstance(found, torch.Tensor) and found.layout == torch.strided and not found.is_meta
    return (found,) if ordinary else ()


def _of_kernel(func: Any, args: Any, y: Any) -> int:
    """Bytes that a kernel needs beside operands and results, at most."""
    kind = func.overloadpacket
    if kind in _CONVOLUTIONS:
        return _of_convolution(args[0], args[1], y, args[6] if _CONVOLUTIONS[kind] else False)
    if kind in _PRODUCTS:
        # Operands in another order are copied, but not again for each product that they are expanded to; and
        # what is added is copied to the result.
        others = [x for x in args if isinstance(x, torch.Tensor) and not x.is_contiguous()]
        return int(sum(min(x.nbytes, x.untyped_storage().nbytes()) for x in others) + y.nbytes)
    # Transforms of several dimensions copy the operand.
    return int(y.nbytes) if kind in _TRANSFORMS else 0


def _of_convolution(x: torch.Tensor, weight: torch.Tensor, y: torch.Tensor, transposed: bool) -> int:
    if x.dtype == torch.float64 or not torch.backends.mkldnn.is_available():
        # torch's kernels write a row for each output, with all elements that it reads.
        small, large = (x, y) if transposed else (y, x)
        window = prod(weight.shape[2:])
        return small.nbytes // max(1, small.shape[1]) * large.shape[1] * window if window > 1 else 0
    # Copies of input and output in blocks of channels, filled up.
    source = 0 if x.shape[1] in _CHANNELS_IN_ORDER else x.nbytes // x.shape[1] * _filled(x.shape[1])
    return source + y.nbytes // max(1, y.shape[1]) * _filled(y.shape[1])


def _filled(channels: int) -> int:
    # oneDNN fills up the last block of channels with zeros.
    return -(-channels // _CHANNELS_OF_BLOCK) * _CHANNELS_OF_BLOCK
