"""Embedding of split tensors of indices."""

from __future__ import annotations

import weakref
from functools import cached_property
from typing import Any, Unpack

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812

from distdl_rma.errors import PartitionError, ShapeError, UnsupportedError
from distdl_rma.geometry.decomposition import Decomposition
from distdl_rma.geometry.partition import Partition
from distdl_rma.geometry.split import Balanced
from distdl_rma.layers.core.callbacks import Callbacks
from distdl_rma.layers.core.gather_compute_scatter import CallPlan, ExchangingLayer
from distdl_rma.layers.core.layer import source_of
from distdl_rma.layers.core.placement import Placement
from distdl_rma.layers.core.plan_cache import InputFacts
from distdl_rma.ops.autograd import first_derivative
from distdl_rma.ops.movement import movement_or_none
from distdl_rma.segments.collectives.allreduce import Allreduce

_INDICES = (torch.int64, torch.int32)
_WEIGHTS = ("replicated", "root")


class DistributedEmbedding(ExchangingLayer):
    """Embedding of indices that are split over ranks, in any dimensions.

    Local input: the shard of this rank, of any size that forms a grid with the others'. Local output: one
    vector per index, of the same blocks as the input with a dimension more; or the balanced shard on P_y.
    Every rank looks its own indices up: without P_y no data moves in a forward, and a backward sums the
    gradients of the weight. Collective to construct over the machine; a call involves the ranks of P_x
    and P_y.

    Parameters
    ----------
    P_x
        Partition of the input, with as many dimensions as the tensor of indices.
    num_embeddings, embedding_dim, padding_idx, max_norm, norm_type, scale_grad_by_freq, sparse
        As in torch; ``max_norm`` must be None and ``sparse`` False. ``scale_grad_by_freq`` counts the
        indices of all ranks.
    _weight, _freeze, device, dtype
        As in torch; the initial weight is that of the torch layer with the same seed.
    P_y
        Partition of the output, with a dimension more than P_x; where the input is if None.
    weights
        ``"replicated"``: on all ranks of the machine, gradients summed. ``"root"``: on the first rank of
        P_x only, sent to P_x in each forward, gradients summed there; other ranks hold empty parameters.
    name
        For messages.

    Raises
    ------
    PartitionError
        If P_y does not have one dimension more than P_x.
    ShapeError
        If an argument is none that torch takes. In a call, on all ranks alike: if the local shapes form no
        grid, the types differ or are not ``int64`` or ``int32``, or an index is out of range.
    UnsupportedError
        If ``max_norm`` or ``sparse`` is asked for.

    Notes
    -----
    Requirement B11.
    """

    def __init__(
        self,
        P_x: Partition,
        num_embeddings: int,
        embedding_dim: int,
        padding_idx: int | None = None,
        max_norm: float | None = None,
        norm_type: float = 2.0,
        scale_grad_by_freq: bool = False,
        sparse: bool = False,
        _weight: torch.Tensor | None = None,
        _freeze: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        *,
        P_y: Partition | None = None,
        weights: str = "replicated",
        name: str | None = None,
        **callbacks: Unpack[Callbacks],
    ) -> None:
        kind = type(self).__name__
        _check(kind, P_x, P_y, max_norm, sparse, weights)
        try:
            like = nn.Embedding(
                num_embeddings,
                embedding_dim,
                padding_idx,
                scale_grad_by_freq=scale_grad_by_freq,
                _weight=_weight,
                _freeze=_freeze,
                device=device,
                dtype=dtype,
            )
        except (AssertionError, RuntimeError) as error:
            raise ShapeError(f"{kind}: {error}") from None
        vectors = P_x.create_cartesian_topology_partition((*P_x.shape, 1))
        super().__init__(P_x, vectors if P_y is None else P_y, P_x, name=name, **callbacks)
        self._vectors = vectors
        self._moves = P_y is not None
        self.num_embeddings, self.embedding_dim = like.num_embeddings, like.embedding_dim
        self.padding_idx, self.max_norm, self.norm_type = like.padding_idx, max_norm, norm_type
        self.scale_grad_by_freq, self.sparse = bool(scale_grad_by_freq), bool(sparse)
        weight: Any = like.weight
        self.place({"weight": weight}, {"weight": self._placement(weights, like.weight.shape)})

    @cached_property
    def _frequencies(self) -> _Frequencies | None:
        return _Frequencies(self) if self.scale_grad_by_freq and self.P_x.active else None

    def _placement(self, weights: str, shape: torch.Size) -> Placement:
        if weights == "replicated":
            return Placement.everywhere(self.machine, shape)
        root = self.P_x.create_partition_inclusive([0])
        return Placement(Decomposition.replicated(root, shape), Decomposition.replicated(self.P_x, shape))

    def plan(self, facts: dict[int, InputFacts]) -> CallPlan:
        """The vectors are where their indices are, and go to P_y if it was given."""
        source, dtype = source_of(self.P_x, facts)
        if dtype not in _INDICES:
            raise ShapeError(f"indices are {dtype}, wanted one of {_INDICES}")
        kinds = {fact.weights for rank, fact in facts.items() if rank in self.P_x}
        if len(kinds) != 1 or None in kinds:
            raise ShapeError(f"the ranks' weights differ in type: {kinds}")
        own = Decomposition(
            self._vectors,
            (*source.splits, Balanced(self.embedding_dim, 1)),
            tuple(range(self._vectors.dim)),
        )
        scatter = None
        if self._moves:
            outputs = Decomposition.balanced(self.P_y, own.shape)
            scatter = movement_or_none(self.site, own, outputs, kinds.pop(), "vectors")  # type: ignore[arg-type]
        return CallPlan(None, scatter)

    def trouble(self, x: torch.Tensor) -> str:
        """Indices that are out of range."""
        if x.dtype not in _INDICES or not x.numel():
            return ""
        least, most = (int(end) for end in torch.aminmax(x))
        if least >= 0 and most < self.num_embeddings:
            return ""
        wrong = least if least < 0 else most
        return f"index {wrong} is out of range of {self.num_embeddings} embeddings"

    def compute(self, flow: CallPlan, x: torch.Tensor, **weights: torch.Tensor) -> torch.Tensor:
        """Vectors of this rank's indices."""
        y = F.embedding(x, weights["weight"], self.padding_idx)
        return y if self._frequencies is None else self._frequencies.scale(y, x)

    def extra_repr(self) -> str:
        """One line for ``print(model)``."""
        return (
            f"{self.num_embeddings}, {self.embedding_dim}, padding_idx={self.padding_idx},"
            f" scale_grad_by_freq={self.scale_grad_by_freq}, P_x={self.P_x.shape}, P_y={self.P_y.shape}"
        )


def _check(
    kind: str, P_x: Partition, P_y: Partition | None, max_norm: float | None, sparse: bool, weights: str
) -> None:
    if P_y is not None and P_y.dim != P_x.dim + 1:
        raise PartitionError(
            f"{kind}: P_y has {P_y.dim} dimensions {P_y.shape}, the output has {P_x.dim + 1}: those of P_x"
            f" {P_x.shape} and that of the vectors"
        )
    if max_norm is not None:
        raise UnsupportedError(
            f"{kind}: max_norm={max_norm} is not supported: it changes weights in a forward"
        )
    if sparse:
        raise UnsupportedError(f"{kind}: sparse gradients are not supported")
    if weights not in _WEIGHTS:
        raise ShapeError(f"{kind}: weights is one of {_WEIGHTS}, got {weights!r}")


class _Frequencies:
    # How often each index occurs on all ranks of P_x: what scale_grad_by_freq divides by.
    def __init__(self, layer: DistributedEmbedding) -> None:
        name, count = f"{layer.name} (frequencies)", layer.num_embeddings
        self._sum = Allreduce(layer.machine.segments, layer.P_x.ranks, count, np.float64, name=name)
        weakref.finalize(self, self._sum.close)

    def scale(self, y: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        counts = self._sum.active
        counts[:] = np.bincount(x.detach().flatten().numpy(), minlength=len(counts))
        self._sum.start()
        total = torch.from_numpy(self._sum.wait().copy())
        scaled: torch.Tensor = _Scale.apply(y, total[x.to(torch.int64)].unsqueeze(-1))  # type: ignore[no-untyped-call]
        return scaled


class _Scale(torch.autograd.Function):
    # Identity whose backward divides: by how often the index of each vector occurs.
    @staticmethod
    def forward(ctx: Any, y: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(counts)
        return y.view_as(y)

    @staticmethod
    @first_derivative
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[Any, ...]:
        (counts,) = ctx.saved_tensors
        return gradient / counts.to(gradient.dtype), None
