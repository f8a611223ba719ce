"""The state of a model as one machine would have it: initialised, saved, loaded, moved between partitions."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import nn

from distdl_rma.errors import PartitionError, ShapeError
from distdl_rma.geometry.decomposition import Decomposition
from distdl_rma.layers.core.layer import DistributedLayer
from distdl_rma.layers.core.placement import as_whole
from distdl_rma.ops.set_up_transfer import gather_whole


def gather_state_dict(module: nn.Module, rank: int | None = None) -> dict[str, Any]:
    """State of a model with the keys and global shapes of its sequential twin.

    Collective over the machine of the model's layers, blocking. Tensors travel in passes: the segment of a
    rank holds at most a MiB of what comes in, and of what is staged for other nodes.

    Parameters
    ----------
    module
        A distributed layer, or a model with some. What its plain layers hold counts as the same on all
        ranks.
    rank
        Rank id that gets the state, the others get an empty one; None for all ranks.

    Returns
    -------
    dict
        Tensors in memory of their own: what ``load_state_dict`` of the sequential model, ``torch.save`` or
        :func:`load_global_state_dict` of the same model on other partitions takes.

    Raises
    ------
    PartitionError
        If the layers belong to different machines, or ``rank`` to none of theirs.

    Notes
    -----
    Requirements C, and the weight partitions of the layer documents.
    """
    held = module.state_dict().items()
    state = {key: value.detach().clone() if isinstance(value, torch.Tensor) else value for key, value in held}
    scattered = _scattered(module)
    if not scattered and rank is None:
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
    for key, blocks in sorted(scattered.items()):
        state[key] = gather_whole(machine, blocks.one_copy(), takers, state[key], f"state of {key!r}")
    return state if takers.active else {}


def load_global_state_dict(module: nn.Module, state: Mapping[str, Any], strict: bool = True) -> Any:
    """Load the state of the sequential model into a distributed one: each rank takes its part.

    Local: every rank passes the same global state, with the keys and global shapes of the sequential model.
    As ``torch.nn.Module.load_state_dict``, and returns what that does. ``ShapeError`` if a tensor does not
    have the global shape; nothing is loaded then.
    """
    mine = dict(state)
    for key, blocks in _scattered(module).items():
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

    For functions such as ``torch.nn.init.kaiming_normal_`` that draw as many random numbers as there are
    elements, and look at the shape. Within it every rank calls the same of them, so that equally seeded
    generators stay equal, and each draws the numbers of the sequential model; afterwards it keeps its part.
    ``model.apply(function)`` needs no context: it opens one for each layer in turn.

    Elements that other ranks keep are zero at first. Nothing may be computed with the model meanwhile, whose
    parameters take the memory of the whole ones.
    """
    with ExitStack() as stack:
        for _, layer in _layers(module):
            stack.enter_context(as_whole(layer, layer.scattered))
        yield


def _layers(module: nn.Module) -> Iterator[tuple[str, DistributedLayer]]:
    for name, layer in module.named_modules(remove_duplicate=False):
        if isinstance(layer, DistributedLayer):
            yield f"{name}." if name else "", layer


def _scattered(module: nn.Module) -> dict[str, Decomposition]:
    # Who keeps which part, of everything in the state that is not whole on every rank.
    layers = _layers(module)
    return {prefix + key: blocks for prefix, layer in layers for key, blocks in layer.scattered.items()}
