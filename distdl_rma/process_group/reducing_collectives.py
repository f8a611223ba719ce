"""Collectives of torch that reduce: arguments are checked, operations begun."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Any

import numpy as np
import torch
from torch.distributed import AllreduceOptions, ReduceOp, Work

from distdl_rma.errors import ShapeError
from distdl_rma.process_group.core import GroupCore, Tensor, of_all, op_of, root_of
from distdl_rma.process_group.reducers import OPERATIONS
from distdl_rma.process_group.tensors import Flat, check, check_alike, parts_of, single
from distdl_rma.process_group.work import GroupWork, done
from distdl_rma.segments.collectives.between_nodes import Script

_Work: Any = Work


class ReducingCollectives(GroupCore):
    """Collectives that reduce tensors; see :class:`RmaProcessGroup`."""

    def allreduce(self, tensors: Any, opts: Any = None, timeout: Any = None) -> Work:
        """Reduce a tensor in place on all ranks."""
        tensors = [tensors] if isinstance(tensors, Tensor) else tensors
        tensor = tensors[0] if len(tensors) == 1 else single(tensors, "all_reduce")
        quick = self._quick
        if quick is not None and self._coalescing is None and _is_plain(tensor):
            number = _number_of(opts)
            # torch needs no work for a call that is not asynchronous.
            hurry = not getattr(opts, "asyncOp", True)
            begun = quick.run(tensor, number, hurry)
            if begun is True and hurry:
                return _OVER
            if begun is None:
                # Raises for invalid arguments, with the same words as for tensors that are not plain.
                work = self._all_reduce("all_reduce", [tensor], op_of(opts))
                op = op_of(opts)
                call = self._call(f"all_reduce({OPERATIONS[op][0]})", [tensor])
                quick.learn(tensor, number, call, self._reducer(op, tensor.dtype))
                return self._held(work, tensor)
            if begun is not False:
                operation = done() if begun is True else begun
                return self._held(GroupWork(self._queue, operation, tensors, self._timeout), tensor)
        return self._held(self._all_reduce("all_reduce", [tensor], op_of(opts)), tensor)

    def _held(self, work: Work, tensor: Tensor) -> Work:
        # DDP passes the work that counts the joined ranks to C++. There it would wait for ever once Python
        # holds no reference to it.
        if tensor.numel() == 1:
            self._counts.append(work)
        return work

    def allreduce_coalesced(self, tensors: Sequence[Tensor], opts: Any = None) -> Work:
        """Reduce several tensors in place on all ranks."""
        return self._all_reduce("all_reduce_coalesced", list(tensors), op_of(opts))

    @of_all
    def _all_reduce(self, what: str, tensors: list[Tensor], op: Any) -> Work:
        check(tensors, self._who(what))
        reducers = [self._reducer(op, tensor.dtype) for tensor in tensors]
        flats = [Flat(tensor) for tensor in tensors]

        def script() -> Script:
            for flat, reducer in zip(flats, reducers, strict=True):
                yield from self._collectives.reduce(flat.elements, reducer, None)

        named = f"{what}({OPERATIONS[op][0]})" if reducers else what
        return self._begin(named, tensors, script, tensors, flats)

    @of_all
    def reduce(self, tensors: Any, opts: Any = None, *_: Any) -> Work:
        """Reduce a tensor in place on the root."""
        tensor, root = single(tensors, self._who("reduce")), root_of(opts)
        check([tensor], self._who("reduce"))
        op, flat = op_of(opts), Flat(tensor)
        reducer = self._reducer(op, tensor.dtype)
        return self._begin(
            f"reduce({OPERATIONS[op][0]}) to rank {root}",
            [tensor],
            lambda: self._collectives.reduce(flat.elements, reducer, root),
            [tensor],
            [flat],
        )

    @of_all
    def reduce_scatter(
        self, outputs: Sequence[Tensor], inputs: Sequence[Sequence[Tensor]], opts: Any = None
    ) -> Work:
        """Reduce one tensor for each rank; sizes may differ."""
        who = self._who("reduce_scatter")
        pair = single(outputs, who), list(single(inputs, who))
        return self._reduce_scatter("reduce_scatter", [pair], op_of(opts))

    @of_all
    def reduce_scatter_single(self, output: Tensor, input: Tensor, opts: Any = None) -> Work:
        """Reduce a tensor; every rank gets an equal part of it."""
        return self._reduce_singles("reduce_scatter_single", [output], [input], opts)

    @of_all
    def reduce_scatter_single_coalesced(
        self, outputs: Sequence[Tensor], inputs: Sequence[Tensor], opts: Any = None
    ) -> Work:
        """Reduce several tensors; every rank gets an equal part of each."""
        return self._reduce_singles("reduce_scatter_single_coalesced", outputs, inputs, opts)

    _reduce_scatter_base = reduce_scatter_single
    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced

    def _reduce_singles(
        self, what: str, outputs: Sequence[Tensor], inputs: Sequence[Tensor], opts: Any
    ) -> Work:
        who = self._who(what)
        pairs = [
            (out, parts_of(whole, out, self._ranks, who)) for out, whole in zip(outputs, inputs, strict=True)
        ]
        return self._reduce_scatter(what, pairs, op_of(opts))

    def _reduce_scatter(self, what: str, pairs: Sequence[tuple[Tensor, list[Tensor]]], op: Any) -> Work:
        who, me, outs = self._who(what), self._me, [out for out, _ in pairs]
        for out, parts in pairs:
            check_alike([out, *parts], who)
            if len(parts) != self._ranks:
                raise ShapeError(f"{who}: a tensor for each of {self._ranks} ranks, got {len(parts)}")
            if parts[me].numel() != out.numel():
                mine = f"this rank's part has {parts[me].numel()} elements"
                raise ShapeError(f"{who}: {mine}, its output {out.numel()}")
        flats = [Flat(out) for out in outs]
        inputs = [[Flat(part) for part in parts] for _, parts in pairs]
        reducers = [self._reducer(op, out.dtype) for out in outs]

        def script() -> Script:
            for flat, several, reducer in zip(flats, inputs, reducers, strict=True):
                arrays, out = [part.elements for part in several], flat.elements
                if any(np.may_share_memory(out, a) for at, a in enumerate(arrays) if at != me):
                    arrays = [array.copy() for array in arrays]
                yield from self._collectives.reduce_scatter(arrays, out, reducer)

        named = f"{what}({OPERATIONS[op][0]})" if reducers else what
        every = [part for _, parts in pairs for part in parts]
        return self._begin(named, every, script, outs, flats)


class _Over(_Work):  # type: ignore[misc]
    """A work that is over; only the call that has waited for it sees it."""

    def wait(self, *_: Any) -> bool:
        """Return at once."""
        return True

    def is_completed(self) -> bool:
        """Return True."""
        return True


_OVER = _Over()
_PLAIN, _STRIDED = (Tensor, torch.nn.Parameter), torch.strided


def _is_plain(tensor: Tensor) -> bool:
    # Its elements are contiguous in memory. Subclasses may keep their elements elsewhere. The quick way does
    # not handle complex tensors with a pending conjugation.
    strided = type(tensor) in _PLAIN and tensor.layout is _STRIDED and tensor.is_cpu
    return strided and tensor.is_contiguous() and not tensor.is_neg()


# Whether the hash is the number of the operation: it is read faster than the operation.
_HASHED = [hash(ReduceOp(op)) for op in OPERATIONS] == [op.value for op in OPERATIONS]


def _number_of(opts: Any) -> Hashable:
    """Key of the reduction of some options."""
    if _HASHED and type(opts) is AllreduceOptions:
        return hash(opts.reduceOp)
    op: Hashable = op_of(opts)
    return op
