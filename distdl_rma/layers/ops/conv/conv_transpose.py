"""Transposed convolution of split tensors: of own data and the halo, or of own data alone.

An input adds to all outputs in its window, so outputs near a cut get parts of inputs on both sides. Windows
of 3 outputs with stride 2, and two ranks with 3 inputs each::

    inputs                    0   1   2 | 3   4   5
    outputs of input 2                4 5 6
    outputs of input 3                    6 7 8         both add to output 6

    gather      the owner of output 6 gets both inputs and computes the output: no sum between ranks
    scatter     each rank computes the outputs of its inputs; ``scatter`` sums both parts of output 6

Inputs are fewer than outputs, so to gather moves less, and rounds once. It needs all channels of the input
and the whole weight on each rank. Otherwise ranks scatter, and so they do in 16 bits, where the padding that
gathering needs makes torch's gradient of the weight slow. A prediction has no gradients, and gathers then
too.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional as F  # noqa: N812

from distdl_rma.errors import ShapeError
from distdl_rma.geometry.box import LEADING, Box
from distdl_rma.geometry.decomposition import Decomposition
from distdl_rma.geometry.halo import ReadersSplit, Stencil, Window
from distdl_rma.geometry.intervals import Balanced, Split
from distdl_rma.geometry.partition import Partition
from distdl_rma.layers.ops.conv.convolution import GridConvolution
from distdl_rma.layers.ops.conv.worker_grid import IN, OUT, ConvolutionOptions, channels_out
from distdl_rma.layers.ops.core.autograd import tied
from distdl_rma.layers.ops.core.movement import CallSite
from distdl_rma.layers.ops.core.order import in_order, outputs_of
from distdl_rma.layers.ops.core.staged import movement_or_none


class TransposedConvolution(GridConvolution):
    """Transposed convolution: input in any decomposition, output in balanced blocks on ``target``.

    With ``on_workers`` the workers own the input, and the output's batch keeps the input's cut if the target
    is the input's partition. If every worker then has the whole weight, of at least 32 bits or in a
    prediction, it gathers all inputs that add to its outputs. Otherwise the workers convolve their own data,
    and overlapping outputs are summed and sent to their owners, which add the bias. ``ShapeError`` if the
    output would have no elements in space.
    """

    def __init__(
        self,
        site: CallSite,
        options: ConvolutionOptions,
        source: Decomposition,
        target: Partition,
        dtype: torch.dtype,
        output_padding: Sequence[int],
    ) -> None:
        stencil, workers, on_workers = options.stencil, options.workers, options.on_workers
        channels = channels_out(workers, source)
        inputs, grid = source.shape[LEADING:], workers.grid.shape
        least = least_outputs(stencil, inputs)
        extents = tuple(n + extra for n, extra in zip(least, output_padding, strict=True))
        if min(extents) < 1:
            raise ShapeError(f"global input {inputs} is too small: the output would be {extents}")
        rows: Split | None = None
        batch: Split = Balanced(source.shape[0], grid[0])
        space: Sequence[Split] = [Balanced(n, p) for n, p in zip(inputs, grid[3:], strict=True)]
        if on_workers:
            batch, rows, *space = source.splits
        output = Decomposition.balanced(target, (source.shape[0], channels, *extents))
        if on_workers and target == source.partition:
            # The inputs that add to an output are those whose window over the outputs meets it.
            reads = [window.readers for window in stencil.windows]
            output = outputs_of(site.machine, source, output, lambda: reads).with_splits({0: batch})
        in_place = on_workers and target == source.partition and grid[OUT] == grid[IN] == 1
        # oneDNN takes twice as long for the gradient of a weight of 16 bits if the padding is wide. A
        # prediction has none, and is not rounded once more where slabs meet.
        in_place = in_place and (dtype.itemsize > 2 or in_order(site.machine))
        computed = output if in_place else workers.by_columns(batch, stencil.with_halo(space, extents), rows)
        super().__init__(site, options, source, dtype, (computed, output), rows)
        # Zeros beside the gathered inputs, as torch's padding takes them; none for most layers.
        self._zeros: list[int] = []
        if in_place:
            gathered = source.with_splits(_contributors(stencil, source, output))
            self.gather = movement_or_none(site, source, gathered, dtype, "input")
            self._crop(stencil, *(d.box(site.machine.rank) for d in (gathered, output)))
        elif not on_workers:
            self.gather = movement_or_none(site, source, workers.by_rows(batch, space), dtype, "input")
        self._channels = output.box(site.machine.rank).bounds[1]
        # Where nothing is summed, torch's kernel adds the bias.
        self._with_bias = self.scatter is None and self._channels == (0, channels)

    def _crop(self, stencil: Stencil, reads: Box, outputs: Box) -> None:
        # torch crops alike at both ends, but for less than a stride: zeros beside the inputs make it so.
        found = [
            crop(*each)
            for each in zip(stencil.windows, reads.bounds[LEADING:], outputs.bounds[LEADING:], strict=True)
        ]
        zeros = [n for before, behind, *_ in reversed(found) for n in (before, behind)]
        self._zeros = zeros if any(zeros) else []
        padding, extra = ((*each,) for each in tuple(zip(*found, strict=True))[2:])
        self._runs = [
            (channels, rows, steps._replace(padding=padding, output_padding=extra))
            for channels, rows, steps in self._runs
        ]

    def convolve_block(self, x: Tensor, block: Tensor, bias: Tensor | None) -> Tensor:
        """Outputs of the gathered inputs, or partial outputs of the data of this rank."""
        x = F.pad(x, self._zeros) if self._zeros else x
        y = self.in_runs(x, block, bias if self._with_bias else None)
        width, (low, high) = self._workers.weight[1], self._block.bounds[1]
        if self._workers.groups > 1 and high - low < width:
            # All channels of each group; other columns' channels are zero here.
            sides = (0, 0) * (y.dim() - LEADING) + (low, width - high)
            y = F.pad(y.unflatten(1, (-1, high - low)), sides).flatten(1, 2)
        return y if self._with_bias else tied(y, (bias,))

    def finish(self, y: Tensor, **weights: Tensor) -> Tensor:
        """Add the bias to the summed output."""
        bias, (start, stop) = weights.get("bias"), self._channels
        if bias is None or self._with_bias:
            return y
        block = bias if bias.shape[0] == stop - start else bias[start:stop]
        return y + block.view(-1, *(1,) * (y.dim() - LEADING))


def _contributors(stencil: Stencil, source: Decomposition, output: Decomposition) -> dict[int, Split]:
    # Along dimensions that are not cut, torch pads the whole input.
    found: dict[int, Split] = {}
    for d, window in enumerate(stencil.windows, LEADING):
        split, n = output.splits[d], source.shape[d]
        if split.parts > 1:
            found[d] = inputs = ReadersSplit(split, window, n)
            parts = [part for part in range(split.parts) if split.interval(part)[0] < split.interval(part)[1]]
            missing = (crop(window, inputs.interval(p), split.interval(p))[0] for p in parts)
            found[d] = ReadersSplit(split, window, n, max(missing, default=0))
    return found


def crop(window: Window, inputs: tuple[int, int], outputs: tuple[int, int]) -> tuple[int, int, int, int]:
    """Zeros before and behind inputs, and padding and output padding, with which torch gives the outputs.

    The inputs contain all that add to the outputs. torch crops ``padding`` outputs at both ends, and less
    than a stride fewer at the second one (``output_padding``). Where a rank's outputs need another
    difference, zeros beside the inputs move the ends by a stride each.
    """
    (first, last), (start, stop), step = inputs, outputs, window.stride
    low = start + window.left - first * step
    high = (last - 1) * step - window.left + window.span - stop
    before = max(0, -(low // step), -((low - high) // step))
    low += before * step
    return before, (low - high) // step, low, (low - high) % step


def least_outputs(stencil: Stencil, inputs: Sequence[int]) -> tuple[int, ...]:
    """Extents of the output without any output padding."""
    return tuple(
        (n - 1) * w.stride + w.span - w.left - w.right for n, w in zip(inputs, stencil.windows, strict=True)
    )


def output_padding_for(
    stencil: Stencil, inputs: Sequence[int], output_size: Sequence[int]
) -> tuple[int, ...]:
    """Output padding for an output size, in space or in all dimensions; ``ShapeError`` if there is none."""
    dims = len(stencil.windows)
    if len(output_size) not in (dims, dims + LEADING):
        raise ShapeError(f"output_size has {len(output_size)} numbers, it needs {dims} or {dims + LEADING}")
    wanted, least = tuple(output_size[-dims:]), least_outputs(stencil, inputs)
    most = tuple(low + w.stride - 1 for low, w in zip(least, stencil.windows, strict=True))
    if any(not low <= n <= high for low, n, high in zip(least, wanted, most, strict=True)):
        raise ShapeError(
            f"output_size {wanted} is not between {least} and {most}, for a global input of {tuple(inputs)}"
        )
    return tuple(n - low for n, low in zip(wanted, least, strict=True))
