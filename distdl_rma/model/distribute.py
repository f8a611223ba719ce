"""A model that nobody rewrote, on split tensors: its inputs are cut, its gradients summed."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any, TypeVar

import torch
from torch import nn

from distdl_rma.errors import ConfigurationError, PartitionError
from distdl_rma.geometry.partition import Partition
from distdl_rma.machine import Machine
from distdl_rma.ops.core.autograd import uncompiled
from distdl_rma.split import site
from distdl_rma.split.entry import alike_on_all_ranks, grid_for
from distdl_rma.split.shard import Grid, shard
from distdl_rma.split.tensor import SplitTensor, mapped, tensors_in
from distdl_rma.sync.gradients import GradientSync

M = TypeVar("M", bound=nn.Module)
_KEY = "distributed"


class Distributed:
    """What ``distribute`` did to a model: how its inputs are cut, and who sums its gradients.

    The model has it as ``model.distributed``, local to ask. ``sync`` is its ``GradientSync``.
    """

    def __init__(
        self, model: nn.Module, machine: Machine, grid: Grid, fallback: str, sync: GradientSync
    ) -> None:
        self.machine, self.grid, self.fallback, self.sync = machine, grid, fallback, sync
        self._model = weakref.ref(model)
        self._seen: set[object] = set()
        self._handles = [
            model.register_forward_pre_hook(self._cut_inputs, prepend=True, with_kwargs=True),
        ]
        for path, module in model.named_modules():
            self._handles += [
                module.register_forward_pre_hook(_Enter(path, fallback == "move"), prepend=True),
                module.register_forward_hook(_leave, always_call=True),
            ]

    def partition(self, dims: int) -> Partition:
        """The grid for tensors of so many dimensions."""
        return grid_for(self.grid, self.machine, dims)

    def no_sync(self) -> AbstractContextManager[None]:
        """Context in which backward only accumulates; as :meth:`GradientSync.no_sync`."""
        return self.sync.no_sync()

    def close(self) -> None:
        """Make the model what it was, on plain tensors; local, idempotent."""
        for handle in self._handles:
            handle.remove()
        self._handles = []
        self.sync.close()
        model = self._model()
        if model is not None:
            vars(model).pop(_KEY, None)

    @uncompiled
    def _cut_inputs(self, _model: nn.Module, args: Any, kwargs: Any) -> Any:
        given = tensors_in(args, kwargs)
        if any(isinstance(x, SplitTensor) for x in given):
            return None
        whole = [x for x in given if self._is_cut(x)]
        # Blocks taken for whole tensors would be wrong in silence: the ranks compare them, once for each
        # kind.
        kind = tuple((x.shape, x.dtype) for x in whole)
        if kind not in self._seen:
            alike_on_all_ranks(self.machine, whole, "an input of a distributed model")
            self._seen.add(kind)

        return self.cut(args), self.cut(kwargs)

    def cut(self, arguments: Any) -> Any:
        """Arguments with whole tensors cut as the grid says; local."""

        def changed(x: torch.Tensor) -> torch.Tensor:
            return shard(self.partition(x.dim()), x) if self._is_cut(x) else x

        return mapped(changed, arguments)

    def _is_cut(self, x: torch.Tensor) -> bool:
        if isinstance(self.grid, Partition):
            return x.dim() == self.grid.dim
        return x.dim() in _IMAGES


_IMAGES = (3, 4, 5)  # dimensions of batches of signals, images and volumes


class _Enter:
    # Calls from here on are those of the module of a path.
    def __init__(self, path: str, moves: bool) -> None:
        self.path, self.moves = path or "model", moves

    def __call__(self, _module: nn.Module, _args: Any) -> None:
        site.enter(self.path, self.moves)


def _leave(_module: nn.Module, _args: Any, _output: Any) -> None:
    site.leave()


def distribute(
    model: M,
    grid: Grid,
    *,
    reduction: str = "sum",
    replicas: int | None = None,
    bucket_nbytes: int = 1 << 20,
    fallback: str = "move",
) -> M:
    """Make a model compute on split tensors: the same object, parameters and state dict, exact or refused.

    Its calls take :class:`SplitTensor`; plain tensors with the dimensions of the grid are taken as whole,
    alike on all ranks, and are cut. What it returns is split, or replicated where nothing is left to cut; a
    loss is written as for one machine. After ``backward()`` every ``.grad`` is that of the model alone, on
    every rank. Collective over the machine; parameters and buffers become those of its first rank.

    Parameters
    ----------
    model
        Any module; layers of this library may be in it.
    grid
        A partition of all ranks of its machine; or for the ranks of COMM_WORLD the numbers of blocks, as
        ``"2x2"`` for the last dimensions of an input or ``{"H": 2, "W": 2}``.
    reduction, replicas, bucket_nbytes
        Of :class:`GradientSync`.
    fallback
        ``"move"``: where a function cannot act on the layout of its inputs, these move, by the rules of
        ``docs/split-functions.md``. ``"error"``: that is refused with ``UnsupportedError``.

    Raises
    ------
    ConfigurationError
        On all ranks: if the model is distributed already, or an option is unknown; and as ``GradientSync``.
    """
    if fallback not in ("move", "error"):
        raise ConfigurationError(f"distribute: fallback is 'move' or 'error', got {fallback!r}")
    if _KEY in vars(model):
        raise ConfigurationError(
            "distribute: this model is distributed already; model.distributed.close() first"
        )
    machine = Machine.of(grid) if isinstance(grid, Partition) else Machine.on()
    if isinstance(grid, Partition) and replicas is None and set(grid.ranks) != set(machine.ranks):
        raise PartitionError(
            f"distribute: {grid} has not all ranks of its machine {machine.ranks}; the gradients are summed"
            f" over these."
            " Say replicas= if the others have other samples"
        )
    # Those that look at a model see that it is one that computes on split tensors.
    vars(model)[_KEY] = None
    try:
        sync = GradientSync(
            model, machine, reduction=reduction, replicas=replicas, bucket_nbytes=bucket_nbytes
        )
    except BaseException:
        del vars(model)[_KEY]
        raise
    vars(model)[_KEY] = Distributed(model, machine, grid, fallback, sync)
    return model


@contextmanager
def no_sync(model: nn.Module) -> Iterator[None]:
    """Context in which backward of a distributed model only accumulates this rank's contributions."""
    with vars(model)[_KEY].no_sync():
        yield
