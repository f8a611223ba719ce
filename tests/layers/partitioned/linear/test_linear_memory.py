"""What linear layers hold of their weight, and when."""

import gc

import pytest
import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from distdl_rma.layers import (
    DistributedLinearAllGather,
    DistributedLinearAllGatherZero,
    DistributedLinearReduceScatter,
    DistributedLinearReduceScatterZero,
)
from tests.layers.partitioned.sequential import agree, shard

pytestmark = pytest.mark.mpi
ZERO = [DistributedLinearAllGatherZero, DistributedLinearReduceScatterZero]
KINDS = [DistributedLinearAllGather, DistributedLinearReduceScatter, *ZERO]
FEATURES = 768
WHOLE = 8 * FEATURES * FEATURES


class LiveMemory(TorchDispatchMode):
    """Counts the storages that operations make, backward included, for as long as anything refers to them.

    Every operation passes here, with its result; a result that is no view of an argument is new memory, and a
    weak reference to its storage says whether it is still alive. Not seen: what was there before, memory that
    an operation takes and frees inside of itself, and the segment, which is no memory of torch.
    """

    def __init__(self):
        super().__init__()
        self._alive = {}
        self.peak = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        given = {storage._cdata for storage in storages((args, kwargs))}
        for storage in storages(result):
            if storage._cdata not in given:
                self._alive[storage._cdata] = StorageWeakRef(storage), storage.nbytes()
        self._alive = {key: entry for key, entry in self._alive.items() if not entry[0].expired()}
        self.peak = max(self.peak, self.now)
        return result

    @property
    def now(self):
        """Bytes that are alive."""
        return sum(nbytes for reference, nbytes in self._alive.values() if not reference.expired())


def storages(tree):
    return [leaf.untyped_storage() for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor)]


@pytest.mark.parametrize("kind", KINDS)
def test_construction_never_holds_more_than_what_is_kept(P_world, comm, kind):
    grid = (comm.size, 1) if kind in ZERO else (1, comm.size)
    P = P_world.create_cartesian_topology_partition(grid)
    with LiveMemory() as memory:
        layer = kind(P, FEATURES, FEATURES, dtype=torch.float64)
    assert layer.get_sizeof_gradients() <= memory.now
    # What is drawn at a time has 65536 elements.
    assert memory.peak <= WHOLE / comm.size + 8 * 65536 + 2 * 8 * FEATURES


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("kind", ZERO)
def test_whole_weight_exists_only_while_it_is_used(P_world, comm, kind):
    P = P_world.create_cartesian_topology_partition((comm.size, 1))
    torch.manual_seed(1)
    layers = nn.Sequential(*(kind(P, FEATURES, FEATURES, bias=False, dtype=torch.float64) for _ in range(4)))
    torch.manual_seed(1)
    sequential = nn.Sequential(*(nn.Linear(FEATURES, FEATURES, False, dtype=torch.float64) for _ in range(4)))
    layers.load_state_dict(
        {
            key: value[layer.layouts["weight"].slices()]
            for (key, value), layer in zip(sequential.state_dict().items(), layers, strict=True)
        }
    )
    x = torch.randn(comm.size, FEATURES, dtype=torch.float64)
    local = shard(P, x).requires_grad_()
    # Activations, and what is a stripe at a time.
    slack = 40 * 8 * FEATURES + 3 * (1 << 19)
    kept = 4 * WHOLE / comm.size
    with LiveMemory() as memory:
        out = layers(local)
        assert memory.peak <= WHOLE + slack, "one whole weight at a time"
        assert memory.now <= slack, "and none after the forward"
        memory.peak = 0
        out.square().sum().backward()
        assert memory.peak <= WHOLE + kept + slack, "one whole weight or gradient at a time"
        gc.collect()
        assert memory.now <= kept + slack, "shards of the gradients remain"
    sequential(x).square().sum().backward()
    for layer, twin in zip(layers, sequential, strict=True):
        part = layer.layouts["weight"].slices()
        agree(layer.weight.grad, twin.weight.grad[part], "weight gradient")


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("kind", ZERO)
def test_staging_memory_does_not_grow_with_the_weight(P_world, comm, kind):
    P = P_world.create_cartesian_topology_partition((comm.size, 1))
    staged = []
    for features in (512, 1024):
        layer = kind(P, features, features, bias=False, dtype=torch.float64)
        layer(torch.randn(1, features, dtype=torch.float64, requires_grad=True)).sum().backward()
        staged.append(layer.nbytes_staged)
    assert 0 < staged[1] <= 4 * (1 << 19) * (comm.size - 1) / comm.size + (1 << 14)
    assert staged[1] <= staged[0] + (1 << 14)


@pytest.mark.parametrize("kind", KINDS)
def test_ranks_keep_their_block_and_no_more(P_world, comm, kind):
    for grid in ((comm.size, 1), (1, comm.size)):
        P = P_world.create_cartesian_topology_partition(grid)
        layer = kind(P, 24, 36, bias=False)
        cut = comm.size if kind in ZERO else grid[1]
        assert layer.weight.numel() * cut == 24 * 36
        copies = grid[0] if kind not in ZERO else 1
        assert layer.get_ranks_synch_weights() == (list(range(copies)) if copies > 1 else [])
        assert layer.get_sizeof_gradients() == 4 * layer.weight.numel()
        if kind not in ZERO:
            # The documented storage: on the first set of workers.
            root = kind(P, 24, 36, weights="root")
            first = comm.rank < grid[1]
            assert root.weight.numel() == layer.weight.numel() * first
            assert (root.bias.numel() > 0) <= first and root.get_ranks_synch_weights() == []
