"""What a forward needs, found without its data: shapes and bytes by fake tensors, waits by a small crop.

Nothing is asked of the model but that it runs. Three questions, and how each is answered::

    shape of the result, bytes of a peak        the whole as one block, of fake tensors without memory
    who waits for whom, lag, messages, bytes    a crop of random numbers, as two slabs, really computed
    do samples depend on each other?            a crop of all samples, as slabs along the batch: does anyone
                                                send anything, and are results those of samples alone?

Why the crop is computed really: which rows a slab gets from another one, where it waits, and what a rule of a
split tensor moves, follow from the rules themselves. They need data and ranks; a second description of them
would be wrong somewhere. A crop is as short as the model allows, and has the remainders of the whole by 32,
so that layers with strides cut it as they cut the whole.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensorMode,
)

from distdl_rma.errors import ArgumentError, ConfigurationError, DistdlError, ShapeError, UnsupportedError
from distdl_rma.geometry.intervals import Balanced
from distdl_rma.jobs.out_of_core.inference import Forward, Inference, device_of, fits_device, twin_of
from distdl_rma.jobs.out_of_core.live_memory import LiveMemory
from distdl_rma.jobs.out_of_core.pages import Pages
from distdl_rma.layers.split.tensor import SplitTensor
from distdl_rma.segments.mailbox import Mailbox
from distdl_rma.segments.waiting.uncaught_errors import place_of
from distdl_rma.trace import size_text

# Extents of a crop have the remainders of the whole's by this number, so that a model with a few strides
# takes both; and at least as many elements, along the cut dimension four times. A volume begins with half.
_MODULUS, _LONGER = 32, 4
# A model may be too deep for a crop: the next one is twice as wide.
_CROPS = 4
# Dimensions of a batch of images.
_IMAGE = 4
# Results of fewer rows are taken to be of the whole, as those of a global pool are.
_LEAST_ROWS = 4
# Two ranks show all waits: the first one waits only for data of later ranks.
_RANKS = 2
# Of what a crop needs in one block, what two need at once, at most.
_CROP_SHARE = 1.5
# By which results of samples may differ from those alone, for the largest element: roundings of the type, and
# at most a share.
_ULPS, _ROUNDED = 64, 0.01
# Ranks among which samples are divided, at most.
_SAMPLE_RANKS = 8


@dataclass(frozen=True)
class Needs:
    """Of a forward of a whole tensor in memory: shape and dtype of the result, and the bytes of a peak.

    ``extents`` are the numbers of elements that results of modules have in each dimension, ``calls`` those of
    functions that are called, ``weights`` the bytes that kernels need for the weights of a layer. The peak
    counts results of functions that are alive at once, and what kernels need for themselves beside that, as
    far as we know (``live_memory.py``).
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    nbytes: int
    extents: tuple[frozenset[int], ...]
    calls: int
    weights: int

    def unit(self, dim: int, extent: int) -> int:
        """Rows of the input, of so many, to which one of the coarsest results belongs: blocks end there."""
        coarsest = min((n for n in self.extents[dim] if n >= _LEAST_ROWS), default=extent)
        return min(_MODULUS, max(1, extent // coarsest))


def needs_of(forward: Forward, shape: Sequence[int]) -> Needs:
    """What a forward of a tensor of this shape needs, without its memory; local.

    ``UnsupportedError`` if shapes depend on values, ``ShapeError`` if torch refuses the shape.
    """
    live, fast = LiveMemory(counts=True), torch.backends.mha.get_fastpath_enabled()
    twin, extents = twin_of(forward.model), [set[int]() for _ in shape]

    def note(_module: nn.Module, _args: Any, y: Any) -> None:
        if isinstance(y, torch.Tensor) and y.dim() == len(extents):
            for found, n in zip(extents, y.shape, strict=True):
                found.add(int(n))

    for module in twin.modules():
        module.register_forward_hook(note)
    try:
        # torch's short cut through an attention is one function, whose memory would not be seen.
        torch.backends.mha.set_fastpath_enabled(False)
        with FakeTensorMode(allow_non_fake_inputs=True), torch.no_grad(), live:
            x = torch.empty(tuple(shape), dtype=forward.dtype, device=device_of(twin))
            y = forward.result(twin(x))
            shape, found = tuple(map(int, y.shape)), tuple(map(frozenset, extents))
            return Needs(shape, y.dtype, live.peak, found, live.calls, live.weight_nbytes)
    except (DataDependentOutputException, DynamicOutputShapeException) as error:
        raise UnsupportedError(
            f"predict: {error}{_at(error)}: what the model does, or the shape of its result, depends on"
            " values; its memory cannot be known beforehand"
        ) from None
    except DistdlError:
        raise
    except (RuntimeError, ValueError) as error:
        raise ShapeError(
            f"predict: the model and post= do not take (batch, channels, *spatial) = {tuple(shape)} of"
            f" {forward.dtype}: {type(error).__name__}{_at(error)}: {error}"
        ) from None
    finally:
        torch.backends.mha.set_fastpath_enabled(fast)


def _at(error: Exception) -> str:
    # In place of the traceback, whose frames but this one are torch's.
    return f" at {place}" if (place := place_of(error)) else ""


@dataclass(frozen=True)
class Dependence:
    """What blocks along one dimension need, and of each other, from runs of a few ranks on a crop.

    Attributes
    ----------
    waits
        Modules at which a rank needs later ones.
    crop, alone
        Shape of the crop, and the bytes that it needs in one block.
    row
        Bytes that a rank needs while it runs, for each row of its block: an element of the cut dimension.
    lag
        Rows by which the result of a rank ends before its input.
    whole
        Bytes that each rank needs for tensors that are not cut.
    parts
        Ranks that have a part of a tensor that is cut otherwise, at most.
    messages
        Bytes of messages that wait at once.
    held, copies, moved
        Bytes that all waiting ranks hold together, those that each one adds of tensors that are not cut, and
        those of messages of a tensor that is cut otherwise.
    """

    waits: tuple[str, ...]
    crop: tuple[int, ...]
    alone: int
    row: float
    lag: int
    whole: int
    parts: float
    messages: int
    held: int
    copies: int
    moved: int


def crop_extent(extent: int, least: int) -> int:
    """An extent of at least ``least`` with the whole's remainder, or the whole."""
    return min(extent, least + (extent - least) % min(_MODULUS, least))


def dependence_of(forward: Forward, shape: Sequence[int], dim: int, memory: int) -> Dependence:
    """How blocks along a dimension depend on each other; runs the model on a crop of random numbers.

    Raises the model's errors, of functions that cannot be split and crops that the model does not take; and
    ``ConfigurationError`` if the crop needs more than ``memory``.
    """
    short = _MODULUS // (2 if len(shape) > _IMAGE else 1)
    for left in reversed(range(_CROPS)):
        try:
            return _of_long_enough(forward, shape, dim, short, memory)
        except (RuntimeError, ValueError, AssertionError, IndexError) as error:
            whole = all(crop_extent(n, short) == n for n in shape[2:])
            if whole or not left or isinstance(error, (UnsupportedError, ArgumentError, ConfigurationError)):
                raise
        short *= 2
    raise RuntimeError("no crop")


def _of_long_enough(forward: Forward, shape: Sequence[int], dim: int, short: int, memory: int) -> Dependence:
    # A crop of which the first rank has a part of the result: with a deep model and a short crop, all results
    # would belong to the second one, and nothing would be seen of how they depend on each other.
    least = _LONGER * short
    while True:
        crop = tuple(
            n if d < 2 else crop_extent(n, least if d == dim else short) for d, n in enumerate(shape)
        )
        alone = needs_of(forward, crop).nbytes
        if (nbytes := _CROP_SHARE * alone) > memory:
            raise ConfigurationError(
                f"predict: memory={size_text(memory)} is too small: the model is tried on a crop of {crop},"
                f" which needs {size_text(nbytes)}; give as much"
            )
        run = _Run(forward, crop, dim, _RANKS)
        if run.settled or crop[dim] == shape[dim]:
            break
        least *= 2
    first, last = (run.pages.peaks.get(rank, 0) for rank in range(_RANKS))
    whole = copies = moved = 0
    held = max(run.pages.held.values(), default=0)
    if run.mailbox.whole_nbytes and run.waits:
        # With twice as many ranks, only memory of tensors that are not cut stays the same: of two runs we
        # learn which part of the memory is of these.
        more = _Run(forward, crop, dim, 2 * _RANKS)
        whole = max(0, sum(more.pages.peaks.values()) - first - last) // 2
        copies = min(held, max(0, 2 * max(more.pages.held.values(), default=0) - held))
        moved = (2 * _RANKS) ** 2 * more.mailbox.whole_nbytes // (2 * _RANKS - 1)
    # Extents in space are those of the crop.
    parts = min(
        (n * shape[d] / crop[d] if dims == len(crop) and d > 1 else n for dims, d, n in run.mailbox.cuts),
        default=float("inf"),
    )
    row = max(1.0, (first + last - 2 * whole) / crop[dim])
    return Dependence(
        tuple(run.waits), crop, alone, row, run.lag, whole, parts,
        run.mailbox.peak_nbytes, _RANKS * (held - copies), copies, moved,
    )  # fmt: skip


class _Run(Inference):
    """A run of some ranks on a crop of random numbers, and what was found.

    ``settled`` and ``lag`` are those of the result of the first rank, ``waits`` the modules in which it
    waited for a later one; ``pages`` has counted bytes, the ``mailbox`` messages.
    """

    def __init__(self, forward: Forward, crop: Sequence[int], dim: int, ranks: int) -> None:
        super().__init__(forward, [Balanced(n, min(ranks, n) if d == dim else 1) for d, n in enumerate(crop)])
        self._whole, self._split = _random(crop, forward.dtype), self.splits[dim]
        self.waits: list[str] = []
        # Whether the first rank has a part of the result.
        self.settled, self.lag = True, 0
        self.mailbox, self.pages = Mailbox(), Pages(1 << 62, _no_scratch, self._note_wait, counts=True)
        self.play(self.pages, self.mailbox)

    def read(self, box: tuple[slice, ...]) -> torch.Tensor:
        """The block of a box."""
        return self._whole[box].clone()

    def _note_wait(self, rank: int, path: str) -> None:
        if rank == 0:
            self.waits.append(path)

    def ended(self, rank: int, y: torch.Tensor) -> None:
        """Note where the result of the first rank ends."""
        if rank > 0 or not isinstance(y, SplitTensor):
            return
        for dim in y.decomposition.cut_dims:
            split = y.decomposition.splits[dim]
            stop, end = split.interval(0)[1], self._split.interval(0)[1]
            self.settled = stop > 0
            self.lag = max(0, end - stop * self._split.extent // split.extent)


def are_independent(forward: Forward, found: Dependence, sample: Sequence[int], memory: int) -> bool:
    """Whether each of the samples (batch, channels, *spatial) has the result that it has alone.

    Runs the model on crops of all samples. Ranks with samples of their own send each other nothing, and the
    results are those of samples alone but for rounding. Where this cannot be seen, it is False.
    """
    twin, n = twin_of(forward.model), sample[0]
    # Smaller crops, if the model takes them, where all samples of the one that was found do not fit.
    smaller = ([crop_extent(n, _MODULUS >> by) for n in sample[2:]] for by in range(_MODULUS.bit_length()))
    for space in (found.crop[2:], *smaller):
        with suppress(ShapeError):
            crop = (n, sample[1], *space)
            if _CROP_SHARE * needs_of(forward, crop).nbytes <= memory:
                break
    else:
        return False

    try:
        run = _Run(forward, crop, 0, _SAMPLE_RANKS)
        with torch.no_grad(), fits_device(run.device, crop):
            x = _random(crop, forward.dtype).to(run.device)
            y, *alone = (forward.result(twin(each)) for each in (x, *x.split(1)))
        silent = not (run.mailbox.wanted or run.mailbox.peak_nbytes)
        return silent and _are_near(y, torch.cat(alone), forward.dtype)
    except ConfigurationError:
        raise
    except (RuntimeError, ValueError, AssertionError, IndexError):
        return False


def _are_near(y: torch.Tensor, alone: torch.Tensor, dtype: torch.dtype) -> bool:
    # Kernels round otherwise for more samples: by the type, and the largest element of the channel. So a few
    # classes are others.
    kind = y.device.type
    types = [y.dtype, dtype, *[torch.get_autocast_dtype(kind)] * torch.is_autocast_enabled(kind)]
    floats = [each for each in types if each.is_floating_point or each.is_complex] or [torch.float32]
    rounded = min(_ROUNDED, _ULPS * max(torch.finfo(each).eps for each in floats))
    distance, share = (rounded, 0.0) if y.dtype in floats else (0.0, rounded)
    y, alone = (
        each.to(torch.complex128 if each.is_complex() else torch.float64) for each in (y.cpu(), alone.cpu())
    )
    size = alone.nan_to_num(0, 0, 0).abs().amax([d for d in range(y.dim()) if d != 1], keepdim=True)
    near = torch.isclose(y / size, alone / size, rtol=0, atol=distance, equal_nan=True)
    return y.shape == alone.shape and float((~near).double().mean()) <= share


def _random(shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    # The same on all processes. Of integers 0 and 1, which most tables have.
    generator = torch.Generator().manual_seed(0)
    x = torch.rand(tuple(shape), generator=generator, dtype=torch.float64)
    x = torch.complex(x, 1 - x) if dtype.is_complex else x
    return (x if dtype.is_floating_point or dtype.is_complex else x.round()).to(dtype)


def _no_scratch() -> Any:
    raise RuntimeError("a crop fits into memory")
