"""What a forward needs, found without its data: shapes and bytes by fake tensors, waits by a small crop."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensorMode,
)
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from distdl_rma.errors import ArgumentError, DistdlError, ShapeError, UnsupportedError
from distdl_rma.out_of_core.inference import Inference, fixed_tensors, one_tensor, twin_of
from distdl_rma.out_of_core.pages import Pages
from distdl_rma.segments.buffered_channel import Mailbox
from distdl_rma.split.tensor import SplitTensor

Post = Callable[[Any], Any] | None
# Extents of a crop have the remainders of the whole's by this number, so that a model with a few strides
# takes both; and at least as many elements, along the cut dimension four times. A volume begins with half.
_MODULUS, _LONGER = 32, 4
# A model may be too deep for a crop: the next one is twice as wide.
_CROPS = 4
# Dimensions of a batch of images.
_IMAGE = 4
# Two ranks show all waits: the first one waits only for data of later ranks.
_RANKS = 2
_CONVOLUTIONS = frozenset(
    {
        torch.ops.aten.convolution.default,
        torch.ops.aten._convolution.default,
        torch.ops.aten.mkldnn_convolution.default,
    }
)


class _LiveBytes(TorchDispatchMode):
    """Counts the bytes of the results of functions that are alive, and their maximum, as ``peak``.

    A convolution also has a copy of its input beside its halo, and copies of input and output in the order of
    torch's kernels.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._alive: dict[int, tuple[StorageWeakRef, int]] = {}
        self.peak = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run a function and count its results."""
        found = func(*args, **(kwargs or {}))
        for y in tree_leaves(found):
            if isinstance(y, torch.Tensor):
                storage = y.untyped_storage()
                self._alive[storage._cdata] = StorageWeakRef(storage), storage.nbytes()
        self._alive = {key: each for key, each in self._alive.items() if not each[0].expired()}
        extra = 2 * args[0].nbytes + found.nbytes if func in _CONVOLUTIONS else 0
        self.peak = max(self.peak, extra + sum(nbytes for _, nbytes in self._alive.values()))
        return found


@dataclass(frozen=True)
class Needs:
    """Of a forward of a whole tensor in memory: shape and dtype of the result, and the bytes of a peak."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    nbytes: int


def needs_of(model: nn.Module, post: Post, shape: Sequence[int], dtype: torch.dtype) -> Needs:
    """What a forward of a tensor of this shape needs, without its memory; local.

    ``UnsupportedError`` if shapes depend on values, ``ShapeError`` if torch refuses the shape.
    """
    twin, live = twin_of(model), _LiveBytes()
    try:
        with FakeTensorMode(allow_non_fake_inputs=True), torch.no_grad(), live:
            x = torch.empty(tuple(shape), dtype=dtype)
            y = twin(x)
            y = one_tensor(y if post is None else post(y))
            return Needs(tuple(map(int, y.shape)), y.dtype, live.peak)
    except (DataDependentOutputException, DynamicOutputShapeException) as error:
        raise UnsupportedError(
            f"predict: {error}: what the model does, or the shape of its result, depends on values; its"
            " memory cannot be known beforehand"
        ) from error
    except DistdlError:
        raise
    except (RuntimeError, ValueError) as error:
        raise ShapeError(
            f"predict: the model and post= do not take (batch, channels, *spatial) = {tuple(shape)} of"
            f" {dtype}: {type(error).__name__}: {error}"
        ) from error


@dataclass(frozen=True)
class Dependence:
    """How blocks along one dimension depend on each other, from a run of two ranks on a crop.

    ``waits`` are the modules at which a rank needs later ones. ``lag`` is how many elements of the input the
    blocks of the result end earlier, at most, than those of the input. ``messages`` are the bytes for the
    next rank per element of the cross-section, and ``held`` the bytes that waiting ranks hold per element of
    the input, at most.
    """

    waits: tuple[str, ...]
    lag: int
    messages: float
    held: float


def crop_extent(extent: int, least: int) -> int:
    """An extent of at least ``least`` with the whole's remainder, or the whole."""
    return min(extent, least + (extent - least) % min(_MODULUS, least))


def dependence_of(
    model: nn.Module, post: Post, shape: Sequence[int], dtype: torch.dtype, dim: int
) -> Dependence:
    """How blocks along a dimension depend on each other; runs the model on a crop of random numbers.

    Raises the model's errors: functions that cannot be split, and crops that the model does not take.
    """
    short = _MODULUS // (2 if len(shape) > _IMAGE else 1)
    for left in reversed(range(_CROPS)):
        try:
            return _of_long_enough(model, post, shape, dtype, dim, short)
        except (RuntimeError, ValueError, AssertionError, IndexError) as error:
            whole = all(crop_extent(n, short) == n for n in shape[2:])
            if whole or not left or isinstance(error, (UnsupportedError, ArgumentError)):
                raise
        short *= 2
    raise RuntimeError("no crop")


def _of_long_enough(
    model: nn.Module, post: Post, shape: Sequence[int], dtype: torch.dtype, dim: int, short: int
) -> Dependence:
    # A crop of which the first rank has a part of the result.
    least = _LONGER * short
    while True:
        crop = [n if d < 2 else crop_extent(n, least if d == dim else short) for d, n in enumerate(shape)]
        found, settled = _dependence(model, post, crop, dtype, dim)
        if settled or crop[dim] == shape[dim]:
            return found
        least *= 2


def _dependence(
    model: nn.Module, post: Post, crop: Sequence[int], dtype: torch.dtype, dim: int
) -> tuple[Dependence, bool]:
    waits: list[str] = []
    mailbox, ends, messages = Mailbox(), list[float](), list[int]()

    def note_wait(rank: int, path: str) -> None:
        if rank == 0:
            waits.append(path)

    def note_end(rank: int, y: torch.Tensor) -> None:
        if rank == 0:
            messages.append(mailbox.nbytes)
            scale = crop[dim]
            if isinstance(y, SplitTensor) and dim < y.dim() and dim in y.decomposition.cut_dims:
                split = y.decomposition.splits[dim]
                ends.append(split.interval(0)[1] / split.extent * scale)

    generator = torch.Generator().manual_seed(0)
    whole = torch.rand(tuple(crop), generator=generator, dtype=torch.float64).to(dtype)
    pages = Pages(1 << 62, _no_scratch, fixed_tensors(model), note_wait)
    blocks = [_RANKS if d == dim else 1 for d in range(len(crop))]
    Inference(
        model, post, crop, blocks, pages, mailbox, lambda box: whole[box].clone(), lambda *_: None, note_end
    ).run()
    half = -(-crop[dim] // 2)
    lag = max(0, round(half - ends[0])) if ends else 0
    across = prod(crop) / crop[dim]
    most = max(messages[0], mailbox.peak_nbytes)
    found = Dependence(tuple(waits), lag, most / across, pages.peak_nbytes / prod(crop))
    return found, not ends or ends[0] > 0


def _no_scratch() -> Any:
    raise RuntimeError("a crop fits into memory")
