"""How much memory torch's tensors hold at most while something runs."""

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


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
