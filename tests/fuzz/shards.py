"""Global tensors and their shards on a grid, all in one process and by plain torch."""

from __future__ import annotations

import torch


def assemble(P, shards):
    """Global tensor of the shards on a grid."""

    def along(d, prefix):
        if d == P.dim:
            return shards[P.rank_at(prefix)]
        return torch.cat([along(d + 1, (*prefix, i)) for i in range(P.shape[d])], dim=d)

    return along(0, ())


def cut(P, whole, lengths=None):
    """Shards of a global tensor: of the given lengths, or as torch splits evenly."""
    shards = {}
    for rank in P.ranks:
        part = whole
        for d, i in enumerate(P.index_of(rank)):
            part = part.tensor_split(P.shape[d], d)[i] if lengths is None else part.split(lengths[d], d)[i]
        shards[rank] = part
    return shards


def padded(x, dim, left, right, mode, value):
    """Tensor padded in one dimension, by its definition."""
    n = x.shape[dim]
    index = torch.arange(-left, n + right)
    if mode in ("zeros", "constant"):
        shape = list(x.shape)
        ends = []
        for width in (left, right):
            shape[dim] = width
            ends.append(x.new_full(shape, value if mode == "constant" else 0))
        return torch.cat([ends[0], x, ends[1]], dim)
    if mode == "circular":
        index = index % n
    elif mode == "replicate":
        index = index.clamp(0, n - 1)
    else:
        index = index.abs()
        index = torch.where(index >= n, 2 * (n - 1) - index, index)
    return x.index_select(dim, index)
