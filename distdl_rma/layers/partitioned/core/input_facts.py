"""Facts that a rank sends about the inputs of a call before data moves, and their combination over ranks.

Each rank describes its shards; the functions below derive the global tensor from all descriptions, and raise
the same error on all ranks where there is none::

    rank 0    InputFacts((3, 4) float32)  ─┐                       rank 0 : rank 1
    rank 1    InputFacts((3, 2) float32)  ─┴─  source_of(P_x)  ->    3 x 4  |  3 x 2     of 3 x 6

A row of facts is sent as JSON: it is small, it is needed only when facts change, and a rank of another
version or with wrong facts shows readable bytes in a trace.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Sequence
from typing import Any, NamedTuple

import torch

from distdl_rma.errors import ProtocolError, ShapeError
from distdl_rma.geometry.decomposition import Decomposition
from distdl_rma.geometry.partition import Partition, alike, by_key
from distdl_rma.layers.dtypes import DTYPES
from distdl_rma.layers.ops.core.autograd import GradientNeeds
from distdl_rma.layers.ops.core.tensors import problem_with
from distdl_rma.layers.partitioned.core.refusals import clipped

# Shape and type of one input.
_Input = tuple[tuple[int, ...], torch.dtype]
# First of the ranks that sum gradients behind a call, -1 if values travel; names of the parameters.
Trainable = tuple[int, tuple[str, ...]]


class InputFacts(NamedTuple):
    """Facts about one rank's inputs, weights, needed gradients and other arguments of a call.

    A value: equal facts have equal rows and keys. Facts with a ``problem`` have no inputs, since values that
    are no tensors have no shape; all ranks refuse the call before they look at the other facts.

    Examples
    --------
    >>> facts = InputFacts.about([torch.zeros(2, 3)])
    >>> facts.shape, facts.dtype
    ((2, 3), torch.float32)
    >>> InputFacts.decode(facts.encode()) == facts
    True
    """

    inputs: tuple[_Input, ...]
    needs: GradientNeeds
    weights: torch.dtype | None = None
    call_arguments: tuple[Any, ...] = ()  # in JSON's types
    problem: str = ""
    trainable: Trainable | None = None  # parameters whose gradients are exchanged with other ranks
    device: str = ""  # of the inputs and weights; empty for the CPU

    @property
    def shape(self) -> tuple[int, ...]:
        """Local shape of the first input."""
        return self.inputs[0][0]

    @property
    def dtype(self) -> torch.dtype:
        """Type of the first input."""
        return self.inputs[0][1]

    def of(self, at: int) -> InputFacts:
        """The facts with one of the inputs only."""
        return self._replace(inputs=self.inputs[at : at + 1])

    @classmethod
    def about(
        cls,
        xs: Sequence[torch.Tensor],
        weight: torch.Tensor | None = None,
        call_arguments: tuple[Any, ...] = (),
        idle: Sequence[bool] = (False,),
        problem: str = "",
        trainable: Trainable | None = None,
    ) -> InputFacts:
        """Facts about local tensors, a weight that the layer will use, and other arguments of the call.

        ``idle`` is whether this rank is outside of the partition of each input; there all tensors without
        elements have equal facts. A ``problem``, a value that cannot move, or another number of inputs makes
        all ranks raise.
        """
        wanted = len(idle)
        if len(xs) != wanted:
            problem = problem or f"takes {wanted} inputs, got {len(xs)}"
        for at, x in enumerate(xs):
            what = f"input {at}" if wanted > 1 else "input"
            problem = problem or problem_with(x, what)
            like = xs[0] if weight is None else weight
            if not problem and x.device != like.device:
                whose = "input 0 is" if weight is None else "the layer's parameters are"
                problem = f"{what} is on {x.device}, but {whose} on {like.device}"
        if problem:
            return cls((), GradientNeeds(False, False), problem=clipped(problem))
        recording = torch.is_grad_enabled()
        pairs = zip(xs, idle, strict=True)
        inputs = tuple([_NOTHING if out and 0 in x.shape else (tuple(x.shape), x.dtype) for x, out in pairs])
        others = tuple([recording and x.requires_grad for x in xs[1:]]) if wanted > 1 else ()
        learns = recording and weight is not None and weight.requires_grad
        needs = GradientNeeds(recording and xs[0].requires_grad, learns, others)
        dtype = None if weight is None else weight.dtype
        device = "" if xs[0].is_cpu else str(xs[0].device)
        return cls(inputs, needs, dtype, call_arguments, trainable=trainable, device=device)

    @property
    def key(self) -> tuple[object, ...]:
        """The facts that a plan depends on.

        Needed gradients and devices are not among them: a call of an evaluation uses the plan of training,
        whose memory would else be reserved twice.
        """
        return self.inputs, self.weights, self.call_arguments

    def encode(self) -> bytes:
        """Row of bytes for the other ranks; equal for equal facts, so that ranks compare rows."""
        inputs = [(shape, DTYPES.index(dtype)) for shape, dtype in self.inputs]
        weights = DTYPES.index(self.weights) if self.weights in DTYPES else None
        words = inputs, self.needs, weights, self.call_arguments, self.problem, self.trainable, self.device
        return json.dumps(words, separators=(",", ":")).encode()

    @classmethod
    def decode(cls, row: bytes) -> InputFacts:
        """Facts from a row of bytes."""
        inputs, needs, weights, *others = _tuples(json.loads(row))
        return cls(
            tuple((shape, DTYPES[number]) for shape, number in inputs),
            GradientNeeds(*needs),
            None if weights is None else DTYPES[weights],
            *others,
        )


def _tuples(words: Any) -> Any:
    # JSON knows lists only.
    return tuple(map(_tuples, words)) if isinstance(words, list) else words


# Input of a rank outside. Programs pass there what they have, (0,), (b, 0) or another type, which may change
# from call to call; none of that may change the plan.
_NOTHING: _Input = (0,), DTYPES[0]


def common_dtype(facts: dict[int, InputFacts]) -> torch.dtype:
    """Type that all ranks pass; ``ShapeError``, which names two ranks, if they differ.

    Not promoted to a common type, as torch does for one tensor and another: shards are one tensor.
    """
    return alike({rank: fact.dtype for rank, fact in facts.items()}, "rank {} passes {} but rank {} {}")


def check_devices(facts: dict[int, InputFacts]) -> None:
    """Raise ``ShapeError`` if ranks have other types of devices; each has a number of its own.

    Tensors without elements count too: a rank that only receives gets its result where its input is.
    """
    alike(
        {rank: (fact.device or "cpu").partition(":")[0] for rank, fact in facts.items()},
        "rank {} passes a tensor on {} but rank {} one on {}: all ranks have one type of device, also for"
        " tensors without elements, zero_volume_tensor(device=...)",
    )


def input_dtype(P_x: Partition, facts: dict[int, InputFacts]) -> torch.dtype:
    """Type of an input; ``ShapeError`` if ranks of P_x differ, or one outside passes elements."""
    for rank, fact in facts.items():
        if rank not in P_x and 0 not in fact.shape:
            raise ShapeError(f"rank {rank} is not in P_x but passes a tensor of shape {fact.shape}")
    return common_dtype({rank: facts[rank] for rank in P_x.ranks})


def check_weights(dtype: torch.dtype, facts: dict[int, InputFacts], *others: torch.dtype | None) -> None:
    """Raise ``ShapeError`` if the weights of a rank have another type than the input and ``others``."""
    for rank, fact in facts.items():
        if fact.weights not in (dtype, *others):
            raise ShapeError(f"input is {dtype}, on rank {rank} the parameters are {fact.weights}")


def check_trainable(facts: dict[int, InputFacts]) -> None:
    """Raise ``ProtocolError`` if a parameter is frozen on some only of the ranks that exchange gradients.

    The others would wait for its gradient in the backward. Parameters may differ between groups: those that
    ranks keep for themselves are nobody else's.
    """
    stated = {rank: fact.trainable for rank, fact in facts.items() if fact.trainable is not None}
    for ranks in by_key(stated, lambda rank: stated[rank][0]).values():
        alike(
            {rank: [*stated[rank][1]] for rank in ranks},
            "the parameters that need a gradient are {1} on rank {0} and {3} on rank {2}: freeze a parameter"
            " on all ranks or on none",
            ProtocolError,
        )


def source_of(
    P_x: Partition, facts: dict[int, InputFacts], replicate: Collection[int] = ()
) -> tuple[Decomposition, torch.dtype]:
    """Decomposition and type of an input on P_x; ``ShapeError`` also if the shards form no grid.

    Along the grid dimensions ``replicate`` the ranks have the same part of the input.

    Examples
    --------
    >>> P_x = Partition((0, 1), (2, 1), 0)
    >>> facts = {rank: InputFacts.about([torch.zeros(3 - rank, 4)]) for rank in P_x.ranks}
    >>> source, dtype = source_of(P_x, facts)
    >>> source.shape, source.box(1).bounds
    ((5, 4), ((3, 5), (0, 4)))
    """
    dtype = input_dtype(P_x, facts)
    shapes = {rank: facts[rank].shape for rank in P_x.ranks}
    return Decomposition.from_local_shapes(P_x, shapes, replicate), dtype
