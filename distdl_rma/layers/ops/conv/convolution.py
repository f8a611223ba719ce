"""Convolution of split tensors: own data while the halo travels, then the halo; and its adjoint.

The schedule of a rank, time from left to right. The patches ``core`` and ``rim`` are those of
``own_and_halo.py``: own data, and the data of others that its outputs read::

    forward    start | convolve the core ......... | wait | convolve the rim, add its outputs
    halo           |========== travels =========|

    backward   rim's adjoint | start | core's adjoint, weight, bias ..... | wait | add what has come
    gradients                      |========== travel =========|

The backward has the rim first, since other ranks wait for its gradients, and the core meanwhile. With
``joins`` there is no core: own data are copied beside the place of the halo while it travels, and one
convolution computes all outputs. Its backward computes the gradient of the weight while gradients travel.

All of it is one autograd function, ``_HaloSchedule``, for two reasons. A graph of single operations would run
backwards in an order that torch chooses, which need not send first. And torch would save the tensors of the
rim; here only the halo is saved, and own data are copied to the rim's tensors again in the backward.

A layer starts before its ranks have agreed on the shapes, with the operation of the last call (its guess). If
the ranks then agree on another one, that one begins anew, and the halo of the guess is void on all ranks.

Where a convolution is no sum over disjoint boxes of its input (``can_overlap`` of ``worker_grid.py``), ranks
first gather all that their outputs read (``WindowGather``), and torch's autograd differentiates the rest.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import chain
from typing import Any

import numpy as np
import torch
from torch import Tensor

from distdl_rma.geometry.box import LEADING, Box
from distdl_rma.geometry.decomposition import Decomposition
from distdl_rma.geometry.exchange import Exchange
from distdl_rma.geometry.intervals import Balanced, Split
from distdl_rma.geometry.partition import Partition
from distdl_rma.layers.dtypes import as_words, sum_dtype
from distdl_rma.layers.ops.conv.kernels import ConvolutionArguments, convolution
from distdl_rma.layers.ops.conv.own_and_halo import OwnAndHalo, Patch, with_channels
from distdl_rma.layers.ops.conv.pieces import InPieces, in_pieces
from distdl_rma.layers.ops.conv.worker_grid import IN, ConvolutionOptions, channels_out
from distdl_rma.layers.ops.core.autograd import (
    GradientNeeds,
    OperatorFunction,
    anchor,
    first_derivative,
    recomputed_by_all,
    tied,
)
from distdl_rma.layers.ops.core.movement import CallSite, Movement, uploaded
from distdl_rma.layers.ops.core.operation import Agreement, GatherComputeScatter
from distdl_rma.layers.ops.core.order import in_order, outputs_of
from distdl_rma.layers.ops.core.result_memory import SMALLEST_NBYTES
from distdl_rma.layers.ops.core.staged import Moves, movement_or_none
from distdl_rma.layers.ops.core.tensors import AUTOCASTS, no_autocast
from distdl_rma.layers.ops.window_gather import WindowGather
from distdl_rma.layers.staging import to_host
from distdl_rma.segments.large_arrays import LARGE_NBYTES, copy

# Records in the trace which part of the schedule begins.
Mark = Callable[[str], object]
# Writes the gradient of "weight" or "bias" to its place, and returns it there.
Fill = Callable[[str, Tensor], Tensor]
# A patch, and the gradients of its tensor, of its part of the weight, and of the bias; None where not needed.
Found = tuple[Patch, Any, Any, Any]


class GridConvolution(GatherComputeScatter):
    """A convolution by a grid of ranks: each computes partial outputs with its block of the weight.

    Calls pass this rank's block of the weight, or the whole weight. ``source`` is the decomposition of the
    input (batch, channel, *spatial). ``ShapeError`` if it has another number of channels than the layer, or
    no elements in space. ``ends`` are the decompositions of the partial outputs and of the output.

    Ranks along the in-channel dimension of the grid compute outputs of the same box, each from its channels:
    ``scatter`` sums these. The one with the first in-channel block adds the bias; calls pass the others a
    bias without elements.
    """

    def __init__(
        self,
        site: CallSite,
        options: ConvolutionOptions,
        source: Decomposition,
        dtype: torch.dtype,
        ends: tuple[Decomposition, Decomposition],
        row_split: Split | None = None,
    ) -> None:
        workers, rank, (computed, output) = options.workers, site.machine.rank, ends
        super().__init__(site, source.partition.active, workers.grid.active, output)
        self.scatter = movement_or_none(site, computed, output, dtype, "output")
        self._workers, transposed = workers, workers.rows == IN
        self._steps = ConvolutionArguments.of(options.stencil, workers.groups, transposed)
        self._shape, self._block = computed.box(rank).shape, workers.blocks(row_split).box(rank)
        self._empty = 0 in (*self._shape, *self._block.shape)
        self._runs = [
            (channels, rows, self._steps._replace(groups=groups))
            for channels, rows, groups in workers.runs(self._block)
        ]

    def block(self, weight: Tensor) -> Tensor:
        """This rank's block, from the block itself or from the whole weight."""
        if self._empty or weight.shape == self._block.shape:
            return weight
        return weight[tuple(slice(*bounds) for bounds in self._block.bounds)]

    def compute(self, x: Tensor, **weights: Any) -> Tensor:
        """Partial output of this rank, by torch's autograd."""
        weight, bias = weights["weight"], weights.get("bias")
        if self._empty:
            return recomputed_by_all(tied(weight.new_zeros(self._shape), (x, weight, bias)))
        return self.convolve_block(x, self.block(weight), bias)

    def convolve_block(self, x: Tensor, block: Tensor, bias: Tensor | None) -> Tensor:
        """Partial output of a rank whose part is not empty, from its block of the weight."""
        raise NotImplementedError

    def in_runs(self, x: Tensor, block: Tensor, bias: Tensor | None) -> Tensor:
        """Convolve each run of whole groups, or part of a group; outputs side by side in channels."""
        if len(self._runs) == 1:
            return convolution(x, block, bias, self._runs[0][-1])
        found = [
            convolution(x[:, channels], block[rows], None if bias is None else bias[rows], steps)
            for channels, rows, steps in self._runs
        ]
        return torch.cat(found, 1)


class Convolution(GridConvolution):
    """Convolution by a grid of ranks: input in any decomposition, output in balanced blocks on ``target``.

    Made once for inputs of one decomposition and type, and called many times: all boxes, slices and patches
    are found here, so that a call only cuts, copies and convolves. With ``overlaps`` every rank takes part in
    every call, also one that computes nothing: others read its data.

    With ``on_workers`` the target is the worker grid, and the batch keeps the input's cut. With ``overlaps``
    a rank convolves its own data while the halo travels, or, with ``joins``, copies them next to the place of
    the halo. Otherwise it first gathers all inputs that it reads. ``ShapeError`` also if the input is too
    small for a window or for the padding.
    """

    def __init__(
        self,
        site: CallSite,
        options: ConvolutionOptions,
        source: Decomposition,
        target: Partition,
        dtype: torch.dtype,
    ) -> None:
        stencil, workers, machine, batch = options.stencil, options.workers, site.machine, source.splits[0]
        channels = channels_out(workers, source)
        rank, extents = machine.rank, stencil.outputs(source.shape[LEADING:])
        space: Sequence[Split] = [
            Balanced(n, p) for n, p in zip(extents, workers.grid.shape[LEADING + 1 :], strict=True)
        ]
        output = Decomposition.balanced(target, (source.shape[0], channels, *extents))
        if options.on_workers:
            reads_of = [window.reads for window in stencil.windows]
            output = outputs_of(machine, source, output, lambda: reads_of).with_splits({0: batch})
            space = output.splits[LEADING:]
        else:
            batch = Balanced(source.shape[0], workers.grid.shape[0])
        computed, reads = workers.by_rows(batch, space), workers.by_columns(batch, space)
        super().__init__(site, options, source, dtype, (computed, output))
        self.dtype, self.overlaps = dtype, options.overlaps
        if not self.overlaps:
            self._window = WindowGather(site, stencil, source, reads, dtype, options.padding_mode)
            self.gather = self._window.movement
            return
        # A rank that owns data sends it, even if it computes nothing.
        self.works, self._sum_dtype, own = True, sum_dtype(dtype), source.box(rank)
        self.sums_exactly = self._sum_dtype == dtype
        self._large = own.volume * dtype.itemsize >= LARGE_NBYTES
        widened = dict(enumerate(stencil.with_halo(space, source.shape[LEADING:]), LEADING))
        self.halo = Movement(machine, Exchange(rank, source, reads.with_splits(widened)), dtype, site.name)
        (first, last), (batches, _, *outputs) = reads.box(rank).bounds[1], computed.box(rank).bounds
        # Each rank may choose whether it joins: the halo is the same. In 16 bits oneDNN takes up to five
        # times as long for a weight's gradient if only some dimensions are padded. A prediction has none, and
        # is not rounded once more for each part of a sum.
        self.parts = parts = OwnAndHalo(
            with_channels(stencil, first, last - first),
            Box.of_shape(source.shape),
            own,
            Box((batches, (0, int(not self._empty)), *outputs)),
            workers.groups,
            options.joins if self.sums_exactly else in_order(machine),
        )
        # What convolves own data: the patch, or a large one in pieces.
        core = None if parts.core is None else in_pieces(parts.core, self._shape[1], dtype)
        self.core: Patch | InPieces | None = core
        # Places of own data and of received pieces in the rim's tensors.
        self.own = parts.landing(own)
        self.landings = [parts.landing(piece.box) for piece in self.halo.forward.receives]
        # Where the rim's tensors have own data and are large, only the halo is saved for the backward.
        nbytes = sum(patch.held.volume for patch in parts.rim) * dtype.itemsize
        self.remakes = bool(self.own) and nbytes >= SMALLEST_NBYTES

    def movements(self) -> tuple[Moves | None, ...]:
        """Movement of the halo, or of all inputs that are read; and of the output."""
        return self.halo if self.overlaps else self.gather, self.scatter

    def void(self) -> None:
        """Give up a halo that some ranks may have sent; blocking."""
        if self.overlaps:
            self.halo.void()

    def carry_out(self, needs: GradientNeeds, x: Tensor, weights: Mapping[str, Any]) -> Tensor:
        """Partial output of this rank; blocking with ``overlaps``."""
        if not self.overlaps:
            return super().carry_out(needs, x, weights)
        weight, bias = weights["weight"], weights.get("bias")
        root = None if weight.requires_grad else anchor(True)
        return _HaloSchedule.apply(x, weight, bias, root, None, None, [self, needs])

    def convolve_block(self, x: Tensor, block: Tensor, bias: Tensor | None) -> Tensor:
        """Partial output from the gathered input."""
        (_, width, *_), (low, high) = self._workers.weight, self._block.bounds[1]
        if not self._window.complete:
            x = self._window.add_padding(x)
        if self._workers.groups > 1 and high - low < width:
            x = x.unflatten(1, (-1, width))[:, :, low:high].flatten(1, 2)
        return self.in_runs(x, block, self._rows(bias))

    def begin(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> _Started:
        """Start the halo; convolve own data, or copy them next to the place of the halo.

        The outputs are those of the first patch that gives all of them, or zeros with the bias, to which all
        patches add. They are None if that patch has to wait for the halo, as the joined one does.
        """
        machine, name = self.site
        mark, channel, parts = machine.trace.marks(name), self.halo.forward, self.parts
        mark("start")
        own = as_words(x) if x.is_cpu else x
        # A rank that owns nothing may pass a tensor of any shape without elements.
        edges = channel.cut(own) if channel.sends else ()
        # On a device the edges come down while the core's kernels run.
        leaving = to_host(edges) if edges and not x.is_cpu else None
        epoch = channel.start(edges) if leaving is None else 0
        mark("local")
        block = weight if weight.shape == self._block.shape else self.block(weight)
        bias, core, y = self._rows(bias), self.core, None
        if parts.base is None:
            y = x.new_zeros(self._shape, dtype=self.dtype)
            if parts.core is not None:
                y[parts.core.place] = parts.core.convolve(x, block)
            if bias is not None:
                y.add_(bias.view(-1, *(1,) * (y.dim() - LEADING)))
        elif core is not None and parts.base is parts.core:
            y = core.convolve(x, block, bias)
        if leaving is not None:
            epoch = channel.start(leaving.wait())
        return epoch, y, *self.held(x, own), block, bias, mark

    def held(self, x: Tensor, own: Any, halo: Sequence[Tensor] = ()) -> tuple[list[Tensor], list[Any]]:
        """Tensors of the rim's patches, with the own data that they read; the halo is uninitialised if ().

        The forward gets the memory from here and receives the halo into it. A backward that saved only the
        received pieces (``remakes``) passes them as ``halo``, and gets equal tensors again. ``own`` are the
        words of ``x``, and the second list has those of the tensors; on a device, the tensors themselves.
        """
        tensors: list[Tensor] = []
        found: list[Any] = []
        large = self._large and x.is_cpu
        for patch in self.parts.rim:
            block, elements = patch.hold(self.dtype, x)
            tensors += (block,)
            found += (elements,)
        for number, there, here in self.own:
            if large:
                copy(found[number][there], own[here])
            else:
                found[number][there] = own[here]
        if halo:
            for (number, there, _), part in zip(chain(*self.landings), halo, strict=True):
                found[number][there] = as_words(part) if x.is_cpu else part
        return tensors, found

    def send_back(self, found: Sequence[Found], x: Tensor) -> int:
        """Start to send the gradients of the rim's tensors to the owners of the data; return the epoch.

        A piece may lie in several patches, as where blocks of neighbours are longer than this one: each patch
        has the gradient of its part of the piece. Elements in no patch, as between strides, have none.
        """
        arrays: Any
        blank: Any
        channel, arrays, pieces = self.halo.adjoint, [], []
        blank, kind = (np.zeros, channel.dtype) if x.is_cpu else (x.new_zeros, self.dtype)
        for _, edge, *_ in found:
            arrays += (as_words(edge) if x.is_cpu else edge,)
        for piece, landing in zip(channel.sends, self.landings, strict=True):
            whole: Any = None
            for number, there, here in landing:
                part = arrays[number][there]
                if part.shape != piece.box.shape:
                    whole = blank(piece.box.shape, dtype=kind) if whole is None else whole
                    whole[here] = part
                else:
                    whole = part
            # No output reads data between the windows.
            pieces += [blank(piece.box.shape, dtype=kind) if whole is None else whole]
        return channel.start(pieces if x.is_cpu or not pieces else to_host(pieces).wait())

    def of_data(self, x: Tensor, found: Sequence[Found], epoch: int, mark: Mark) -> Tensor:
        """Gradient of own data: from this rank's patches, and from other readers. Blocking.

        In 16 bits the sum is in float32, rounded once at the end. The received gradients are added where they
        lie in the segment.
        """
        total = found[0][1] if found and found[0][0] is self.parts.core else None
        for number, there, here in self.own:
            part = total = found[number][1][there]
            if part.shape != x.shape:
                total = torch.zeros_like(x)
                total[here] = part
        total = torch.zeros_like(x) if total is None else total
        total = total if self.sums_exactly else total.to(self._sum_dtype)
        self.halo.backwards.add_to(total, epoch, mark)
        # An input without elements may have any type.
        return total if self.sums_exactly else total.to(x.dtype)

    def of_weight(self, shape: torch.Size, block: Tensor, found: Sequence[Found]) -> Tensor:
        """Gradient of the weight in its shape: the sum of the patches'.

        Each patch has that of the taps through which its outputs read its data: a strip of the halo is often
        read through the outermost taps only. The first one becomes the sum if it has all taps.
        """
        (_, _, total, _), *others = found or ((None,) * 4,)
        if total is None or total.shape != shape:
            total, others = block.new_zeros(shape), [*found]
        for patch, _, taps, _ in others:
            self.block(total)[patch.weight].add_(taps)
        return total

    def of_bias(self, shape: torch.Size, rows: Tensor | None, gradient: Tensor) -> Tensor:
        """Gradient of the bias in its shape; ``rows`` if it was computed together with that of the weight."""
        rows = gradient.sum((0, *range(LEADING, gradient.dim()))) if rows is None else rows
        if rows.shape == shape:
            return rows
        total = rows.new_zeros(shape)
        if len(total):
            total[slice(*self._block.bounds[0])] = rows
        return total

    def _rows(self, bias: Tensor | None) -> Tensor | None:
        # Part of the bias that this rank adds; None if another rank with the same outputs adds it.
        start, stop = self._block.bounds[0]
        if bias is None or bias.shape[0] == stop - start:
            return bias
        return bias[start:stop] if bias.shape[0] else None


def convolve(
    agreement: Agreement[Convolution],
    overlaps: bool,
    x: Tensor,
    weights: Mapping[str, Tensor],
    fill: Fill | None = None,
) -> tuple[Tensor, GradientNeeds]:
    """Agree on a convolution and carry it out: local output, and the needs of any rank. Blocking.

    With ``overlaps``, the operation that this rank expects starts before the ranks agree, and ``fill``
    gives the places of the weights' gradients.
    """
    # All ranks refuse a value that is no tensor when they agree.
    if not (overlaps and isinstance(x, Tensor)):
        operation, needs = agreement.settle()
        return operation(needs, x, **weights), needs
    if AUTOCASTS():
        with no_autocast():
            return convolve(agreement, overlaps, x, weights, fill)
    weight, agreed = weights["weight"], list[Any]()
    root = None if weight.requires_grad else anchor(True)
    y: Tensor = _HaloSchedule.apply(x, weight, weights.get("bias"), root, fill, agreement, agreed)
    operation, needs = agreed
    return y if operation.scatter is None else operation.scatter(y, needs.any), needs


# Epoch of a halo under way; outputs, or None before the halo is there; the rim's tensors, and their elements;
# this rank's blocks of weight and bias; and the function that records the trace.
_Started = tuple[int, Any, list[Tensor], list[Any], Tensor, Tensor | None, Mark]


class _HaloSchedule(OperatorFunction):
    """The schedule: the halo travels while own data are convolved, or copied next to its place."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        _anchor: Any,
        fill: Fill | None,
        agreement: Agreement[Convolution] | None,
        agreed: list[Any],
    ) -> Tensor:
        """Start the halo, own data, wait; then convolve the rim and add the outputs.

        ``agreed`` has the operation and the needs of any rank; with an ``agreement`` it gets them.
        """
        guess = agreed[0] if agreement is None else agreement.guess
        started: Any = None if guess is None else guess.begin(x, weight, bias)
        if agreement is not None:
            if started is not None:
                started[-1]("")
            agreed += agreement.settle()
            if agreed[0] is not guess:
                # The ranks have agreed on another operation than this rank expected.
                started = agreed[0].begin(x, weight, bias)
        received: Any
        (epoch, y, held, elements, block, rows, mark), (operation, needs) = started, agreed
        parts, landings, kept = operation.parts, operation.landings, held
        mark("wait")
        channel = operation.halo.forward
        received = channel.receive(epoch) if x.is_cpu else uploaded(channel, epoch, operation.dtype, x.device)
        for (_, view), landing in zip(received, landings, strict=True):
            for number, there, here in landing:
                elements[number][there] = view[here]
        if operation.remakes:
            kept = [held[number][there].clone() for number, there, _ in chain(*landings)]
        for patch, data in zip(parts.rim, held, strict=True):
            mark("remote")
            if patch is parts.base:
                y = patch.convolve(data, block, rows)
                continue
            part = patch.convolve(data, block)
            mark("fuse")
            rim = y[patch.place]
            rim += part
        mark("")
        if not any(ctx.needs_input_grad[:3]) and not needs.any:
            ctx.mark_non_differentiable(y)
        else:
            ctx.save_for_backward(x, block, *kept)
        ctx.shapes, ctx.fill = (weight.shape, None if bias is None else bias.shape), fill
        ctx.operation, ctx.machine, ctx.needs_halo = operation, operation.site.machine, needs.input
        return y

    @staticmethod
    @first_derivative
    def backward(ctx: Any, gradient: Tensor) -> tuple[Any, ...]:
        """The rim, start to send its gradients, own data; then the parameters, wait, and add what comes."""
        operation, parts, needs_halo = ctx.operation, ctx.operation.parts, ctx.needs_halo
        (x, block, *held), (of_weight, of_bias) = ctx.saved_tensors, ctx.shapes
        needs_x, needs_weight, needs_bias, *_ = ctx.needs_input_grad
        # Together with the weight's gradient, the bias needs no further pass over the output's gradient.
        needs = needs_weight, needs_weight and needs_bias and operation.sums_exactly
        mark = ctx.machine.trace.marks(operation.site.name, backward=True)
        mark("remote")
        found, core = list[Found](), operation.core
        if operation.remakes:
            held, _ = operation.held(x, as_words(x) if x.is_cpu else x, held)
        # A single patch of all data sends its gradients before it computes that of the weight.
        late = needs_halo and needs_weight and core is None and len(held) == 1
        first = (False, False) if late else needs
        for patch, data in zip(parts.rim, held, strict=True):
            found += [(patch, *patch.convolve_adjoint(gradient, data, block, (needs_halo, *first)))]
        epoch, d_x, d_weight, d_bias = 0, None, None, None
        if needs_halo:
            mark("start")
            epoch = operation.send_back(found, x)
        if late:
            mark("local")
            ((patch, edge, *_),) = found
            found = [(patch, edge, *patch.convolve_adjoint(gradient, held[0], block, (False, *needs))[1:])]
        if core is not None and (needs_x or needs_weight):
            mark("local")
            found = [(parts.core, *core.convolve_adjoint(gradient, x, block, (needs_x, *needs))), *found]
            mark("fuse")
        if needs_bias:
            d_bias = operation.of_bias(of_bias, found[0][3] if found else None, gradient)
        if needs_weight:
            d_weight = operation.of_weight(of_weight, block, found)
        if ctx.fill is not None:
            d_bias, d_weight = (
                None if d is None else ctx.fill(key, d) for key, d in (("bias", d_bias), ("weight", d_weight))
            )
        if needs_halo:
            d_x = operation.of_data(x, found, epoch, mark)
        mark("")
        return d_x if needs_x else None, d_weight, d_bias, None, None, None, None
