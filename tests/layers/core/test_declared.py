"""Sizes of tensors that are announced before the first call."""

import torch

from distdl_rma import Partition
from distdl_rma.geometry import Decomposition
from distdl_rma.layers.core.layer import DeclaredTensors, placeholder_shard


def blocks(me, shape, ranks=(0, 1, 2)):
    return Decomposition.balanced(Partition(ranks, (1, len(ranks)), me), shape)


def test_bytes_are_those_of_the_shards():
    for me in range(4):
        declared = DeclaredTensors(
            (blocks(me, (2, 7)), blocks(me, (2, 5), (2, 3))), blocks(me, (2, 4)), torch.float64
        )
        before = {0: 3, 1: 2, 2: 2 + 3, 3: 2}[me]
        after = {0: 2, 1: 1, 2: 1, 3: 0}[me]
        assert declared.nbytes(me) == (8 * 2 * before, 8 * 2 * after)
        assert declared.shapes == ((2, 7), (2, 5))


def test_a_placeholder_looks_like_the_shard_and_takes_no_memory():
    for me, shape in {0: (2, 3), 1: (2, 2), 2: (2, 2), 3: (0,)}.items():
        x = placeholder_shard(blocks(me, (2, 7)), torch.bfloat16)
        assert (x.shape, x.dtype) == (shape, torch.bfloat16)
        assert x.untyped_storage().nbytes() == 2
