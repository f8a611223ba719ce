"""Concatenation along channels of tensors that may be distributed differently."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from functools import cached_property, partial
from itertools import repeat
from typing import Any, Unpack

import torch

from distdl_rma.errors import PartitionError, ShapeError
from distdl_rma.geometry.decomposition import Decomposition
from distdl_rma.geometry.partition import Partition
from distdl_rma.geometry.split import Section
from distdl_rma.layers.core.callbacks import Callbacks
from distdl_rma.layers.core.layer import DistributedLayer, nbytes_of, source_of
from distdl_rma.layers.core.plan_cache import InputFacts, PlanCache
from distdl_rma.ops.autograd import anchored, tells_peers
from distdl_rma.ops.idle_ranks import deliver
from distdl_rma.ops.movement import Movement, movement_or_none
from distdl_rma.ops.tensors import trouble_with

_CHANNELS = 1
_KEPT_ASSEMBLIES = 16


class DistributedConcat(DistributedLayer):
    """Concatenation along the channels, dimension 1, of tensors split over ranks in any of their dimensions.

    Local inputs: the shards of this rank, of any sizes that form a grid with the others', tensors without
    elements on ranks outside of a partition. Local output: the balanced shard of the concatenated tensor on
    P_y, in memory of its own; where that is the partition of the first input, the batch stays cut as it is
    there. Where all partitions are the same and cut no channels, the shards of the output are those of the
    inputs, and nothing is communicated.

    Inputs of different types become one type, as in ``torch.cat``. Each travels as it is, and its gradient
    comes back in its own type.

    Collective to construct over the machine; a call involves the ranks of all partitions and blocks, unless
    nothing is communicated. Backward is the transpose: the gradient of each input goes back to its owners.

    Parameters
    ----------
    P_xs
        Partition of each input, as many dimensions as the tensors.
    P_y
        Partition of the output; that of the first input if None.
    name
        For messages.

    Raises
    ------
    PartitionError
        If there is no input, or the partitions differ in their number of dimensions.
    ShapeError
        In a call, on all its ranks: local shapes do not form a grid, the inputs differ in an extent other
        than the channels or have no common type, the ranks differ in the type of one input, a rank passes
        another number of inputs. Where nothing is communicated, only the ranks that see it can know; the
        others learn it in their next wait, and the machine cannot be used afterwards.

    Notes
    -----
    Interface document, chapter 5; requirement A20.
    """

    def __init__(
        self,
        P_xs: Sequence[Partition],
        P_y: Partition | None = None,
        *,
        name: str | None = None,
        **callbacks: Unpack[Callbacks],
    ) -> None:
        kind, P_xs = type(self).__name__, tuple(P_xs)
        if not P_xs:
            raise PartitionError(f"{kind}: needs the partition of one input at least, got none")
        P_y = P_xs[0] if P_y is None else P_y
        for which, partition in (*((f"P_xs[{at}]", P_x) for at, P_x in enumerate(P_xs)), ("P_y", P_y)):
            if partition.dim != P_y.dim or partition.dim <= _CHANNELS:
                raise PartitionError(
                    f"{kind}: {which} has {partition.dim} dimensions {partition.shape} but P_y {P_y.dim}"
                    f" {P_y.shape}; all need those of the tensors, batch and channels first"
                )
        super().__init__(*P_xs, P_y, name=name, **callbacks)
        self.P_xs, self.P_y = P_xs, P_y
        self._stays = all(P_x == P_y for P_x in P_xs) and P_y.shape[_CHANNELS] == 1

    @cached_property
    def _plans(self) -> list[PlanCache[_Source]]:
        return [
            PlanCache(
                self.machine,
                self.members,
                f"{self.name} (input {at})",
                partial(_Source.of, P_x, len(self.P_xs)),
                self.built_with,
            )
            for at, P_x in enumerate(self.P_xs)
        ]

    @cached_property
    def _assemblies(self) -> OrderedDict[tuple[_Source, ...], _Assembly]:
        return OrderedDict()

    def extra_repr(self) -> str:
        """One line for ``print(model)``."""
        return f"P_xs={[P_x.shape for P_x in self.P_xs]}, P_y={self.P_y.shape}"

    def built_with(self) -> str:
        """As of every layer, with the ranks, which are not the same for all grids of one shape."""
        return f"{[P.ranks for P in (*self.P_xs, self.P_y)]}, {super().built_with()}"

    def nbytes_in(self, inputs: tuple[Any, ...]) -> int:
        """Bytes of all inputs."""
        return sum(nbytes_of(x) for x in inputs)

    @tells_peers
    def connect(
        self, shapes: Sequence[Sequence[int]] | None = None, dtype: torch.dtype | None = None
    ) -> None:
        """Plan for inputs before they are there, and exchange addresses with the neighbours, once.

        Otherwise the first forward and the first backward do it. Collective over the ranks of the layer,
        blocking. Calls with other inputs remain possible.

        Parameters
        ----------
        shapes
            Global shape of each input; may be left out of a layer that was built from global parameters.
        dtype
            Their type; torch's default if None.

        Raises
        ------
        ProtocolError
            If the shapes are not known.
        ShapeError, PartitionError
            If they do not fit the layer, or each other.

        Notes
        -----
        Interface document, section 3.2; requirement A8.
        """
        given = [None] * len(self.P_xs) if shapes is None else list(shapes)
        if self._stays or self.machine.rank not in self.members:
            self._count(given)
        pairs = enumerate(zip(self.P_xs, given, strict=False))
        xs = [self.expected(P_x, shape, dtype, at) for at, (P_x, shape) in pairs]
        if not self._stays and self.machine.rank in self.members:
            self._agree(xs, len(given))[0].connect()

    @tells_peers
    def forward(self, *inputs: torch.Tensor) -> torch.Tensor:
        """Concatenate ``inputs``, the local shards, or tensors without elements outside of a partition."""
        if self.machine.rank not in self.members:
            self._count(inputs)
            return self.stand_aside(inputs[0], inputs[1:])
        if self._stays:
            dtype = self._check(inputs)
            return torch.cat([x.to(dtype) for x in inputs], _CHANNELS)
        assembly, needs = self._agree(inputs, len(inputs))
        y = assembly(inputs, needs)
        batch = inputs[0].shape[0] if inputs[0].dim() else None
        y = deliver(y, self.P_y.active, batch)
        return anchored(y, any(needs))

    def _count(self, given: Sequence[object]) -> None:
        if len(given) != len(self.P_xs):
            raise self._refuse(f"takes {len(self.P_xs)} inputs, got {len(given)}")

    def _check(self, inputs: Sequence[torch.Tensor]) -> torch.dtype:
        self._count(inputs)
        for at, x in enumerate(inputs):
            problem = trouble_with(x, f"input {at}")
            if problem:
                raise self._refuse(problem)
        try:
            _, dtype = common(inputs, self.P_y.dim)
        except ShapeError as error:
            raise self._refuse(str(error)) from None
        return dtype

    def _refuse(self, problem: str) -> ShapeError:
        # Nobody else is asked: what is wrong here may be right elsewhere, and the others would wait.
        wrong = ShapeError(f"{self.name!r}: rank {self.machine.rank}: {problem}")
        if self.machine.size > 1 and self.machine.rank in self.members:
            self.machine.fail(wrong)
        return wrong

    def _agree(self, inputs: Sequence[torch.Tensor], count: int) -> tuple[_Assembly, list[bool]]:
        # With too few of them the first one still tells the others, and all ranks refuse.
        xs = (*inputs, *repeat(torch.empty(0), len(self.P_xs)))
        agreed = [
            plans.agree(x, call_arguments=(count,), idle=not P_x.active)
            for plans, x, P_x in zip(self._plans, xs, self.P_xs, strict=False)
        ]
        sources = tuple(source for source, _ in agreed)
        assembly = self._assemblies.get(sources)
        if assembly is None:
            assembly = self._assemblies[sources] = _Assembly(self, sources)
        self._assemblies.move_to_end(sources)
        if len(self._assemblies) > _KEPT_ASSEMBLIES:
            self._assemblies.popitem(last=False)
        return assembly, [needs.input for _, needs in agreed]


class _Source:
    # Who owns what of one input, and its type; the same object as long as that is the same.
    def __init__(self, blocks: Decomposition, dtype: torch.dtype) -> None:
        self.blocks, self.dtype = blocks, dtype

    @classmethod
    def of(cls, P_x: Partition, count: int, facts: dict[int, InputFacts]) -> _Source:
        for rank, fact in facts.items():
            if fact.call_arguments != (count,):
                raise ShapeError(f"takes {count} inputs, got {fact.call_arguments[0]} on rank {rank}")
        return cls(*source_of(P_x, facts))

    @property
    def shape(self) -> tuple[int, ...]:
        return self.blocks.shape

    def void(self) -> None:
        """Nothing was started before all ranks agreed."""


class _Assembly:
    # For one set of inputs: each moves to where its channels are in the output.
    def __init__(self, layer: DistributedConcat, sources: tuple[_Source, ...]) -> None:
        try:
            shape, self.dtype = common(sources, layer.P_y.dim)
        except ShapeError as error:
            raise ShapeError(f"{layer.name!r}: {error}") from None
        target = Decomposition.balanced(layer.P_y, shape)
        if layer.P_xs[0] == layer.P_y:
            target = target.with_splits({0: sources[0].blocks.splits[0]})
        offset = 0
        self._movements: list[Movement | None] = []
        self._shapes: list[tuple[int, ...]] = []
        for at, source in enumerate(sources):
            channels = Section(target.splits[_CHANNELS], offset, source.shape[_CHANNELS])
            part = target.with_splits({_CHANNELS: channels})
            offset += channels.extent
            self._movements.append(
                movement_or_none(layer.site, source.blocks, part, source.dtype, f"input {at}")
            )
            self._shapes.append(part.box(layer.machine.rank).shape)
        self._active = layer.P_y.active

    def connect(self) -> None:
        for movement in self._movements:
            if movement is not None:
                movement.connect()

    def __call__(self, inputs: Sequence[torch.Tensor], needs: Sequence[bool]) -> torch.Tensor:
        # All are under way before the first is waited for; backward does the same.
        flights = [
            None if movement is None else movement.start(x, needed)
            for movement, x, needed in zip(self._movements, inputs, needs, strict=True)
        ]
        parts = []
        for flight, x, shape in zip(flights, inputs, self._shapes, strict=True):
            part = (x if flight is None else flight.movement.wait(flight)).to(self.dtype)
            # What has no elements came in any shape.
            parts.append(part if part.numel() else part.reshape(shape))
        if self._active:
            return torch.cat(parts, _CHANNELS)
        return torch.cat([part.reshape(-1) for part in parts])


def common(tensors: Sequence[torch.Tensor | _Source], dim: int) -> tuple[tuple[int, ...], torch.dtype]:
    """Shape and type of the concatenation of some tensors.

    Raises
    ------
    ShapeError
        If one has another number of dimensions than ``dim``, another extent than the first in a dimension
        that is not that of the channels, or a type that torch does not promote.
    """
    first, dtype = tensors[0], tensors[0].dtype
    for at, tensor in enumerate(tensors):
        shape = tuple(tensor.shape)
        if len(shape) != dim:
            raise ShapeError(f"input {at} has {len(shape)} dimensions, shape {shape}, the partitions {dim}")
        if tensor.dtype != dtype:
            try:
                dtype = torch.promote_types(dtype, tensor.dtype)
            except RuntimeError as error:
                raise ShapeError(
                    f"input 0 is {first.dtype} but input {at} is {tensor.dtype}: {error}"
                ) from None
        differs = [d for d, n in enumerate(shape) if d != _CHANNELS and n != first.shape[d]]
        if differs:
            raise ShapeError(
                f"input 0 has shape {tuple(first.shape)} but input {at} {shape}, which must agree in"
                f" dimension {differs[0]}"
            )
    channels = sum(tensor.shape[_CHANNELS] for tensor in tensors)
    return (first.shape[0], channels, *first.shape[_CHANNELS + 1 :]), dtype
