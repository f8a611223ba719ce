"""One forward of a model on virtual ranks of this process, of which each reads and writes its own block.

Every rank runs the whole model on its slab, as a rank of a job would. Two ranks, and a model with two
convolutions and a norm between them, which needs a mean over all slabs::

    rank 0   read | conv | norm ......wait...... | conv | write             -> time
    rank 1               : read | conv | norm           :      | conv | write
                         :             |                :
                         begins, since rank 0           rank 0 goes on when rank 1 has
                         waits for it                   shown its part of the mean

A rank begins when the one before has ended, or as soon as somebody waits for it. Without a norm nobody waits,
and the slabs follow each other: only the messages for later ranks stay of one that has ended.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from itertools import chain
from math import prod
from typing import Any, cast

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from distdl_rma.errors import ArgumentError, ConfigurationError, UnsupportedError, told
from distdl_rma.geometry.decomposition import Decomposition
from distdl_rma.geometry.intervals import Split
from distdl_rma.jobs.out_of_core.pages import Pages
from distdl_rma.layers.model.entering import ModuleHook
from distdl_rma.layers.ops.core.allocator import freed_at_once
from distdl_rma.layers.sources.reading import Slices
from distdl_rma.layers.split import layout as lay
from distdl_rma.layers.split.calls import site
from distdl_rma.layers.split.tensor import SplitTensor
from distdl_rma.layers.sync.registry import not_on_one_device
from distdl_rma.segments.machine import Machine
from distdl_rma.segments.mailbox import Mailbox
from distdl_rma.segments.virtual_ranks.comm import VirtualComm
from distdl_rma.segments.virtual_ranks.rehearse import played

Post = Callable[[Any], Any] | None
# Attributes of a module that hold its parameters, buffers and parts.
_OF_MODULES = frozenset({"_parameters", "_buffers", "_modules"})
# Of the waits of a virtual rank: the others may compute for days.
_NO_DEADLINE_SECONDS = 1e9
# Segments have statistics of norms and the like. Only what is touched is memory.
_SEGMENT_NBYTES, _SEGMENTS_NBYTES, _SMALLEST_SEGMENT_NBYTES = 32 << 20, 1 << 28, 4 << 20


def fixed_tensors(model: nn.Module) -> dict[str, torch.Tensor]:
    """Parameters, buffers and other tensors that are attributes of modules, by path: all ranks share them."""
    found = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    for path, module in model.named_modules():
        for name, value in vars(module).items():
            for at, x in enumerate(() if name in _OF_MODULES else tree_leaves(value)):
                if isinstance(x, torch.Tensor) and type(x) is not SplitTensor and x.layout is torch.strided:
                    found[f"{path}.{name}[{at}]" if at else f"{path}.{name}".lstrip(".")] = x
    return found


def check_model(model: object) -> None:
    """Raise ``ConfigurationError`` if a model cannot run on virtual ranks."""
    if not isinstance(model, nn.Module):
        raise ConfigurationError(
            f"predict: takes a torch.nn.Module, no function, got {type(model).__name__!r}"
        )
    for path, part in model.named_modules():
        if "distributed" in vars(part):
            raise ConfigurationError(
                f"predict: the model{f', in {path!r},' if path else ''} is distributed; call"
                " model.distributed.close() first: predict splits it itself"
            )
        if type(part).__module__.startswith("distdl_rma.layers."):
            raise ConfigurationError(
                f"predict: {path!r} is a {type(part).__name__} with ranks of its own; pass a model of plain"
                " torch.nn layers"
            )
    if found := not_on_one_device(model):
        raise ConfigurationError(f"predict: {found}")


def device_of(model: nn.Module) -> torch.device:
    """Where a model computes."""
    return next((x.device for x in chain(model.parameters(), model.buffers())), torch.device("cpu"))


def fits_device(device: torch.device, shape: Sequence[int]) -> AbstractContextManager[object]:
    """Context in which a full device is a ``ConfigurationError``, for a slab of this shape."""
    what = f"predict: {device} has no memory left for a slab of {tuple(shape)}"
    advice = "free some there, or choose smaller slabs by less memory= or more blocks in grid="
    return told(ConfigurationError, what, advice, torch.OutOfMemoryError)


def twin_of(model: nn.Module) -> nn.Module:
    """A copy in ``eval()`` whose tensors have the same memory.

    They need no gradients: autocast would keep its copies of parameters that do, for later slabs, while the
    memory of the slab that has made them goes to the disk.
    """
    same = {id(x): x for x in fixed_tensors(model).values()}
    for key, x in same.items():
        if x.requires_grad and x.is_leaf:
            plain = x.detach()
            same[key] = nn.Parameter(plain, requires_grad=False) if isinstance(x, nn.Parameter) else plain
    return copy.deepcopy(model, same).eval()


@dataclass(frozen=True)
class Forward:
    """What is computed of an input (batch, channels, *spatial) of a type: by ``model``, then by ``post``."""

    model: nn.Module
    post: Post
    dtype: torch.dtype

    def result(self, y: Any) -> torch.Tensor:
        """The result, of what the model gives; ``ArgumentError`` if it is no tensor."""
        y = y if self.post is None else self.post(y)
        if isinstance(y, torch.Tensor):
            return y
        raise ArgumentError(
            f"predict: the result is a {type(y).__name__!r}, and one tensor is written; choose it by post=,"
            " such as post=lambda y: y[0]"
        )


class Inference:
    """A ``forward`` of a global input (batch, channels, *spatial).

    ``splits`` are the blocks of the input in each dimension, one block for each virtual rank. Subclasses say
    where blocks come from (``read``), where those of the result go (``write``), and which ranks this process
    plays.

    Always true while it runs: ranks begin in their order, those before ``mailbox.first`` not at all, since
    they have ended in an earlier process; of those that have begun, one computes and the others wait for
    messages. A rank of another process counts as begun when its turn has come, whether it has begun there or
    not.
    """

    def __init__(self, forward: Forward, splits: Sequence[Split]) -> None:
        self.forward, self.splits, self.device = forward, splits, device_of(forward.model)
        self.count = prod(split.parts for split in splits)

    def read(self, box: Slices) -> torch.Tensor:
        """The block of a box of the input, in new memory."""
        raise NotImplementedError

    def write(self, rank: int, box: Slices, block: torch.Tensor) -> None:
        """Take over a block of the result."""

    def layout_of_result(self, layout: Decomposition) -> Decomposition:
        """The layout in which the result is written, of blocks that end as in a layout or before."""
        return layout

    def ended(self, rank: int, y: torch.Tensor) -> None:
        """Note that a rank has written its block of the result ``y``."""

    def plays(self, rank: int) -> bool:
        """Whether this process runs a rank; another one does otherwise."""
        return True

    def play(self, pages: Pages, mailbox: Mailbox, freed_above: int = 1 << 19) -> None:
        """Run all ranks, one at a time, in their order as far as possible; blocking.

        What waiting ranks need is in ``pages``; the ``mailbox`` has the messages of earlier processes. Memory
        of tensors of more than ``freed_above`` bytes goes back to the system when they die.
        """
        self._pages, self._mailbox = pages, mailbox
        # Ranks that have begun, and those of this process that have begun and not ended.
        self._begun, self._running, self._failed = mailbox.first, 0, False
        with freed_at_once(freed_above), pages.watching(mailbox):
            found = fixed_tensors(self.forward.model).items()
            # Tensors of the model, and how often they had been changed in place.
            self._tensors = {name: (x, x._version) for name, x in found if not x.is_inference()}
            played(self.count, self._rank, None, keeper=pages)

    def _rank(self, comm: VirtualComm) -> None:
        size = max(_SMALLEST_SEGMENT_NBYTES, min(_SEGMENT_NBYTES, _SEGMENTS_NBYTES // comm.size))
        machine = Machine(cast(Any, comm), segment_size=size, timeout=_NO_DEADLINE_SECONDS)
        # From here on operations know that ranks run in their order.
        machine.mailbox = self._mailbox
        if comm.rank < self._mailbox.first:
            return
        if not self.plays(comm.rank):
            comm.wait_until(lambda: self._may_begin(comm.rank), "its first turn")
            self._begun += 1
            # A rank that leaves before those which wait for its messages has failed, for these.
            comm.wait_until(self._is_over, "the slabs of this process")
            return
        grid = machine.partition([split.parts for split in self.splits])
        layout = lay.layout(grid, self.splits, tuple(range(grid.dim)))
        comm.wait_until(lambda: self._may_begin(comm.rank), "its first turn")
        # Raises if the rank before has failed.
        machine.segments.waiter.advance()
        machine.segments.notices.check()
        self._begun += 1
        self._running += 1
        try:
            twin, box = self._hooked(), layout.slices()
            shape = [each.stop - each.start for each in box]
            with self._pages.running(comm.rank), torch.no_grad(), fits_device(self.device, shape):
                y = twin(SplitTensor(self.read(box).to(self.device), layout))
                y = self.forward.result(y)
                self._check_unchanged()
                del twin
                self._write(machine.rank, y)
        except BaseException:
            self._failed = True
            raise
        finally:
            self._running -= 1
        self.ended(comm.rank, y)
        del y
        # The others need its messages only: what its calls keep would be the memory of all slabs.
        for forget in machine.forgets:
            forget()

    def _may_begin(self, rank: int) -> bool:
        # Slabs of this process follow each other, unless some rank, also of another process, waits for one.
        # After a failure all raise what it says.
        self._mailbox.poll()
        free = self._running == 0 or rank <= self._mailbox.wanted or not self.plays(rank)
        return self._failed or (self._begun == rank and free)

    def _is_over(self) -> bool:
        # Whether all slabs of this process have ended, or one has failed.
        self._mailbox.poll()
        return self._failed or (self._begun == self.count and self._running == 0)

    def _check_unchanged(self) -> None:
        # What a slab changes, the next one would change again.
        for path, (x, version) in self._tensors.items():
            if x._version != version:
                raise UnsupportedError(
                    f"predict: the model changes its tensor {path!r} in place, and would do so once for each"
                    " slab; let its forward make a new tensor in eval()"
                )

    def _hooked(self) -> nn.Module:
        # A copy of the model whose modules are named in messages, and tell places of the program apart.
        twin = twin_of(self.forward.model)
        for path, module in [*twin.named_modules()]:
            hook = ModuleHook(path, moves=True, elsewhere=False)
            module.register_forward_pre_hook(hook, prepend=True)
            module.register_forward_hook(site.pop_module, always_call=True)
        return twin

    def _write(self, rank: int, y: torch.Tensor) -> None:
        if not isinstance(y, SplitTensor):
            if rank == self._mailbox.first:
                self.write(rank, tuple(slice(0, n) for n in y.shape), y.detach().cpu())
            return
        if (layout := self.layout_of_result(y.decomposition)) != y.decomposition:
            y = y.redistribute(layout=layout)
        layout = y.decomposition
        if rank in layout.one_copy().partition and not layout.box(rank).empty:
            self.write(rank, layout.slices(), y.to_local().cpu())
