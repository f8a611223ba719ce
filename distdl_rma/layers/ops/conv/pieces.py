"""A convolution of a large patch, a piece at a time: each piece stays in the cache.

torch's kernels reorder the elements of what they read and write, into blocks of channels that fill a vector
of the processor. For a large tensor the copies are large too, in pages that the system has just mapped: their
first use takes longer than the reordering, or than a whole convolution of few channels. Pieces take the same
memory again and again::

    data       |#########################|       the data of a patch, cut for the gradients:
    pieces     |########|                        each piece with all outputs that read it, so that
                        |########|               neighbours compute a few outputs twice
                                 |#######|

    outputs    |.........................|       the outputs of a patch, cut for the forward:
    pieces     |........|                        each piece with all data that it reads
                        |........|
                                 |.......|

Which patches are cut follows from measurements on processors with 1 to 2 MiB of cache per core: for
gradients, pieces of half a MiB pay from 4 MiB per thread on; for outputs, pieces of 1 MiB per thread once a
tensor is so large that it gets new pages. Pieces are never so small that torch would choose its slower
kernels.
"""

from __future__ import annotations

from itertools import pairwise
from math import prod

import torch
from torch import Tensor

from distdl_rma.geometry.box import LEADING
from distdl_rma.layers.dtypes import sum_dtype
from distdl_rma.layers.ops.conv.kernels import Needs, convolution_adjoint
from distdl_rma.layers.ops.conv.own_and_halo import ALL, Patch
from distdl_rma.layers.ops.core.result_memory import MAPPED, result

# Gradients of patches with more than so many bytes per thread are computed in pieces of so many.
_LARGE_NBYTES, _PIECE_NBYTES = 1 << 22, 1 << 19
# Outputs of large patches of images are computed in pieces of so many at most, whose memory is used again.
# Where the allocator keeps only smaller memory than the second number, pieces would be too small.
_OUTPUTS_NBYTES, _KEPT_NBYTES = 1 << 20, 1 << 20
# torch uses slower kernels for pieces of fewer elements, not counting the last dimension of volumes.
_PIECE_ELEMENTS = 1 << 15
# Windows in a piece, at least, so that few outputs are computed twice.
_WINDOWS = 8


class InPieces:
    """The convolution of a patch, and its adjoint, in pieces where these are faster.

    It takes the place of the patch in a schedule: ``convolve`` and ``convolve_adjoint`` are those of the
    patch, but for rounding, and for the gradient of a bias, which pieces do not give. ``of_data`` are the
    pieces for the adjoint, if any. Those of the outputs depend on ``MAPPED``, which a prediction lowers while
    it runs: they are found at the first call for each size. ``pixel_nbytes`` are the bytes of all channels of
    a pixel, of the input or of the output.
    """

    def __init__(self, patch: Patch, pixel_nbytes: int, of_data: tuple[Patch, ...] = ()) -> None:
        self.patch, self.of_data, self._pixel_nbytes = patch, of_data, pixel_nbytes
        self._of_outputs: dict[int, tuple[Patch, ...]] = {}

    def convolve(self, block: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        """Outputs of the patch, from the held tensor."""
        above, outputs = MAPPED.nbytes, self.patch.outputs
        if (pieces := self._of_outputs.get(above)) is None:
            pieces = self._of_outputs[above] = self.pieces_of_outputs(above)
        if not (pieces and block.is_cpu):
            return self.patch.convolve(block, weight, bias)
        samples, _, *space = outputs.shape
        y = result((samples, weight.shape[0], *space), weight.dtype)
        for piece in pieces:
            batch, _, *place = piece.outputs.slices(outputs)
            y[(batch, ALL, *place)] = piece.convolve(block, weight, bias)
        return y

    def convolve_adjoint(
        self, gradient: Tensor, block: Tensor, weight: Tensor, needs: Needs
    ) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        """Gradients of the held tensor, of the patch's part of the weight, and of the bias without pieces.

        Two pieces may compute the same outputs, whose gradients would count twice in that of the bias. Each
        piece writes the gradient of its own data: data of no two pieces overlap, and only the weight's
        gradient is a sum.
        """
        if not (self.of_data and block.is_cpu):
            return self.patch.convolve_adjoint(gradient, block, weight, needs)
        outer, total, needs = torch.empty_like(block) if needs[0] else None, None, (*needs[:2], False)
        for piece in self.of_data:
            part, taps, _ = convolution_adjoint(
                gradient[piece.place], piece.operand(block), weight[piece.weight], piece.steps, needs
            )
            if outer is not None and part is not None:
                inside = piece.data_in_convolved
                outer[piece.crop] = part if inside is None else part[inside]
            total = taps if total is None or taps is None else total.add_(taps)
        return outer, total, None

    def pieces_of_outputs(self, above: int) -> tuple[Patch, ...]:
        """Pieces in which outputs of an image are computed: samples, or rows of all samples; or none.

        There are none for tensors up to ``above`` bytes, the size above which tensors have new pages.
        """
        patch, (samples, _, *space) = self.patch, self.patch.outputs.shape
        nbytes = self._pixel_nbytes * prod(space) * samples
        if len(space) != 2 or above < _KEPT_NBYTES or nbytes <= above:
            return ()
        count = nbytes // min(_OUTPUTS_NBYTES * torch.get_num_threads(), above // 4)
        d, length = (0, samples) if samples >= count else (LEADING, space[0])
        step, (start, stop) = max(1, length // max(1, count)), patch.outputs.bounds[d]
        parts = [patch.outputs.replace(d, low, min(stop, low + step)) for low in range(start, stop, step)]
        pieces = [Patch.of(patch.stencil, patch.data, part, patch.held, patch.groups) for part in parts]
        found = tuple(piece for piece in pieces if piece is not None and piece.complete)
        return found if len(found) == len(parts) else ()


def in_pieces(patch: Patch, channels: int, dtype: torch.dtype) -> Patch | InPieces:
    """A patch with so many channels of outputs; if pieces of it may be faster, what convolves it in pieces.

    A small patch is returned as it is, so that its calls cost nothing more. Gradients of short types have no
    pieces: their sum would be rounded once per piece.
    """
    most = max(channels, patch.data.shape[1])
    if max(patch.data.volume, patch.within.volume * most) * dtype.itemsize <= _KEPT_NBYTES:
        return patch
    each = max(patch.data.volume, patch.within.volume * channels) * dtype.itemsize // torch.get_num_threads()
    count, fit = each // _PIECE_NBYTES, prod(patch.data.shape[:4]) // _PIECE_ELEMENTS
    pays = each >= _LARGE_NBYTES and count <= fit and sum_dtype(dtype) == dtype
    return InPieces(patch, most * dtype.itemsize, pieces_of_data(patch, count) if pays else ())


def pieces_of_data(patch: Patch, count: int) -> tuple[Patch, ...]:
    """Patches of ``count`` pieces of the data, of fewer down to half as many, or none.

    They are cut along the dimension that gives most pieces; samples share no outputs. There are none if a
    piece would read through other taps than the patch, or if no output reads some of its data.
    """
    dims = [d for d in range(len(patch.data.bounds)) if d != 1]
    most = [min(count, _most_pieces(patch, d)) for d in dims]
    if max(most) < max(2, count / 2):
        return ()
    count, d = max(most), dims[most.index(max(most))]
    low, high = patch.data.bounds[d]
    ends = [low + (high - low) * n // count for n in range(count + 1)]
    boxes = [patch.data.replace(d, *bounds) for bounds in pairwise(ends)]
    found = [Patch.of(patch.stencil, box, patch.within, patch.held, patch.groups) for box in boxes]
    pieces = tuple(p for p in found if p is not None and p.taps == patch.taps and p.inside == p.data)
    return pieces if len(pieces) == count else ()


def _most_pieces(patch: Patch, d: int) -> int:
    low, high = patch.data.bounds[d]
    return (high - low) // (_WINDOWS * patch.stencil.windows[d].span) if d else high - low
