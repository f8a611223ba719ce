"""Distributed embedding: indices are split over ranks, the table is whole on each.

A lookup reads a row per index, wherever that lies in the table. So a table in parts would send every index to
its part and every vector back, in each forward. Here the forward moves nothing; the backward sums the
gradients of the table, which are dense::

    rank 0    indices 5 2 7    table    vectors t5 t2 t7    gradient of rows 2, 5 and 7   ─┐
    rank 1    indices 2 2 0    table    vectors t2 t2 t0    gradient of rows 0 and 2      ─┴─  sum

``sparse``, ``max_norm`` and ``scale_grad_by_freq`` are refused: sums of sparse gradients have other rows on
each rank, ``max_norm`` changes the table in a forward, on each rank by its own indices, and
``scale_grad_by_freq`` divides by how often an index occurs on all ranks.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from distdl_rma.errors import ShapeError, UnsupportedError
from distdl_rma.geometry.decomposition import Decomposition
from distdl_rma.geometry.intervals import Balanced
from distdl_rma.geometry.partition import Partition, alike
from distdl_rma.layers.ops.core.tensors import problem_with
from distdl_rma.layers.ops.embedding import INDICES, Embedding
from distdl_rma.layers.partitioned.core.arguments import (
    PlacedOptions,
    by_name,
    check_device,
    check_dims,
    placed_options,
    torchs_layer,
)
from distdl_rma.layers.partitioned.core.input_facts import InputFacts, source_of
from distdl_rma.layers.partitioned.core.operator_layer import OperatorLayer
from distdl_rma.layers.partitioned.core.placement import whole_placement

_OF_ALL = "it depends on what all ranks look up"
_REFUSED = {"max_norm": _OF_ALL, "scale_grad_by_freq": _OF_ALL, "sparse": "gradients are dense"}


class DistributedEmbedding(OperatorLayer[Embedding], nn.Embedding):
    """Embedding of indices that are split over ranks, in any dimensions.

    Local input: the shard of this rank. Local output: one vector per index of the shard, in an additional
    last dimension; or the balanced shard on P_y. Every rank looks up its own indices, so that without P_y the
    forward moves no data, except weights that are placed ``"root"``.

    Parameters
    ----------
    P_x
        Partition of the input, with as many dimensions as the tensor of indices.
    num_embeddings, embedding_dim, padding_idx, max_norm, norm_type, scale_grad_by_freq, sparse
        As in torch; ``max_norm`` must be None, ``scale_grad_by_freq`` and ``sparse`` False.
    _weight, _freeze, device, dtype
        As in torch.
    P_y
        Partition of the output, with one dimension more than P_x; if None, the output is cut as the input.
    placement
        ``"replicated"``, or ``"root"``: on the first rank of P_x. Also called ``weights``.

    Raises
    ------
    ShapeError
        In a call: also if the indices are not ``int64`` or ``int32``, or one is out of range.
    UnsupportedError
        If ``max_norm``, ``scale_grad_by_freq`` or ``sparse`` is asked for, or another device than the CPU.

    Notes
    -----
    Requirement B11.

    Examples
    --------
    >>> P_world = MPIPartition(MPI.COMM_WORLD)
    >>> P_x = P_world.create_cartesian_topology_partition((1, P_world.size))  # cuts the tokens
    >>> embed = DistributedEmbedding(P_x, num_embeddings=100, embedding_dim=32)
    >>> embed(shard(P_x, torch.randint(100, (2, 10)))).shape
    torch.Size([2, 10, 32])
    """

    _allowed = ("replicated", "root")
    _by_name = ("P_y", *PlacedOptions.__annotations__)
    _shown = ("num_embeddings", "embedding_dim", "padding_idx")

    def __init__(self, P_x: Partition, *arguments: Any, P_y: Partition | None = None, **options: Any) -> None:
        kind = type(self).__name__
        own, placement = placed_options(type(self), self._allowed, options)
        given = by_name(type(self), *arguments, **options)
        for key, reason in _REFUSED.items():
            value = given.get(key)
            if value is not None and value is not False:
                raise UnsupportedError(f"{kind}: {key}={value} is not supported: {reason}")
        check_dims(type(self), (P_x.dim + 1,), P_y=P_y)
        weight = given.get("_weight")
        check_device(kind, None if weight is None else weight.device)
        nothing = [torch.zeros(0, dtype=torch.int64)]
        like = torchs_layer(type(self), **given, sample=nothing)
        self._vectors = P_x.create_cartesian_topology_partition((*P_x.shape, 1))
        super().__init__(P_x, self._vectors if P_y is None else P_y, **own)
        self.take_over(like)
        self.placement, self.weights = placement, placement
        place = whole_placement(self.machine, P_x, P_x, like.weight.shape, placement)
        self.place({"weight": like.weight}, lambda _key: place)

    def plan(self, facts: dict[int, InputFacts]) -> Embedding:
        """Operation whose vectors are cut as their indices, or are on P_y if given."""
        source, dtype = source_of(self.P_x, facts)
        # In the order of ranks, so that all of them say the same.
        kinds = {rank: fact.weights for rank, fact in sorted(facts.items()) if rank in self.P_x}
        kind: Any = alike(kinds, "the ranks' weights differ in type: rank {} has {} but rank {} {}")
        if dtype not in INDICES:
            raise ShapeError(f"indices are {dtype}, wanted one of {INDICES}")
        splits = *source.splits, Balanced(self.embedding_dim, 1)
        own = Decomposition(self._vectors, splits, tuple(range(len(splits))))
        output = own if self.P_y is self._vectors else Decomposition.balanced(self.P_y, own.shape)
        return Embedding(self.site, own, output, kind, self.padding_idx)

    def input_problem(self, x: torch.Tensor) -> str:
        """Error text if an index is out of range.

        Values are no facts, and torch would raise on this rank alone, in the middle of the call.
        """
        if problem_with(x) or x.dtype not in INDICES or not x.numel():
            return ""
        least, most = torch.stack(torch.aminmax(x)).tolist()
        if least >= 0 and most < self.num_embeddings:
            return ""
        wrong = least if least < 0 else most
        return f"index {wrong} is out of range of {self.num_embeddings} embeddings"
