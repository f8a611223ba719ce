"""What linear layers hold of their weight."""

import pytest
import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from distdl_rma.layers import DistributedLinearAllGather, DistributedLinearReduceScatter

pytestmark = pytest.mark.mpi
KINDS = [DistributedLinearAllGather, DistributedLinearReduceScatter]
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
    # Of tensors on the device ``meta`` there is none.
    tensors = [leaf for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor)]
    return [leaf.untyped_storage() for leaf in tensors if not leaf.is_meta]


@pytest.mark.parametrize("kind", KINDS)
def test_construction_never_holds_more_than_what_is_kept(P_world, comm, kind):
    P = P_world.create_cartesian_topology_partition((1, comm.size))
    with LiveMemory() as memory:
        layer = kind(P, FEATURES, FEATURES, dtype=torch.float64)
    assert layer.get_sizeof_gradients() <= memory.now
    # What is drawn at a time has 65536 elements.
    assert memory.peak <= WHOLE / comm.size + 8 * 65536 + 2 * 8 * FEATURES


@pytest.mark.parametrize("kind", KINDS)
def test_ranks_keep_their_block_and_no_more(P_world, comm, kind):
    for grid in ((comm.size, 1), (1, comm.size)):
        P = P_world.create_cartesian_topology_partition(grid)
        layer = kind(P, 24, 36, bias=False)
        assert layer.weight.numel() * grid[1] == 24 * 36
        copies = grid[0]
        assert layer.get_ranks_synch_weights() == (list(range(copies)) if copies > 1 else [])
        assert layer.get_sizeof_gradients() == 4 * layer.weight.numel()
        # The documented storage: on the first set of workers.
        root = kind(P, 24, 36, weights="root")
        first = comm.rank < grid[1]
        assert root.weight.numel() == layer.weight.numel() * first
        assert (root.bias.numel() > 0) <= first and root.get_ranks_synch_weights() == []
