"""A rank's shard of a global tensor, whatever that is."""

import numpy as np
import pytest
import torch

from distdl_rma import Partition, PartitionError
from distdl_rma.geometry import Box, Decomposition
from distdl_rma.split.shard import block_of as shard

RANKS, GRID = (3, 5, 2, 7, 4, 6), (2, 1, 3)


def shards(x):
    """Those of all ranks of a grid, in order."""
    return [shard(Partition(RANKS, GRID, rank), x) for rank in RANKS]


def joined(parts, shape):
    """What the shards are parts of."""
    blocks = Decomposition.balanced(Partition(RANKS, GRID, RANKS[0]), shape)
    whole = torch.empty(shape, dtype=parts[0].dtype)
    for rank, part in zip(RANKS, parts, strict=True):
        whole[blocks.box(rank).slices(Box.of_shape(shape))] = part
    return whole


class Dataset:
    """What can be sliced and no more, as a dataset in a file; remembers how much was read."""

    def __init__(self, values):
        self.shape, self.dtype, self._values, self.read = values.shape, values.dtype, values, 0

    def __getitem__(self, place):
        part = self._values[place]
        self.read += part.size
        return part


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64, torch.bool, torch.complex64])
def test_shards_of_a_tensor_are_its_parts(dtype):
    x = (10 * torch.randn(5, 2, 7)).to(dtype)
    parts = shards(x)
    assert {part.dtype for part in parts} == {dtype}
    assert torch.equal(joined(parts, x.shape), x)


@pytest.mark.parametrize("dtype", [np.float32, np.float64, np.uint8, np.int16, np.bool_, np.uint16, ">f4"])
def test_shards_of_an_array_are_its_parts(dtype):
    x = (10 * np.random.default_rng(0).random((5, 2, 7))).astype(dtype)
    parts = shards(x)
    native = x.astype(x.dtype.newbyteorder("="))
    assert {part.dtype for part in parts} == {torch.from_numpy(native).dtype}
    assert np.array_equal(joined(parts, x.shape).numpy(), native)


def test_only_the_shard_is_read():
    x = Dataset(np.arange(70.0).reshape(5, 2, 7))
    part = shard(Partition(RANKS, GRID, 2), x)
    assert x.read == part.numel() < 70
    outside = shard(Partition(RANKS, GRID, 1), x)
    assert x.read == part.numel() and outside.shape == (5, 0)


def test_a_memory_mapped_file_may_be_read_only(tmp_path):
    np.arange(70, dtype=np.float32).reshape(5, 2, 7).tofile(tmp_path / "x")
    x = np.memmap(tmp_path / "x", np.float32, "r", shape=(5, 2, 7))
    parts = shards(x)
    assert np.array_equal(joined(parts, x.shape).numpy(), x)
    parts[0].zero_()


@pytest.mark.parametrize("make", [torch.arange, np.arange])
def test_a_shard_has_memory_of_its_own(make):
    x = make(8).reshape(8, 1, 1)
    parts = shards(x)
    assert all(part.is_contiguous() for part in parts)
    for part in parts:
        part += 1
    assert x.reshape(-1).tolist() == list(range(8))
    assert parts[0].untyped_storage().nbytes() == parts[0].nbytes


def test_a_shard_is_in_no_graph():
    x = torch.rand(4, 1, 3, requires_grad=True)
    assert not any(part.requires_grad for part in shards(x * 2))


@pytest.mark.parametrize("make", [torch.zeros, np.zeros])
@pytest.mark.parametrize("shape", [(5, 2, 7), (0, 2, 7)])
def test_ranks_outside_have_no_elements(make, shape):
    part = shard(Partition(RANKS, GRID, 0), make(shape))
    assert part.shape == (shape[0], 0)
    assert part.dtype == torch.as_tensor(make(shape)).dtype


def test_dimensions_must_be_those_of_the_partition():
    for rank in (3, 0):
        with pytest.raises(PartitionError):
            shard(Partition(RANKS, GRID, rank), torch.zeros(4, 4))
