"""Collectives as torch calls them: arguments are checked, operations begun."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from itertools import chain
from typing import Any

import numpy as np
import torch
from torch.distributed import AllreduceOptions, ReduceOp, Work

from distdl_rma.errors import ShapeError
from distdl_rma.segments.collectives.between_nodes import Script
from distdl_rma.segments.collectives.reduction import Array
from distdl_rma.torch_backend.core import GroupCore, Tensor, of_all, op_of, root_of
from distdl_rma.torch_backend.tensors import OPERATIONS, Flat, check, check_alike, parts_of, rows_of, single
from distdl_rma.torch_backend.work import GroupWork, done

_Work: Any = Work


class GroupCollectives(GroupCore):
    """Collectives of tensors; see :class:`RmaProcessGroup`."""

    @of_all
    def broadcast(self, tensors: Any, opts: Any = None, *_: Any) -> Work:
        """Copy the root's tensor to all ranks."""
        tensors = [tensors] if isinstance(tensors, Tensor) else tensors
        who = self._who("broadcast")
        tensor, root = single(tensors, who), root_of(opts, self._ranks, who)
        check([tensor], who)
        flat = Flat(tensor)

        def script() -> Script:
            data = flat.bytes
            sizes = [data.size if at == root else 0 for at in range(self._ranks)]
            outs = [data if at == root else None for at in range(self._ranks)]
            return self._collectives.spread(sizes, data if self._me == root else data[:0], outs)

        return self._begin(f"broadcast from rank {root}", [tensor], script, [tensor], [flat])

    @of_all
    def allgather(
        self, outputs: Sequence[Sequence[Tensor]], inputs: Sequence[Tensor], opts: Any = None
    ) -> Work:
        """Copy the tensors of all ranks to all ranks; sizes may differ."""
        who = self._who("all_gather")
        targets = list(single(outputs, who))
        return self._all_gather("all_gather", [(single(inputs, who), targets)], [targets])

    @of_all
    def allgather_coalesced(
        self, outputs: Sequence[Sequence[Tensor]], inputs: Sequence[Tensor], opts: Any = None
    ) -> Work:
        """Copy several tensors of all ranks to all ranks; ``outputs`` has a list of them for every rank."""
        pairs = [(mine, [row[k] for row in outputs]) for k, mine in enumerate(inputs)]
        return self._all_gather("all_gather_coalesced", pairs, outputs)

    @of_all
    def all_gather_single(self, output: Tensor, input: Tensor, opts: Any = None) -> Work:
        """Copy the equally large tensors of all ranks into one tensor; the input may be a part of it."""
        return self._gather_singles("all_gather_single", [output], [input])

    @of_all
    def all_gather_single_coalesced(
        self, outputs: Sequence[Tensor], inputs: Sequence[Tensor], opts: Any = None
    ) -> Work:
        """Copy several tensors of all ranks to all ranks, each into one tensor."""
        return self._gather_singles("all_gather_single_coalesced", outputs, inputs)

    _allgather_base = all_gather_single
    allgather_into_tensor_coalesced = all_gather_single_coalesced

    def _gather_singles(self, what: str, outputs: Sequence[Tensor], inputs: Sequence[Tensor]) -> Work:
        who = self._who(what)
        pairs = [
            (mine, parts_of(whole, mine, self._ranks, who))
            for mine, whole in zip(inputs, outputs, strict=True)
        ]
        return self._all_gather(what, pairs, list(outputs))

    def _all_gather(self, what: str, pairs: Sequence[tuple[Tensor, list[Tensor]]], result: Any) -> Work:
        who, me = self._who(what), self._me
        for mine, targets in pairs:
            check_alike([mine, *targets], who)
            if len(targets) != self._ranks:
                raise ShapeError(f"{who}: a tensor for each of {self._ranks} ranks, got {len(targets)}")
            if targets[me].numel() != mine.numel():
                expected = f"{targets[me].numel()} are expected of it"
                raise ShapeError(f"{who}: this rank has {mine.numel()} elements, {expected}")
        sources = [Flat(mine) for mine, _ in pairs]
        outs = [[Flat(target) for target in targets] for _, targets in pairs]

        def script() -> Script:
            for source, several in zip(sources, outs, strict=True):
                arrays = [out.bytes for out in several]
                data = _apart(source.bytes, [*arrays[:me], *arrays[me + 1 :]])
                yield from self._collectives.spread([array.size for array in arrays], data, arrays)

        every = [target for _, targets in pairs for target in targets]
        return self._begin(what, every, script, result, list(chain.from_iterable(outs)))

    @of_all
    def gather(self, outputs: Sequence[Sequence[Tensor]], inputs: Sequence[Tensor], opts: Any = None) -> Work:
        """Copy the tensors of all ranks to the root."""
        tensor, root, targets = self._at_root("gather", inputs, outputs, opts)
        source, flats = Flat(tensor), [Flat(target) for target in targets]

        def script() -> Script:
            outs = [flat.bytes for flat in flats]
            data = _apart(source.bytes, [*outs[:root], *outs[root + 1 :]])
            return self._collectives.spread(
                [data.size] * self._ranks, data, outs or [None] * self._ranks, root
            )

        return self._begin(f"gather to rank {root}", [tensor], script, [targets], flats)

    @of_all
    def scatter(
        self, outputs: Sequence[Tensor], inputs: Sequence[Sequence[Tensor]], opts: Any = None
    ) -> Work:
        """Copy one of the root's tensors to each rank."""
        tensor, root, sources = self._at_root("scatter", outputs, inputs, opts)
        flat, parts = Flat(tensor), [Flat(part) for part in sources]

        def script() -> Script:
            out = flat.bytes
            sends = [part.bytes for part in parts] or [out[:0]] * self._ranks
            outs = [out if at == root else out[:0] for at in range(self._ranks)]
            return self._collectives.deal(sends, outs)

        return self._begin(f"scatter from rank {root}", [tensor], script, [tensor], [flat])

    def _at_root(
        self, what: str, ones: Sequence[Tensor], lists: Sequence[Sequence[Tensor]], opts: Any
    ) -> tuple[Tensor, int, list[Tensor]]:
        # Checked: this rank's tensor, the root, and there a tensor for each rank, none elsewhere.
        who = self._who(what)
        mine, root = single(ones, who), root_of(opts, self._ranks, who)
        parts = list(lists[0]) if lists and self._me == root else []
        check_alike([mine, *parts], who)
        if self._me == root and len(parts) != self._ranks:
            raise ShapeError(f"{who}: a tensor for each of {self._ranks} ranks at the root, got {len(parts)}")
        for part in parts:
            if part.numel() != mine.numel():
                raise ShapeError(f"{who}: tensors have {mine.numel()} elements, got one of {part.numel()}")
        return mine, root, parts

    @of_all
    def alltoall(self, outputs: Sequence[Tensor], inputs: Sequence[Tensor], opts: Any = None) -> Work:
        """Send one tensor from every rank to every rank; sizes may differ."""
        return self._all_to_all("all_to_all", list(outputs), list(inputs), list(outputs))

    @of_all
    def all_to_all_single(
        self,
        output: Tensor,
        input: Tensor,
        output_splits: Any = None,
        input_splits: Any = None,
        opts: Any = None,
    ) -> Work:
        """Send some rows of a tensor to every rank; equal parts if no numbers of rows are given."""
        who = self._who("all_to_all_single")
        outs = rows_of(output, output_splits, self._ranks, who)
        ins = rows_of(input, input_splits, self._ranks, who)
        return self._all_to_all("all_to_all_single", outs, ins, [output])

    alltoall_base = all_to_all_single

    def _all_to_all(self, what: str, outputs: list[Tensor], inputs: list[Tensor], result: Any) -> Work:
        who, ranks = self._who(what), self._ranks
        check_alike([*outputs, *inputs], who)
        if len(outputs) != ranks or len(inputs) != ranks:
            got = f"{len(inputs)} and {len(outputs)}"
            raise ShapeError(f"{who}: an input and an output for each of {ranks} ranks, got {got}")
        flats, parts = [Flat(out) for out in outputs], [Flat(part) for part in inputs]

        def script() -> Script:
            sends, outs = [part.bytes for part in parts], [flat.bytes for flat in flats]
            sends = [_apart(send, outs) for send in sends]
            return self._collectives.deal(sends, outs)

        kind = str(outputs[0].dtype).removeprefix("torch.")
        return self._begin(f"{what} of {kind}", [], script, result, flats)

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
                op = op_of(opts)
                work = self._all_reduce("all_reduce", [tensor], op)
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
        who = self._who("reduce")
        tensor, root = single(tensors, who), root_of(opts, self._ranks, who)
        check([tensor], who)
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
                out = flat.elements
                arrays = [part.elements for part in several]
                arrays = [array if at == me else _apart(array, [out]) for at, array in enumerate(arrays)]
                yield from self._collectives.reduce_scatter(arrays, out, reducer)

        named = f"{what}({OPERATIONS[op][0]})" if reducers else what
        every = [part for _, parts in pairs for part in parts]
        return self._begin(named, every, script, outs, flats)


def _apart(data: Array, targets: Sequence[Array]) -> Array:
    """Data as they are, or a copy if one of the targets may share their memory."""
    return data.copy() if any(np.may_share_memory(data, target) for target in targets) else data


class _Over(_Work):  # type: ignore[misc]
    """A work that is over; only the call that has waited for it sees it."""

    def wait(self, *_: Any) -> bool:
        return True

    def is_completed(self) -> bool:
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
