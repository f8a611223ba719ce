"""Collectives of torch that move data without a reduction: arguments are checked, operations begun."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from typing import Any

import numpy as np
from torch.distributed import Work

from distdl_rma.errors import ShapeError
from distdl_rma.process_group.core import GroupCore, Tensor, of_all, root_of
from distdl_rma.process_group.tensors import Flat, check, check_alike, parts_of, rows_of, single
from distdl_rma.segments.collectives.between_nodes import Script


class DataCollectives(GroupCore):
    """Collectives that move data; see :class:`RmaProcessGroup`."""

    @of_all
    def broadcast(self, tensors: Any, opts: Any = None, *_: Any) -> Work:
        """Copy the root's tensor to all ranks."""
        tensors = [tensors] if isinstance(tensors, Tensor) else tensors
        tensor, root = single(tensors, self._who("broadcast")), root_of(opts)
        check([tensor], self._who("broadcast"))
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
                arrays, data = [out.bytes for out in several], source.bytes
                if any(np.may_share_memory(data, a) for at, a in enumerate(arrays) if at != me):
                    data = data.copy()
                yield from self._collectives.spread([array.size for array in arrays], data, arrays)

        every = [target for _, targets in pairs for target in targets]
        return self._begin(what, every, script, result, list(chain.from_iterable(outs)))

    @of_all
    def gather(self, outputs: Sequence[Sequence[Tensor]], inputs: Sequence[Tensor], opts: Any = None) -> Work:
        """Copy the tensors of all ranks to the root."""
        tensor, root = single(inputs, self._who("gather")), root_of(opts)
        targets = list(outputs[0]) if outputs and self._me == root else []
        self._check_parts("gather", tensor, targets, root)
        source, flats = Flat(tensor), [Flat(target) for target in targets]

        def script() -> Script:
            data, outs = source.bytes, [flat.bytes for flat in flats]
            return self._collectives.spread(
                [data.size] * self._ranks, data, outs or [None] * self._ranks, root
            )

        return self._begin(f"gather to rank {root}", [tensor], script, [targets], flats)

    @of_all
    def scatter(
        self, outputs: Sequence[Tensor], inputs: Sequence[Sequence[Tensor]], opts: Any = None
    ) -> Work:
        """Copy one of the root's tensors to each rank."""
        tensor, root = single(outputs, self._who("scatter")), root_of(opts)
        sources = list(inputs[0]) if inputs and self._me == root else []
        self._check_parts("scatter", tensor, sources, root)
        flat, parts = Flat(tensor), [Flat(part) for part in sources]

        def script() -> Script:
            out = flat.bytes
            sends = [part.bytes for part in parts] or [out[:0]] * self._ranks
            outs = [out if at == root else out[:0] for at in range(self._ranks)]
            return self._collectives.deal(sends, outs)

        return self._begin(f"scatter from rank {root}", [tensor], script, [tensor], [flat])

    def _check_parts(self, what: str, mine: Tensor, parts: Sequence[Tensor], root: int) -> None:
        who = self._who(what)
        check_alike([mine, *parts], who)
        if self._me == root and len(parts) != self._ranks:
            raise ShapeError(f"{who}: a tensor for each of {self._ranks} ranks at the root, got {len(parts)}")
        for part in parts:
            if part.numel() != mine.numel():
                raise ShapeError(f"{who}: tensors have {mine.numel()} elements, got one of {part.numel()}")

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
            if any(np.may_share_memory(a, b) for a in sends for b in outs if a.size and b.size):
                sends = [send.copy() for send in sends]
            return self._collectives.deal(sends, outs)

        kind = str(outputs[0].dtype).removeprefix("torch.")
        return self._begin(f"{what} of {kind}", [], script, result, flats)
