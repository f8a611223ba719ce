"""Batches of split tensors: the same samples in the same order on any number of ranks, read ahead.

The order of an epoch with ``batch=2, replicas=2``: a step takes the next four places, two for each group of
ranks, and each rank reads its block of both::

    place          0   1   2   3     4   5   6   7     8   9
    sample         5   2   9   0     7   3   1   8     6   4        permutation(seed, epoch), or as they come
    replica        0   0   1   1     0   0   1   1     0   1        the last step has one for each
    position                   4                 8         10       what state_dict() says behind each step

A position counts samples in this order and nothing else: not steps, ranks or replicas. So a job goes on with
other numbers of all these, and sees each sample once.

The thread reads ahead, copies what it has read to the device if there is one, and does no more. Whether all
ranks have read is compared in the loop itself: a thread that meets other ranks would do so at any moment,
between the messages of a layer.
"""

from __future__ import annotations

import weakref
from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, closing
from functools import partial
from typing import Any

import numpy as np
import torch

from distdl_rma.errors import (
    ConfigurationError,
    DistdlError,
    MismatchError,
    PartitionError,
    check_integers,
    told,
)
from distdl_rma.geometry.partition import Partition
from distdl_rma.jobs.data.dataset import Block, ShardDataset
from distdl_rma.jobs.data.draws import permutation
from distdl_rma.jobs.data.read_ahead import results_ahead
from distdl_rma.layers.split import SplitTensor
from distdl_rma.layers.split import layout as lay
from distdl_rma.layers.split.entry import grid_for
from distdl_rma.layers.staging import Ascent
from distdl_rma.segments.consensus import gather_words, together
from distdl_rma.segments.machine import Machine

# Keys of draws begin with their purpose.
_SHUFFLE = 1
# Blocks of a batch, and their copy to the device.
Read = tuple[list[Block], Ascent | None]


class ShardLoader:
    """Batches of a :class:`ShardDataset` as split tensors, for a split model; each rank reads its blocks.

    A batch is the image alone, or a tuple with the labels: split tensors, and plain tensors for labels that
    every rank has whole. Creating the loader and each step of a loop over it are collective over the machine,
    and blocking. In each step the ranks compare whether all have read their blocks. If one has not, all ranks
    raise the same error, and the machine stays usable.

    A step takes ``batch`` samples for each replica, one after the other in the order of the epoch. The last
    step has fewer samples if ``drop_last`` is false, but as many for each replica, so that the mean over
    replicas is one over samples: fewer than ``replicas`` samples are left out at the end of an epoch.

    Parameters
    ----------
    dataset
        Alike on all ranks.
    batch
        Samples of a step for each replica.
    replicas
        Number of groups of ranks that each have samples of their own. The ranks of the machine are dealt in
        order; or the dataset of each rank has as grid the partition of its group.
    shuffle
        Whether each epoch has another order, which follows from the seed of the dataset and the epoch.
    drop_last
        Whether to leave out a last step with fewer samples.
    prefetch
        Batches that a thread of this rank reads ahead; each needs the memory of its blocks. 0: none, a batch
        is read when the loop asks for it.
    device
        Where this rank's tensors of a batch are, also those of labels. On CUDA the thread copies them from
        pinned memory in a stream of its own, while the step before computes. All ranks have the same type.

    Raises
    ------
    ConfigurationError, PartitionError, ShapeError, DataError
        On all ranks: if an argument is invalid or differs between ranks, the replicas do not fit the ranks,
        or on some rank a file or its shape is wrong.

    Warns
    -----
    UserWarning
        As :func:`shard`, if blocks of whole images cut chunks.

    Notes
    -----
    The loop restarts its epoch each time, except for the first one after ``load_state_dict``. Each loop that
    comes to its end goes to the next epoch. The thread ends with the loop, also if that ends by ``break`` or
    an exception, when its iterator is dropped, or at ``close``.

    Examples
    --------
    >>> images, classes = torch.rand(10, 3, 8, 8), torch.arange(10)
    >>> loader = ShardLoader(ShardDataset(images, classes, grid={"H": -1}), batch=4, shuffle=True)
    >>> for x, labels in loader:
    ...     print(x.shape, x.to_local().shape, labels.shape)
    torch.Size([4, 3, 8, 8]) torch.Size([4, 3, 4, 8]) torch.Size([4])
    torch.Size([4, 3, 8, 8]) torch.Size([4, 3, 4, 8]) torch.Size([4])
    torch.Size([2, 3, 8, 8]) torch.Size([2, 3, 4, 8]) torch.Size([2])
    """

    def __init__(
        self,
        dataset: ShardDataset,
        batch: int = 1,
        *,
        replicas: int = 1,
        shuffle: bool = False,
        drop_last: bool = False,
        prefetch: int = 1,
        device: torch.device | str = "cpu",
    ) -> None:
        machine = getattr(dataset, "machine", None)
        if not isinstance(machine, Machine):
            raise ConfigurationError(
                f"ShardLoader: takes a ShardDataset whose grid is on the ranks of a machine, got {dataset!r}"
            )
        self.dataset, self.machine = dataset, Machine.of(machine)
        self.epoch, self.replica = 0, 0
        self._batch, self._replicas, self._prefetch = batch, replicas, prefetch
        self._shuffle, self._drop_last = bool(shuffle), bool(drop_last)
        self._given_device, self.device = device, torch.device("cpu")
        # Where the loop goes on, in samples of all replicas, and where the next loop begins.
        self._samples = self._start = 0
        self._loop: weakref.ref[Generator[Any, None, None]] | None = None
        self.partition, self._groups = self._agree()
        self.replica = self._groups.index(self.partition.ranks)
        if self.replica == 0:
            dataset.warn_of_chunks(self.partition, stacklevel=2)

    def _agree(self) -> tuple[Partition, list[tuple[int, ...]]]:
        # The ranks of this replica on their grid, and those of each. All ranks raise if one has a problem.
        # First what each rank can check alone, then whether the groups share the ranks out: a user may have
        # built the partition of each group, and may have built them differently on two ranks.
        alike = "arguments and samples are alike on all ranks"
        with self._together(ConfigurationError, alike) as facts:
            some = {"batch": self._batch, "replicas": self._replicas}
            check_integers("ShardLoader", 1, ConfigurationError, **some)
            check_integers("ShardLoader", 0, ConfigurationError, prefetch=self._prefetch)
            with told(ConfigurationError, f"ShardLoader: no device {self._given_device} on this rank"):
                # With its number: in the thread another one is current.
                self.device = torch.empty(0, device=self._given_device).device
            if self.device.type == "meta":
                raise ConfigurationError("ShardLoader: a batch on the device meta would have no elements")
            own = self._own_partition()
            facts["type of the device"] = self.device.type
            facts |= {**some, "shuffle": self._shuffle, "drop_last": self._drop_last}
            facts |= self.dataset.facts(own)
            if not len(self):
                raise ConfigurationError(
                    f"ShardLoader: {len(self.dataset)} samples are too few for a step of {self._replicas} x"
                    f" {self._batch}, or for one of each replica"
                )
        every = gather_words(self.machine.segments, [own.ranks, own.shape], "ShardLoader (grids)")
        grids = dict.fromkeys((tuple(ranks), tuple(shape)) for ranks, shape in every.values())
        groups = [ranks for ranks, _ in grids]
        dealt = sorted(rank for ranks in groups for rank in ranks)
        if (len(groups), dealt, len({shape for _, shape in grids})) != (self._replicas, sorted(every), 1):
            raise PartitionError(
                f"ShardLoader: replicas={self._replicas} are as many partitions of one shape, which have each"
                f" of the ranks {tuple(every)} once; got ranks {groups}"
            )
        return own, groups

    def _together(self, differs: type[DistdlError], advice: str) -> AbstractContextManager[dict[str, Any]]:
        machine = self.machine
        return together(machine, machine.ranks, "ShardLoader", differs=differs, advice=advice)

    def _own_partition(self) -> Partition:
        grid, machine = self.dataset.grid, self.machine
        if isinstance(grid, Partition):
            if not grid.active:
                raise PartitionError(f"ShardLoader: rank {machine.rank} is not in its grid {grid}")
            return grid_for(grid, machine, self.dataset.dims)
        size, rest = divmod(machine.size, self._replicas)
        if rest:
            raise PartitionError(
                f"ShardLoader: {machine.size} ranks cannot be dealt to {self._replicas} replicas of one size"
            )
        first = machine.ranks.index(machine.rank) // size * size
        return grid_for(grid, machine, self.dataset.dims, machine.ranks[first : first + size])

    def __len__(self) -> int:
        """Steps of an epoch."""
        return sum(1 for _ in self._steps(0))

    def _steps(self, start: int) -> Iterator[tuple[int, range]]:
        # Of each step the place in the order where the next one begins, and the places of this replica. The
        # last step is as long on all replicas, or the mean over them would count some samples more than
        # others.
        together, count = self._batch * self._replicas, len(self.dataset)
        for first in range(start, count, together):
            each = min(together, count - first) // self._replicas
            if each == 0 or (self._drop_last and each < self._batch):
                return
            own = first + each * self.replica
            yield first + each * self._replicas, range(own, own + each)

    def __iter__(self) -> Iterator[Any]:
        """Batches from the loaded position, or from the beginning of the epoch; the loop before it ends."""
        self.close()
        self._samples, self._start = self._start, 0
        loop = self._batches(self.epoch, self._samples)
        # Not referenced from here, so that it is closed when the user drops it.
        self._loop = weakref.ref(loop)
        return loop

    def _batches(self, epoch: int, start: int) -> Generator[Any, None, None]:
        count, seed = len(self.dataset), self.dataset.seed
        order = permutation(count, _SHUFFLE, seed, epoch) if self._shuffle else np.arange(count)
        reads = (
            partial(self._read, epoch, order[places.start : places.stop].tolist())
            for _, places in self._steps(start)
        )
        with closing(results_ahead(reads, self._prefetch, "ShardLoader")) as read:
            for end, _ in self._steps(start):
                # No variable keeps a batch while the next one is read.
                ready = [self._agreed(epoch, end, read)]
                self._samples = end
                yield ready.pop()
        self.epoch, self._samples = epoch + 1, 0

    def _read(self, epoch: int, items: Sequence[int]) -> Read:
        # This rank's blocks of a batch, and their copy to the device; in the thread, if there is one.
        blocks = self.dataset.batch(epoch, items, self.partition)
        on_host = self.device.type == "cpu"
        return blocks, None if on_host else Ascent([block.local for block in blocks], self.device)

    def _agreed(self, epoch: int, end: int, read: Iterator[Read]) -> Any:
        # A batch that all ranks have read; else an error on all ranks. The ranks also compare where they are:
        # one that has left its loop early, or has another file under the same name, would train on a mixture.
        same = "have all ranks the same files, epoch and position?"
        with self._together(MismatchError, same) as facts:
            blocks, ascent = next(read)
            facts["epoch and end of the step, in samples"] = [epoch, end]
            # Batches of other replicas may have other shapes.
            which = f"a batch of replica {self.replica}"
            shapes = [(x.layout or x.local).shape for x in blocks]
            kinds = [str(x.local.dtype) for x in blocks]
            facts[f"dtypes and shapes of {which}"] = [kinds, shapes]
        here = [x.local for x in blocks] if ascent is None else ascent.wait()
        tensors = tuple(
            x if block.layout is None else SplitTensor(x, lay.normal(block.layout))
            for x, block in zip(here, blocks, strict=True)
        )
        return tensors if len(tensors) > 1 else tensors[0]

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch of the next loop; local, alike on all ranks.

        Another epoch begins at its first sample; the present one keeps a loaded position.
        """
        if epoch != self.epoch:
            self.epoch, self._samples, self._start = int(epoch), 0, 0

    def state_dict(self) -> dict[str, int]:
        """The position behind the last batch that the loop has got; local, the same on all ranks.

        Batches that are read ahead do not count. ``epoch``, and ``samples`` of this epoch that all replicas
        together have had; ``seed``, ``of``, the number of items, and ``shuffle`` say which order is meant.
        """
        return {"epoch": self.epoch, "samples": self._samples, **self._order}

    @property
    def _order(self) -> dict[str, int]:
        # What the order of an epoch follows from: a position in another order is none in this one.
        return {"seed": self.dataset.seed, "of": len(self.dataset), "shuffle": self._shuffle}

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        """Go on at a position, also of a loader on other ranks or with other replicas; local, on all ranks.

        The next loop begins there. ``ConfigurationError`` if the position is that of other samples or another
        order.
        """
        wanted, known = self._order, self.state_dict()
        fits = state.keys() == known.keys() and wanted.items() <= state.items()
        if not fits or state["epoch"] < 0 or not 0 <= state["samples"] <= len(self.dataset):
            raise ConfigurationError(
                f"ShardLoader: a position has {', '.join(known)}, and for this dataset {wanted}, got"
                f" {dict(state)}: was it saved with another dataset or seed?"
            )
        self.close()
        self.epoch, self._samples = int(state["epoch"]), int(state["samples"])
        self._start = self._samples

    def close(self) -> None:
        """End the present loop and its thread; local, idempotent. Waits for a read that is under way."""
        loop = None if self._loop is None else self._loop()
        if loop is not None:
            loop.close()
