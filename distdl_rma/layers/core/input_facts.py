"""What a rank of a layer says of its inputs in a call, and what the ranks' inputs are parts of."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from distdl_rma.errors import ShapeError
from distdl_rma.geometry.decomposition import Decomposition
from distdl_rma.geometry.partition import Partition
from distdl_rma.ops.core.autograd import GradientNeeds
from distdl_rma.ops.core.tensors import DTYPES, MAX_DIMS, trouble_with

_DTYPE_CODES = list(DTYPES)
_NO_DTYPE = -1
# Words of a row: type of the weights, what needs a gradient, how many inputs and numbers, the numbers; then
# of each input its type, how many dimensions, the extents.
_HEAD = 4 + MAX_DIMS
_PER_INPUT = 2 + MAX_DIMS

# Shape and type of one input.
_Input = tuple[tuple[int, ...], torch.dtype]


class InputFacts(NamedTuple):
    """What one rank says of its inputs, of its weights and of what it wants, before data moves."""

    inputs: tuple[_Input, ...]
    needs: GradientNeeds
    weights: torch.dtype | None = None
    call_arguments: tuple[int, ...] = ()
    problem: str = ""
    given: int = 1  # inputs of the call, where the layer may take another number of them

    @property
    def shape(self) -> tuple[int, ...]:
        """Local shape of the first input."""
        return self.inputs[0][0]

    @property
    def dtype(self) -> torch.dtype:
        """Type of the first input."""
        return self.inputs[0][1]

    def of(self, at: int) -> InputFacts:
        """The same with one of the inputs alone."""
        return self._replace(inputs=self.inputs[at : at + 1])

    @classmethod
    def about(
        cls,
        xs: Sequence[torch.Tensor],
        weight: torch.Tensor | None,
        call_arguments: tuple[int, ...],
        idle: Sequence[bool],
        problem: str,
    ) -> InputFacts:
        """Facts about local tensors, the weight that the layer will use, and numbers it was called with.

        Where a rank has no part of an input, all tensors without elements are the same. What are no tensors
        that can move, and any other ``problem`` of the caller, is told instead.
        """
        given = len(xs)
        problem = problem or _trouble(xs, given, call_arguments)
        if problem:
            return cls((), GradientNeeds(False, False), problem=problem)
        if given < len(idle):
            xs = [*xs, *[torch.empty(0)] * (len(idle) - given)]
        recording = torch.is_grad_enabled()
        inputs = tuple(
            [
                _NOTHING if outside and 0 in xs[at].shape else (tuple(xs[at].shape), xs[at].dtype)
                for at, outside in enumerate(idle)
            ]
        )
        others = tuple([recording and x.requires_grad for x in xs[1:]]) if given > 1 else ()
        learns = recording and weight is not None and weight.requires_grad
        needs = GradientNeeds(recording and xs[0].requires_grad, learns, others)
        return cls(inputs, needs, None if weight is None else weight.dtype, call_arguments, given=given)

    @property
    def key(self) -> tuple[object, ...]:
        """What a plan depends on."""
        return self.inputs, self.weights, self.call_arguments, self.given

    def encode(self, inputs: int) -> npt.NDArray[np.int64]:
        """Row of numbers that travels, for so many inputs; a problem becomes an input of no type."""
        words = np.zeros(words_for(inputs), np.int64)
        if not self.inputs:
            words[_HEAD] = _NO_DTYPE
            return words
        weights = _DTYPE_CODES.index(self.weights) if self.weights in DTYPES else _NO_DTYPE
        needs = sum(needed << bit for bit, needed in enumerate((self.needs.weights, *self.needs.inputs)))
        head = (weights, needs, self.given, len(self.call_arguments), *self.call_arguments)
        words[: len(head)] = head
        for at, (shape, dtype) in enumerate(self.inputs):
            row = (_DTYPE_CODES.index(dtype), len(shape), *shape)
            start = _HEAD + at * _PER_INPUT
            words[start : start + len(row)] = row
        return words

    @classmethod
    def decode(cls, words: Sequence[int]) -> InputFacts:
        """Facts from the row of numbers."""
        weights, needs, given, count, *numbers = words[:_HEAD]
        inputs: list[_Input] = []
        for start in range(_HEAD, len(words), _PER_INPUT):
            code, dims, *shape = words[start : start + _PER_INPUT]
            if code == _NO_DTYPE:
                return cls((), GradientNeeds(False, False))
            inputs.append((tuple(shape[:dims]), _DTYPE_CODES[code]))
        first, *others = [bool(needs >> at & 1) for at in range(1, len(inputs) + 1)]
        kind = None if weights == _NO_DTYPE else _DTYPE_CODES[weights]
        wanted = GradientNeeds(first, bool(needs & 1), tuple(others))
        return cls(tuple(inputs), wanted, kind, tuple(numbers[:count]), given=given)


_NOTHING: _Input = (0,), _DTYPE_CODES[0]


def words_for(inputs: int) -> int:
    """Length of a row for so many inputs."""
    return _HEAD + inputs * _PER_INPUT


def _trouble(xs: Sequence[torch.Tensor], given: int, call_arguments: tuple[int, ...]) -> str:
    # What is no tensor that can move, or does not fit into a row.
    for at, x in enumerate(xs):
        problem = trouble_with(x, f"input {at}" if given > 1 else "input")
        if problem:
            return problem
    if not call_arguments:
        return ""
    if len(call_arguments) > MAX_DIMS:
        return f"the call has {len(call_arguments)} numbers, {MAX_DIMS} are the most"
    worst = max(call_arguments, key=abs, default=0)
    return "" if abs(worst) < 1 << 63 else f"the call has the number {worst}, which is out of range"


def common_dtype(facts: dict[int, InputFacts]) -> torch.dtype:
    """Type that all ranks pass; ``ShapeError`` if two differ, which names both."""
    (first, expected), *others = ((rank, fact.dtype) for rank, fact in facts.items())
    for rank, dtype in others:
        if dtype != expected:
            raise ShapeError(f"rank {first} passes {expected} but rank {rank} {dtype}")
    return expected


def input_dtype(P_x: Partition, facts: dict[int, InputFacts]) -> torch.dtype:
    """Type of an input; ``ShapeError`` if ranks of P_x differ, or one outside passes elements."""
    for rank, fact in facts.items():
        if rank not in P_x and 0 not in fact.shape:
            raise ShapeError(f"rank {rank} is not in P_x but passes a tensor of shape {fact.shape}")
    return common_dtype({rank: facts[rank] for rank in P_x.ranks})


def source_of(
    P_x: Partition, facts: dict[int, InputFacts], replicate: Collection[int] = ()
) -> tuple[Decomposition, torch.dtype]:
    """Who owns what of an input on P_x, and its type; ``ShapeError`` if the shards form no grid either.

    Along the grid dimensions ``replicate`` the ranks have the same part of it.
    """
    dtype = input_dtype(P_x, facts)
    shapes = {rank: facts[rank].shape for rank in P_x.ranks}
    return Decomposition.from_local_shapes(P_x, shapes, replicate), dtype
