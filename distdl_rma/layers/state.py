"""The state of a model with global shapes: initialise, save, load, and move to other partitions."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import nn

from distdl_rma.errors import PartitionError, ShapeError
from distdl_rma.geometry.decomposition import Decomposition
from distdl_rma.layers.ops.set_up_transfer import gather_whole
from distdl_rma.layers.partitioned.core.layer import DistributedLayer
from distdl_rma.layers.partitioned.core.placement import as_whole
from distdl_rma.layers.split.tensor import SplitTensor


def gather_state_dict(module: nn.Module, rank: int | None = None) -> dict[str, Any]:
    """State of a model with the keys and global shapes of its sequential twin.

    Collective over the machine of the model's layers, blocking. Tensors travel in passes: the segment of a
    rank holds at most one MiB of incoming data, and of data staged for other nodes.

    Parameters
    ----------
    module
        A distributed layer, or a model with some. Its plain layers count as equal on all ranks.
    rank
        Rank id that gets the state, while the others get an empty one; None for all ranks.

    Returns
    -------
    dict
        Tensors in new memory, for ``load_state_dict`` of the sequential model, ``torch.save``, or
        :func:`load_global_state_dict` of the same model on other partitions.

    Raises
    ------
    PartitionError
        If the layers belong to different machines, or ``rank`` is not a rank of their machine.

    Notes
    -----
    Requirements C, and the weight partitions of the layer documents.

    Examples
    --------
    >>> from distdl_rma.layers import DistributedLinear
    >>> P_world = MPIPartition(MPI.COMM_WORLD)
    >>> P_x, P_W = (P_world.create_cartesian_topology_partition(s) for s in ((1, 2), (2, 1)))
    >>> layer = DistributedLinear(P_x, P_x, P_W, in_features=6, out_features=8)
    >>> layer.weight.shape, gather_state_dict(layer)["weight"].shape
    (torch.Size([4, 6]), torch.Size([8, 6]))
    """
    held = module.state_dict().items()
    # A buffer is split where a layer of this library was called with a split tensor and no model around it.
    wholes = ((key, x.full_tensor() if isinstance(x, SplitTensor) else x) for key, x in held)
    state = {key: x.detach().clone() if isinstance(x, torch.Tensor) else x for key, x in wholes}
    cuts = scattered(module)
    if not cuts and rank is None:
        return state
    machines = {id(layer.machine): layer.machine for _, layer in _layers(module)}
    if len(machines) != 1:
        raise PartitionError(f"the layers of the model belong to {len(machines)} machines instead of one")
    (machine,) = machines.values()
    takers = machine.partition()
    if rank is not None:
        if rank not in machine.ranks:
            raise PartitionError(f"rank {rank} is none of the ranks {machine.ranks} of the model's machine")
        takers = takers.create_partition_inclusive([machine.ranks.index(rank)])
    for key, blocks in sorted(cuts.items()):
        state[key] = gather_whole(machine, blocks.one_copy(), takers, state[key], f"state of {key!r}")
    return state if takers.active else {}


def load_global_state_dict(module: nn.Module, state: Mapping[str, Any], strict: bool = True) -> Any:
    """Load the state of the sequential model into a distributed one: each rank takes its part.

    Local: every rank passes the same global state, with the keys and global shapes of the sequential model.
    ``strict`` and the result are those of ``torch.nn.Module.load_state_dict``. ``ShapeError`` if a tensor
    does not have the global shape; nothing is loaded then.

    Examples
    --------
    >>> from distdl_rma.layers import DistributedLinear
    >>> P_world = MPIPartition(MPI.COMM_WORLD)
    >>> P_x, P_W = (P_world.create_cartesian_topology_partition(s) for s in ((1, 2), (2, 1)))
    >>> layer = DistributedLinear(P_x, P_x, P_W, in_features=6, out_features=8)
    >>> load_global_state_dict(layer, nn.Linear(6, 8).state_dict())
    <All keys matched successfully>
    """
    mine = dict(state)
    for key, blocks in scattered(module).items():
        whole = mine.get(key)
        if whole is None:
            continue
        if tuple(whole.shape) != blocks.shape:
            shape = tuple(whole.shape)
            raise ShapeError(f"{key!r} has shape {shape}, the model's global shape is {blocks.shape}")
        mine[key] = whole[blocks.slices()] if blocks.partition.active else whole.new_empty(0)
    return module.load_state_dict(mine, strict=strict)


@contextmanager
def whole_parameters(module: nn.Module) -> Iterator[None]:
    """Context in which parameters have their global shape on every rank, to initialise them; local.

    For functions such as ``torch.nn.init.kaiming_normal_`` that depend on the shape and draw a random number
    for each element. Every rank calls the same functions. So equally seeded generators stay equal, and each
    rank draws the numbers of the sequential model and afterwards keeps its part. ``model.apply(function)``
    needs no context: it opens one for each layer in turn.

    Elements that other ranks keep are zero at first. Within the context, parameters need the memory of the
    whole tensors, and the model must not compute.

    Examples
    --------
    >>> from distdl_rma.layers import DistributedLinear
    >>> P_world = MPIPartition(MPI.COMM_WORLD)
    >>> P_x, P_W = (P_world.create_cartesian_topology_partition(s) for s in ((1, 2), (2, 1)))
    >>> layer = DistributedLinear(P_x, P_x, P_W, in_features=6, out_features=8)
    >>> with whole_parameters(layer):
    ...     nn.init.eye_(layer.weight).shape
    torch.Size([8, 6])
    >>> layer.weight.shape
    torch.Size([4, 6])
    """
    with ExitStack() as stack:
        for _, layer in _layers(module):
            stack.enter_context(as_whole(layer, layer.scattered))
        yield


def _layers(module: nn.Module) -> Iterator[tuple[str, DistributedLayer]]:
    for name, layer in module.named_modules(remove_duplicate=False):
        if isinstance(layer, DistributedLayer):
            yield f"{name}." if name else "", layer


def scattered(module: nn.Module) -> dict[str, Decomposition]:
    """Decompositions of the tensors of a model's state that are not whole on every rank, by key; local."""
    layers = _layers(module)
    return {prefix + key: blocks for prefix, layer in layers for key, blocks in layer.scattered.items()}
