"""The process group: what torch calls, as collectives and messages on the segments."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import timedelta
from itertools import chain
from typing import Any

import numpy as np
import torch
from torch.distributed import ProcessGroup, ReduceOp, Work

from distdl_rma.errors import ShapeError
from distdl_rma.process_group.between_nodes import WideCollectives
from distdl_rma.process_group.on_node import NodeCollectives
from distdl_rma.process_group.operations import Lines, Operation, Script
from distdl_rma.process_group.points import Points
from distdl_rma.process_group.reducers import reducer_of
from distdl_rma.process_group.rounds import Call, Rounds
from distdl_rma.process_group.tensors import Flat, check, facts, same_type, single
from distdl_rma.process_group.work import GroupWork
from distdl_rma.segments.manager import SegmentManager
from distdl_rma.segments.messages import Messages

Tensor = torch.Tensor


class RmaProcessGroup(ProcessGroup):  # type: ignore[misc, unused-ignore]
    """A process group of torch on the segments of a machine, for tensors on the processor.

    Made by ``torch.distributed.init_process_group("rma")`` and ``new_group``; collective over its ranks to
    make, blocking. Calls begin an operation and return a work to wait for. Collectives of a group follow one
    another in the order of the calls, which is the same on all ranks; every wait on the machine takes all of
    them further. ``MismatchError`` on every rank where calls, sizes, types or roots differ.

    ``ranks`` are the rank ids of the machine by rank in the group; ``timeout`` is in seconds, None for that
    of the machine.
    """

    def __init__(
        self, manager: SegmentManager, ranks: Sequence[int], name: str, timeout: float | None
    ) -> None:
        me = tuple(ranks).index(manager.rank)
        super().__init__(me, len(ranks))
        self._manager, self._name, self._timeout = manager, name, timeout
        self._lines = Lines(manager, name)
        self._messages = Messages(manager, ranks, f"process group {name}")
        self._points = Points(self._messages, self._lines, me, name)
        self._me, self._ranks = me, len(ranks)
        self._rounds = (
            Rounds(manager, ranks, f"process group {name}") if _on_one_node(manager, ranks) else None
        )
        self._way: NodeCollectives | WideCollectives
        self._caller: Rounds | WideCollectives
        if self._rounds is not None:
            self._way, self._caller = NodeCollectives(self._rounds), self._rounds
        else:
            self._way = self._caller = WideCollectives(self._messages, me, name)
        self._coalescing: list[Work] | None = None
        self._at_shutdown: list[Callable[[], None]] = []

    # What torch asks a group.

    def getBackendName(self) -> str:  # noqa: N802
        """Name of the backend."""
        return "rma"

    def name(self) -> str:
        """Name of the backend."""
        return "rma"

    # Reductions.

    def allreduce(self, tensors: Any, opts: Any = None, timeout: Any = None) -> Work:
        """Reduce a tensor in place on all ranks."""
        tensors = [tensors] if isinstance(tensors, Tensor) else tensors
        return self._all_reduce("all_reduce", [single(tensors, self._who("all_reduce"))], _op(opts))

    def allreduce_coalesced(self, tensors: Sequence[Tensor], opts: Any = None) -> Work:
        """Reduce several tensors in place on all ranks."""
        return self._all_reduce("all_reduce_coalesced", tensors, _op(opts))

    def _all_reduce(self, what: str, tensors: Sequence[Tensor], op: Any) -> Work:
        check(tensors, self._who(what))
        same_type(tensors, self._who(what))
        reducers = [reducer_of(op, tensor.dtype, self._ranks) for tensor in tensors]
        flats = [Flat(tensor) for tensor in tensors]

        def script() -> Script:
            for flat, reducer in zip(flats, reducers, strict=True):
                yield from self._way.all_reduce(flat.elements, reducer)

        name = f"{what}({reducers[0].name if reducers else ''})"
        return self._begin(f"{name} of {facts(tensors)}", script, list(tensors), flats)

    def reduce(self, tensors: Any, opts: Any = None, op: Any = None, timeout: Any = None) -> Work:
        """Reduce a tensor in place on the root."""
        tensor = single(tensors, self._who("reduce"))
        check([tensor], self._who("reduce"))
        reducer, root = reducer_of(_op(opts), tensor.dtype, self._ranks), self._root(opts)
        flat = Flat(tensor)
        text = f"reduce({reducer.name}) to rank {root} of {facts([tensor])}"
        return self._begin(text, lambda: self._way.reduce(flat.elements, reducer, root), [tensor], [flat])

    def reduce_scatter(
        self, outputs: Sequence[Tensor], inputs: Sequence[Sequence[Tensor]], opts: Any = None
    ) -> Work:
        """Reduce a tensor for every rank."""
        out, parts = single(outputs, self._who("reduce_scatter")), list(inputs[0])
        return self._reduce_scatter("reduce_scatter", [(out, parts)], _op(opts))

    def reduce_scatter_single(self, output: Tensor, input: Tensor, opts: Any = None) -> Work:
        """Reduce a tensor of which every rank gets an equal part."""
        return self._reduce_scatter("reduce_scatter_single", [(output, self._cut(output, input))], _op(opts))

    def reduce_scatter_single_coalesced(
        self, outputs: Sequence[Tensor], inputs: Sequence[Tensor], opts: Any = None
    ) -> Work:
        """Reduce several tensors of which every rank gets an equal part."""
        pairs = [(out, self._cut(out, whole)) for out, whole in zip(outputs, inputs, strict=True)]
        return self._reduce_scatter("reduce_scatter_single_coalesced", pairs, _op(opts))

    _reduce_scatter_base = reduce_scatter_single
    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced

    def _reduce_scatter(self, what: str, pairs: Sequence[tuple[Tensor, list[Tensor]]], op: Any) -> Work:
        who, outs = self._who(what), [out for out, _ in pairs]
        parts = [part for _, several in pairs for part in several]
        check([*outs, *parts], who)
        same_type([*outs, *parts], who)
        for out, several in pairs:
            if len(several) != self._ranks:
                raise ShapeError(f"{who}: a tensor for each of {self._ranks} ranks, got {len(several)}")
            if several[self._me].numel() != out.numel():
                raise ShapeError(
                    f"{who}: this rank's part has {several[self._me].numel()} elements, its output {out.numel()}"
                )
        flats = [Flat(out) for out in outs]
        inputs = [[Flat(part) for part in several] for _, several in pairs]
        reducers = [reducer_of(op, out.dtype, self._ranks) for out in outs]

        def script() -> Script:
            for flat, several, reducer in zip(flats, inputs, reducers, strict=True):
                arrays = [part.elements for part in several]
                out = flat.elements
                if any(np.may_share_memory(out, a) for at, a in enumerate(arrays) if at != self._me):
                    arrays = [array.copy() for array in arrays]
                yield from self._way.reduce_scatter(arrays, out, reducer)

        text = f"{what}({reducers[0].name if reducers else ''}) of {facts(parts)}"
        return self._begin(text, script, outs, flats)

    # What is spread.

    def broadcast(self, tensors: Any, opts: Any = None, timeout: Any = None) -> Work:
        """Give all ranks what the root has."""
        tensor, root = single(tensors, self._who("broadcast")), self._root(opts)
        check([tensor], self._who("broadcast"))
        flat = Flat(tensor)

        def script() -> Script:
            data = flat.bytes
            sizes = [data.size if at == root else 0 for at in range(self._ranks)]
            outs = [data if at == root else None for at in range(self._ranks)]
            return self._way.spread(sizes, data if self._me == root else data[:0], outs)

        return self._begin(f"broadcast from rank {root} of {facts([tensor])}", script, [tensor], [flat])

    def allgather(
        self, outputs: Sequence[Sequence[Tensor]], inputs: Sequence[Tensor], opts: Any = None
    ) -> Work:
        """Give all ranks the tensors of all, which may be of different sizes."""
        who = self._who("all_gather")
        return self._all_gather("all_gather", [(single(inputs, who), list(single(outputs, who)))])

    def allgather_coalesced(
        self, outputs: Sequence[Sequence[Tensor]], inputs: Sequence[Tensor], opts: Any = None
    ) -> Work:
        """Give all ranks several tensors of all; ``outputs`` has a list of them for every rank."""
        pairs = [(mine, [row[k] for row in outputs]) for k, mine in enumerate(inputs)]
        return self._all_gather("all_gather_coalesced", pairs)

    def all_gather_single(self, output: Tensor, input: Tensor, opts: Any = None) -> Work:
        """Give all ranks the equally large tensors of all in one; the input may be its part of it."""
        return self._all_gather("all_gather_single", [(input, self._cut(input, output))], [output])

    def all_gather_single_coalesced(
        self, outputs: Sequence[Tensor], inputs: Sequence[Tensor], opts: Any = None
    ) -> Work:
        """Give all ranks several tensors of all, in one each."""
        pairs = [(mine, self._cut(mine, whole)) for mine, whole in zip(inputs, outputs, strict=True)]
        return self._all_gather("all_gather_single_coalesced", pairs, list(outputs))

    _allgather_base = all_gather_single
    allgather_into_tensor_coalesced = all_gather_single_coalesced

    def _all_gather(
        self, what: str, pairs: Sequence[tuple[Tensor, list[Tensor]]], result: Any = None
    ) -> Work:
        who = self._who(what)
        targets = list(chain.from_iterable(outs for _, outs in pairs))
        mine = [tensor for tensor, _ in pairs]
        check([*mine, *targets], who)
        for tensor, outs in pairs:
            same_type([tensor, *outs], who)
            if len(outs) != self._ranks:
                raise ShapeError(f"{who}: a tensor for each of {self._ranks} ranks, got {len(outs)}")
            if outs[self._me].numel() != tensor.numel():
                raise ShapeError(
                    f"{who}: this rank has {tensor.numel()} elements, {outs[self._me].numel()} are expected of it"
                )
        sources = [Flat(tensor) for tensor in mine]
        outs = [[Flat(out) for out in outs] for _, outs in pairs]

        def script() -> Script:
            for source, several in zip(sources, outs, strict=True):
                arrays, data = [out.bytes for out in several], source.bytes
                if any(np.may_share_memory(data, a) for at, a in enumerate(arrays) if at != self._me):
                    data = data.copy()
                yield from self._way.spread([array.size for array in arrays], data, arrays)

        flats = list(chain.from_iterable(outs))
        tensors = targets if result is None else result
        return self._begin(f"{what} of {facts(targets)}", script, tensors, flats)

    def gather(self, outputs: Sequence[Sequence[Tensor]], inputs: Sequence[Tensor], opts: Any = None) -> Work:
        """Give the root the tensors of all."""
        tensor, root = single(inputs, self._who("gather")), self._root(opts)
        targets = list(outputs[0]) if outputs and self._me == root else []
        self._check_parts("gather", tensor, targets, root)
        source, flats = Flat(tensor), [Flat(out) for out in targets]

        def script() -> Script:
            data = source.bytes
            outs = [flat.bytes for flat in flats] or [None] * self._ranks
            return self._way.spread([data.size] * self._ranks, data, outs, root)

        text = f"gather to rank {root} of {facts([tensor])}"
        return self._begin(text, script, targets, flats)

    def scatter(
        self, outputs: Sequence[Tensor], inputs: Sequence[Sequence[Tensor]], opts: Any = None
    ) -> Work:
        """Give every rank a tensor of the root."""
        tensor, root = single(outputs, self._who("scatter")), self._root(opts)
        sources = list(inputs[0]) if inputs and self._me == root else []
        self._check_parts("scatter", tensor, sources, root)
        flat, parts = Flat(tensor), [Flat(part) for part in sources]

        def script() -> Script:
            out = flat.bytes
            sends = [part.bytes for part in parts] or [out[:0]] * self._ranks
            outs = [out if at == root else out[:0] for at in range(self._ranks)]
            return self._way.deal(sends, outs)

        text = f"scatter from rank {root} of {facts([tensor])}"
        return self._begin(text, script, [tensor], [flat])

    def _check_parts(self, what: str, mine: Tensor, parts: Sequence[Tensor], root: int) -> None:
        who = self._who(what)
        check([mine, *parts], who)
        same_type([mine, *parts], who)
        if self._me == root and len(parts) != self._ranks:
            raise ShapeError(f"{who}: a tensor for each of {self._ranks} ranks on the root, got {len(parts)}")
        different = [part.numel() for part in parts if part.numel() != mine.numel()]
        if different:
            raise ShapeError(
                f"{who}: all ranks' tensors have {mine.numel()} elements, got one of {different[0]}"
            )

    # All to all.

    def alltoall(self, outputs: Sequence[Tensor], inputs: Sequence[Tensor], opts: Any = None) -> Work:
        """Give every rank a tensor of every rank; sizes may differ."""
        return self._all_to_all("all_to_all", list(outputs), list(inputs), None)

    def all_to_all_single(
        self,
        output: Tensor,
        input: Tensor,
        output_splits: Any = None,
        input_splits: Any = None,
        opts: Any = None,
    ) -> Work:
        """Give every rank some rows of a tensor; equal parts without the numbers of rows."""
        who = self._who("all_to_all_single")
        outs = self._rows(output, output_splits, who)
        return self._all_to_all("all_to_all_single", outs, self._rows(input, input_splits, who), output)

    alltoall_base = all_to_all_single

    def _all_to_all(
        self, what: str, outputs: list[Tensor], inputs: list[Tensor], result: Tensor | None
    ) -> Work:
        who = self._who(what)
        check([*outputs, *inputs], who)
        same_type([*outputs, *inputs], who)
        if len(outputs) != self._ranks or len(inputs) != self._ranks:
            raise ShapeError(
                f"{who}: a tensor for each of {self._ranks} ranks, got {len(inputs)} and outputs {len(outputs)}"
            )
        flats, parts = [Flat(out) for out in outputs], [Flat(part) for part in inputs]

        def script() -> Script:
            sends, outs = [part.bytes for part in parts], [flat.bytes for flat in flats]
            if any(np.may_share_memory(a, b) for a in sends for b in outs if a.size and b.size):
                sends = [send.copy() for send in sends]
            return self._way.deal(sends, outs)

        kind = str(outputs[0].dtype).removeprefix("torch.")
        return self._begin(f"{what} of {kind}", script, outputs if result is None else [result], flats)

    # Barriers.

    def barrier(self, opts: Any = None, timeout: Any = None) -> Work:
        """Wait until all ranks have called."""
        return self._begin("barrier", self._way.barrier, [], [])

    def monitored_barrier(self, timeout: timedelta | None = None, wait_all_ranks: bool = False) -> None:
        """Wait until all ranks have called, blocking; ``ExchangeTimeout`` names those that have not."""
        work = self._begin("monitored_barrier", self._way.barrier, [], [])
        work.wait(timeout)

    # Messages.

    def send(self, tensors: Sequence[Tensor], target: int, tag: int) -> Work:
        """Send a tensor to a rank of the group."""
        tensor = single(tensors, self._who("send"))
        check([tensor], self._who("send"))
        flat = Flat(tensor)
        operation = self._points.send(flat.bytes, str(tensor.dtype), target, tag)
        return self._kept(GroupWork(self._lines, operation, [tensor], self._timeout, self._me))

    def recv(self, tensors: Sequence[Tensor], source: int, tag: int) -> Work:
        """Receive a tensor from a rank of the group."""
        flat, tensor = self._target(tensors)
        operation = self._points.receive(flat.bytes, str(tensor.dtype), source, tag, flat.store)
        return self._kept(GroupWork(self._lines, operation, [tensor], self._timeout, source))

    def recv_anysource(self, tensors: Sequence[Tensor], tag: int) -> Work:
        """Receive a tensor from whichever rank of the group sends one with this tag."""
        flat, tensor = self._target(tensors)
        found: list[int] = []
        operation = self._points.receive_any(flat.bytes, str(tensor.dtype), tag, found.append, flat.store)
        return self._kept(GroupWork(self._lines, operation, [tensor], self._timeout, found))

    def _target(self, tensors: Sequence[Tensor]) -> tuple[Flat, Tensor]:
        tensor = single(tensors, self._who("recv"))
        check([tensor], self._who("recv"))
        return Flat(tensor), tensor

    # Several calls that belong together.

    def _start_coalescing(self, device: torch.device) -> None:
        self._coalescing = []

    def _end_coalescing(self, device: torch.device) -> Work:
        works, self._coalescing = self._coalescing or [], None
        if not works:
            return self._begin_nothing()
        return works[-1] if len(works) == 1 else _Several(works)

    # The end.

    def when_shut_down(self, call: Callable[[], None]) -> None:
        """Have something called when the group is destroyed."""
        self._at_shutdown.append(call)

    def shutdown(self) -> None:
        """Give up the memory; what other ranks still wait for goes on. Idempotent."""
        self._lines.close()
        if not self._manager.closed:
            if self._rounds is not None:
                rounds = self._rounds
                self._manager.retire(rounds.memory, rounds.idle)
            self._messages.close()
        self._rounds = None
        while self._at_shutdown:
            self._at_shutdown.pop()()

    abort = shutdown

    def _begin(self, text: str, script: Callable[[], Script], result: Any, flats: Sequence[Flat]) -> Work:
        caller, call = self._caller, Call.of(text)

        def begin() -> Script:
            caller.call = call
            return script()

        def finish() -> None:
            for flat in flats:
                flat.store()

        operation = self._lines.append(Operation(begin, caller.waiting, finish))
        return self._kept(GroupWork(self._lines, operation, result, self._timeout))

    def _kept(self, work: Work) -> Work:
        if self._coalescing is not None:
            self._coalescing.append(work)
        return work

    def _who(self, what: str) -> str:
        return f"{what} in group {self._name!r}"

    def _root(self, opts: Any) -> int:
        return int(opts.rootRank) if opts is not None else 0

    def _cut(self, part: Tensor, whole: Tensor) -> list[Tensor]:
        who = self._who("a collective of single tensors")
        if whole.numel() != part.numel() * self._ranks:
            raise ShapeError(
                f"{who}: {self._ranks} parts of {part.numel()} elements are not the {whole.numel()} of the whole"
            )
        check([part, whole], who)
        if not whole.is_contiguous():
            raise ShapeError(f"{who}: tensors are contiguous")
        return list(whole.detach().reshape(-1).tensor_split(self._ranks)) if self._ranks > 1 else [whole]

    def _rows(self, tensor: Tensor, splits: Any, who: str) -> list[Tensor]:
        check([tensor], who)
        if not tensor.is_contiguous():
            raise ShapeError(f"{who}: tensors are contiguous")
        sizes, rows = list(splits or ()), tensor.shape[0] if tensor.dim() else 1
        if not sizes:
            if rows % self._ranks:
                raise ShapeError(f"{who}: {rows} rows are not equal parts for {self._ranks} ranks")
            sizes = [rows // self._ranks] * self._ranks
        if len(sizes) != self._ranks or sum(sizes) != rows:
            raise ShapeError(f"{who}: {rows} rows for {self._ranks} ranks, got numbers of rows {sizes}")
        return list(tensor.detach().split(sizes))


class _Several(Work):  # type: ignore[misc, unused-ignore]
    """Works that are waited for together."""

    def __init__(self, works: Sequence[Work]) -> None:
        super().__init__()
        self._works = list(works)

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Wait for all of them."""
        for work in self._works:
            work.wait(timeout)
        return True

    def is_completed(self) -> bool:
        """Whether all are over."""
        return all(work.is_completed() for work in self._works)

    def get_future(self) -> torch.futures.Future[Any]:
        """Future of all their tensors."""
        every = torch.futures.collect_all([work.get_future() for work in self._works])
        return every.then(lambda done: list(chain.from_iterable(one.value() for one in done.value())))


def _on_one_node(manager: SegmentManager, ranks: Sequence[int]) -> bool:
    # Alike on all of the ranks.
    return all(manager.segment.link(rank).memory is not None for rank in ranks)


def _op(opts: Any) -> Any:
    found = getattr(opts, "reduceOp", opts)
    return ReduceOp.SUM if found is None else getattr(found, "op", found)
