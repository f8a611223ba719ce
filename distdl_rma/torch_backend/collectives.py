"""Collectives of torch as data: which bytes a call moves, and by which of five ways.

torch has some twenty names for collectives, and a group moves data in five ways only, those of
:class:`~distdl_rma.torch_backend.on_node.NodeCollectives` on one node and of
:class:`~distdl_rma.torch_backend.inter_node.InterNodeCollectives` on several::

    call of torch               way              who has bytes    who gets some
    broadcast                   spread           the root         all
    all_gather                  spread           all              all
    gather                      spread           all              the root, the only reader
    scatter                     deal             the root         each rank its own
    all_to_all                  deal             all              each rank its own
    all_reduce                  reduce           all              all
    reduce                      reduce           all              the root
    reduce_scatter              reduce_scatter   all              each rank its own
    barrier                     barrier

A function of this file has the name and the arguments of torch's method. It checks the arguments, without
communication, and returns what :class:`~distdl_rma.torch_backend.group.RmaProcessGroup` needs to begin the
call: see ``Prepared``. So every refusal comes before any data move, and one place announces all of them.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Sequence
from functools import partial
from itertools import chain
from typing import Any

import numpy as np
import torch
from torch.distributed import ReduceOp

from distdl_rma.errors import ArgumentError, ShapeError
from distdl_rma.segments.collectives.between_nodes import Script
from distdl_rma.segments.collectives.reduction import Array, Reduction
from distdl_rma.torch_backend.calls import Call
from distdl_rma.torch_backend.inter_node import InterNodeCollectives
from distdl_rma.torch_backend.on_node import Cuts, NodeCollectives
from distdl_rma.torch_backend.tensors import (
    OPERATIONS,
    Flat,
    array_at,
    check,
    check_alike,
    facts,
    parts_of,
    reducer_of,
    rows_of,
    single,
)

Tensor = torch.Tensor
# Tensors of one rank; lists that have a tensor for each rank, or in coalesced calls the other way round.
Tensors = Sequence[Tensor]
Lists = Sequence[Tensors]
# A tensor of this rank, and the list of all ranks that belongs to it.
Pairs = Sequence[tuple[Tensor, list[Tensor]]]
Ways = NodeCollectives | InterNodeCollectives

# A call that can begin: its kind; a maker of the script that moves the data; the tensors that the work
# returns; and those among the flat arrays that the script fills, which are copied back to their tensors after
# it. A plain tuple: a named one would take another call of Python.
Prepared = tuple[Call, Callable[[], Script], Any, Sequence[Flat]]
# What is kept for calls that come again, at most.
_KEPT = 1024
_PLAIN = Tensor, torch.nn.Parameter


class Member:
    """This rank as a member of its group: what a collective asks the group for, without torch's class."""

    def __init__(self, me: int, size: int, name: str, ways: Ways) -> None:
        self.me, self.size, self.ways = me, size, ways
        # For messages: the call, then which group.
        self.where = f"in group {name!r}"
        # A reduction keeps memory for sums, so calls of one kind share it: only one of them runs at a time.
        self._reducers: dict[Hashable, Reduction] = {}
        self._calls: dict[Hashable, Call] = {}
        # All-reduces that have been cut, see ``allreduce``.
        self.cuts: dict[Hashable, tuple[Call, Cuts]] = {}

    def call(self, what: str, tensors: Tensors) -> Call:
        """Kind of a call, whose text is completed by tensors with the same sizes and types on all ranks."""
        key = (what, *[(tensor.dtype, tensor.numel()) for tensor in tensors])
        call = self._calls.get(key)
        if call is None:
            if len(self._calls) >= _KEPT:
                self._calls.clear()
            text = f"{what} of {facts(tensors)}" if tensors else what
            call = self._calls[key] = Call(text, key)
        return call

    def reducer(self, op: Any, dtype: torch.dtype) -> Reduction:
        """Reduction by an operation of torch; kept."""
        key = hash(op), dtype
        reducer = self._reducers.get(key)
        if reducer is None:
            reducer = reducer_of(op, dtype, self.size, self.where.removeprefix("in "))
            self._reducers[key] = reducer
        return reducer

    def check_list(self, one: Tensor, several: Tensors, who: str, alike: Iterable[int]) -> None:
        """Raise ``ShapeError`` unless a list has a tensor for each rank, some of them as long as this one."""
        check_alike([one, *several], who)
        if len(several) != self.size:
            raise ShapeError(f"{who}: a tensor for each of {self.size} ranks, got {len(several)}")
        for rank in alike:
            if several[rank].numel() != one.numel():
                ours, theirs = one.numel(), several[rank].numel()
                raise ShapeError(
                    f"{who}: this rank's tensor has {ours} elements, entry {rank} of its list {theirs}"
                )


def broadcast(at: Member, tensors: Any, opts: Any = None, *_: Any) -> Prepared:
    """Copy the root's tensor to all ranks."""
    who = f"broadcast {at.where}"
    tensor, root = single(tensors, who), root_of(opts, at.size, who)
    check([tensor], who)
    flat = Flat(tensor)

    def script() -> Script:
        data = flat.bytes
        sizes = [data.size if rank == root else 0 for rank in range(at.size)]
        outs = [data if rank == root else None for rank in range(at.size)]
        return at.ways.spread(sizes, data if at.me == root else data[:0], outs)

    return at.call(f"broadcast from rank {root}", [tensor]), script, [tensor], [flat]


def allgather(at: Member, outputs: Lists, inputs: Tensors, opts: Any = None) -> Prepared:
    """Copy the tensors of all ranks to all ranks; sizes may differ."""
    who = f"all_gather {at.where}"
    targets = list(single(outputs, who))
    return _all_gather(at, "all_gather", [(single(inputs, who), targets)], [targets])


def allgather_coalesced(at: Member, outputs: Lists, inputs: Tensors, opts: Any = None) -> Prepared:
    """Copy several tensors of all ranks to all ranks; ``outputs`` has a list of them for every rank."""
    pairs = [(mine, [row[k] for row in outputs]) for k, mine in enumerate(inputs)]
    return _all_gather(at, "all_gather_coalesced", pairs, outputs)


def all_gather_single(at: Member, output: Tensor, input: Tensor, opts: Any = None) -> Prepared:
    """Copy the equally large tensors of all ranks into one tensor; the input may be a part of it."""
    what = "all_gather_single"
    return _all_gather(at, what, _with_parts(at, what, [input], [output]), [output])


def all_gather_single_coalesced(at: Member, outputs: Tensors, inputs: Tensors, opts: Any = None) -> Prepared:
    """Copy several tensors of all ranks to all ranks, each into one tensor."""
    what = "all_gather_single_coalesced"
    return _all_gather(at, what, _with_parts(at, what, inputs, outputs), list(outputs))


def _with_parts(at: Member, what: str, parts: Tensors, wholes: Tensors) -> Pairs:
    # Each tensor beside the parts, as large as it, of a whole.
    who = f"{what} {at.where}"
    return [(part, parts_of(whole, part, at.size, who)) for part, whole in zip(parts, wholes, strict=True)]


def _all_gather(at: Member, what: str, pairs: Pairs, result: Any) -> Prepared:
    # Of each pair: this rank's tensor, and where those of all ranks go.
    who, me = f"{what} {at.where}", at.me
    for mine, targets in pairs:
        at.check_list(mine, targets, who, (me,))
    sources = [Flat(mine) for mine, _ in pairs]
    outs = [[Flat(target) for target in targets] for _, targets in pairs]

    def script() -> Script:
        for source, several in zip(sources, outs, strict=True):
            arrays = [out.bytes for out in several]
            # Its own place may be the source itself.
            data = _apart(source.bytes, [*arrays[:me], *arrays[me + 1 :]])
            yield from at.ways.spread([array.size for array in arrays], data, arrays)

    every = [target for _, targets in pairs for target in targets]
    return at.call(what, every), script, result, list(chain.from_iterable(outs))


def gather(at: Member, outputs: Lists, inputs: Tensors, opts: Any = None) -> Prepared:
    """Copy the tensors of all ranks to the root."""
    tensor, root, targets = _with_list_at_root(at, "gather", inputs, outputs, opts)
    source, flats = Flat(tensor), [Flat(target) for target in targets]

    def script() -> Script:
        outs = [flat.bytes for flat in flats]
        data = _apart(source.bytes, [*outs[:root], *outs[root + 1 :]])
        return at.ways.spread([data.size] * at.size, data, outs or [None] * at.size, root)

    return at.call(f"gather to rank {root}", [tensor]), script, [targets], flats


def scatter(at: Member, outputs: Tensors, inputs: Lists, opts: Any = None) -> Prepared:
    """Copy one of the root's tensors to each rank."""
    tensor, root, sources = _with_list_at_root(at, "scatter", outputs, inputs, opts)
    flat, parts = Flat(tensor), [Flat(part) for part in sources]

    def script() -> Script:
        out = flat.bytes
        sends = [part.bytes for part in parts] or [out[:0]] * at.size
        return at.ways.deal(sends, [out if rank == root else out[:0] for rank in range(at.size)])

    return at.call(f"scatter from rank {root}", [tensor]), script, [tensor], [flat]


def _with_list_at_root(
    at: Member, what: str, ones: Tensors, lists: Lists, opts: Any
) -> tuple[Tensor, int, list[Tensor]]:
    # Checked: this rank's tensor, the root, and there a tensor for each rank, none elsewhere.
    who = f"{what} {at.where}"
    mine, root = single(ones, who), root_of(opts, at.size, who)
    if at.me != root:
        check([mine], who)
        return mine, root, []
    parts = list(lists[0]) if lists else []
    at.check_list(mine, parts, f"{who}, at the root", range(at.size))
    return mine, root, parts


def alltoall(at: Member, outputs: Tensors, inputs: Tensors, opts: Any = None) -> Prepared:
    """Send one tensor from every rank to every rank; sizes may differ."""
    return _all_to_all(at, "all_to_all", list(outputs), list(inputs), list(outputs))


def all_to_all_single(
    at: Member,
    output: Tensor,
    input: Tensor,
    output_splits: Any = None,
    input_splits: Any = None,
    opts: Any = None,
) -> Prepared:
    """Send some rows of a tensor to every rank; equal parts if no numbers of rows are given."""
    who = f"all_to_all_single {at.where}"
    outs = rows_of(output, output_splits, at.size, who)
    ins = rows_of(input, input_splits, at.size, who)
    return _all_to_all(at, "all_to_all_single", outs, ins, [output])


def _all_to_all(at: Member, what: str, outputs: list[Tensor], inputs: list[Tensor], result: Any) -> Prepared:
    who = f"{what} {at.where}"
    check_alike([*outputs, *inputs], who)
    if len(outputs) != at.size or len(inputs) != at.size:
        got = f"{len(inputs)} and {len(outputs)}"
        raise ShapeError(f"{who}: an input and an output for each of {at.size} ranks, got {got}")
    flats, parts = [Flat(out) for out in outputs], [Flat(part) for part in inputs]

    def script() -> Script:
        sends, outs = [part.bytes for part in parts], [flat.bytes for flat in flats]
        return at.ways.deal([_apart(send, outs) for send in sends], outs)

    # Sizes differ between ranks, which compare them by pairs in ``deal``.
    kind = str(outputs[0].dtype).removeprefix("torch.")
    return at.call(f"{what} of {kind}", []), script, result, flats


def allreduce(at: Member, tensors: Any, opts: Any = None, *_: Any) -> Prepared:
    """Reduce a tensor in place on all ranks.

    A training loop reduces the same tensors in each step. So what a call needs of one is kept by its address,
    which is only a key: the script that uses the memory keeps the tensor of its call. Freed memory that
    another tensor gets is thus that of the new tensor.
    """
    tensor, op, ways = single(tensors, f"all_reduce {at.where}"), op_of(opts), at.ways
    key = (tensor.data_ptr(), tensor.numel(), tensor.dtype, hash(op)) if _is_plain(tensor) else None
    known = at.cuts.get(key)
    if known is None:
        prepared = all_reduce(at, "all_reduce", [tensor], op)
        if key is None or tensor.is_complex() or not tensor.numel() or not isinstance(ways, NodeCollectives):
            return prepared
        if len(at.cuts) >= _KEPT:
            at.cuts.clear()
        reducer = at.reducer(op, tensor.dtype)
        x = array_at(tensor.data_ptr(), reducer.element.storage, tensor.numel())
        known = at.cuts[key] = prepared[0], Cuts(ways, x, reducer)
    call, cuts = known
    return call, partial(cuts.node.reduce_cut, cuts, None, tensor), [tensor], []


def _is_plain(tensor: Tensor) -> bool:
    # Its elements are contiguous in memory. Subclasses may keep their elements elsewhere.
    strided = type(tensor) in _PLAIN and tensor.layout is torch.strided and tensor.is_cpu
    return strided and tensor.is_contiguous() and not tensor.is_neg()


def allreduce_coalesced(at: Member, tensors: Tensors, opts: Any = None) -> Prepared:
    """Reduce several tensors in place on all ranks."""
    return all_reduce(at, "all_reduce_coalesced", list(tensors), op_of(opts))


def all_reduce(at: Member, what: str, tensors: list[Tensor], op: Any, root: int | None = None) -> Prepared:
    """Reduce tensors in place on all ranks, or on a root; ``what`` is the name of the call."""
    check(tensors, f"{what} {at.where}")
    reducers = [at.reducer(op, tensor.dtype) for tensor in tensors]
    flats = [Flat(tensor) for tensor in tensors]

    def script() -> Script:
        for flat, reducer in zip(flats, reducers, strict=True):
            yield from at.ways.reduce(flat.elements, reducer, root)

    # Without tensors nothing has looked the operation up.
    named = f"{what}({OPERATIONS[hash(op)][0]})" if reducers else what
    named = named if root is None else f"{named} to rank {root}"
    return at.call(named, tensors), script, tensors, flats


def reduce(at: Member, tensors: Any, opts: Any = None, *_: Any) -> Prepared:
    """Reduce a tensor in place on the root."""
    who = f"reduce {at.where}"
    return all_reduce(at, "reduce", [single(tensors, who)], op_of(opts), root_of(opts, at.size, who))


def reduce_scatter(at: Member, outputs: Tensors, inputs: Lists, opts: Any = None) -> Prepared:
    """Reduce one tensor for each rank; sizes may differ."""
    who = f"reduce_scatter {at.where}"
    pair = single(outputs, who), list(single(inputs, who))
    return _reduce_scatter(at, "reduce_scatter", [pair], opts)


def reduce_scatter_single(at: Member, output: Tensor, input: Tensor, opts: Any = None) -> Prepared:
    """Reduce a tensor; every rank gets an equal part of it."""
    what = "reduce_scatter_single"
    return _reduce_scatter(at, what, _with_parts(at, what, [output], [input]), opts)


def reduce_scatter_single_coalesced(
    at: Member, outputs: Tensors, inputs: Tensors, opts: Any = None
) -> Prepared:
    """Reduce several tensors; every rank gets an equal part of each."""
    what = "reduce_scatter_single_coalesced"
    return _reduce_scatter(at, what, _with_parts(at, what, outputs, inputs), opts)


def _reduce_scatter(at: Member, what: str, pairs: Pairs, opts: Any) -> Prepared:
    # Of each pair: where this rank's result goes, and a tensor for each rank.
    who, me, op = f"{what} {at.where}", at.me, op_of(opts)
    for out, parts in pairs:
        at.check_list(out, parts, who, (me,))
    flats = [Flat(out) for out, _ in pairs]
    inputs = [[Flat(part) for part in parts] for _, parts in pairs]
    reducers = [at.reducer(op, out.dtype) for out, _ in pairs]

    def script() -> Script:
        for flat, several, reducer in zip(flats, inputs, reducers, strict=True):
            out = flat.elements
            arrays = [part.elements for part in several]
            # Its own part may be the output: it is read and written element by element.
            arrays = [array if rank == me else _apart(array, [out]) for rank, array in enumerate(arrays)]
            yield from at.ways.reduce_scatter(arrays, out, reducer)

    every = [part for _, parts in pairs for part in parts]
    named = f"{what}({OPERATIONS[hash(op)][0]})" if reducers else what
    return at.call(named, every), script, [out for out, _ in pairs], flats


def _apart(data: Array, targets: Sequence[Array]) -> Array:
    # Data as they are, or a copy if one of the targets may share their memory: the targets are filled in
    # turns, while later parts of the data are still to be sent.
    return data.copy() if any(np.may_share_memory(data, target) for target in targets) else data


def op_of(opts: Any) -> Any:
    """Reduction operation of some options, or the operation itself; the sum if None."""
    found = getattr(opts, "reduceOp", opts)
    return ReduceOp.SUM if found is None else found


def root_of(opts: Any, ranks: int, who: str) -> int:
    """Root of some options; ``ArgumentError`` if it is none of so many ranks."""
    root = int(opts.rootRank) if opts is not None else 0
    if not 0 <= root < ranks:
        raise ArgumentError(f"{who}: the root is a rank in the group, from 0 to {ranks - 1}, got {root}")
    return root
