"""Blocks of files against what a user would write by hand: reading, memory, writing.

``DATA_BENCH_MIB=256`` makes the file smaller than 2 GiB. Reading is warm: the file is in the page cache.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import torch
import zarr

from benchmarks.disk import disk_alone
from benchmarks.measure import COMM, Row, compare, summary
from benchmarks.memory import status_kib
from distdl_rma import Machine, ShardDataset, ShardLoader, create_array, shard, write_shards
from distdl_rma.layers.split.tensor import SplitTensor

MIB = int(os.environ.get("DATA_BENCH_MIB", "2048"))
SIDE = 1024
# A call takes seconds.
REPETITIONS = 11


def rows(machine: Machine) -> Iterator[Row]:
    """Read, memory of reading, read ahead, write."""
    folder = Path(COMM.bcast(tempfile.mkdtemp(prefix="data-bench-", dir=os.environ.get("TMPDIR"))))
    try:
        yield from _rows(machine, folder)
    finally:
        COMM.Barrier()
        if COMM.rank == 0:
            shutil.rmtree(folder)


def _rows(machine: Machine, folder: Path) -> Iterator[Row]:
    # Each rank has whole planes.
    planes = MIB * (1 << 20) // (4 * SIDE * SIDE) // COMM.size * COMM.size
    grid = machine.partition((COMM.size, 1, 1))
    y = shard(grid, np.broadcast_to(np.float32(0), (planes, SIDE, SIDE)))
    y.to_local().copy_(torch.arange(y.to_local().numel()).remainder_(251).view_as(y.to_local()))
    for name in ("x.npy", "x.h5", "x.zarr"):
        with create_array(folder / name, y.shape, like=y) as sink:
            write_shards(sink, y)
    own, size = y.decomposition.slices(), f"{MIB} MiB"

    def by_hand(opened: Callable[[], Any]) -> Callable[[], object]:
        return lambda: np.array(opened()[own])

    plain = {
        "x.npy": lambda: np.load(folder / "x.npy", mmap_mode="r"),
        "x.h5": lambda: h5py.File(folder / "x.h5")["data"],
        "x.zarr": lambda: zarr.open_array(str(folder / "x.zarr"), mode="r"),
    }
    kinds = {"x.npy": "memory map", "x.h5": "contiguous HDF5", "x.zarr": "aligned Zarr"}
    for name, opened in plain.items():
        path = folder / name
        # np.array of what h5py and zarr return would copy once more.
        baseline = by_hand(opened) if name == "x.npy" else _sliced(opened, own)
        yield compare(
            f"shard of {size}, {kinds[name]}",
            lambda path=path: shard(grid, path),  # type: ignore[misc]
            baseline,
            against="each rank slices its part",
            target=1.05,
            repetitions=REPETITIONS,
        )
        yield _memory(f"peak memory of shard, {kinds[name]}", lambda path=path: shard(grid, path))  # type: ignore[misc]
    yield _ahead(folder / "x.npy")
    whole = np.load(folder / "x.npy") if COMM.rank == 0 else None
    against, mine = "np.save and fsync by one process", y.to_local().numpy()

    def save() -> None:
        _save(folder / "plain.npy", whole)

    yield disk_alone(f"write {size} in shards", folder, mine, save, against=against, repetitions=REPETITIONS)
    for name in ("x.npy", "x.h5"):
        yield compare(
            f"write {size} in shards, {name.partition('.')[2]}",
            lambda name=name: _write(folder / f"new-{name}", y),  # type: ignore[misc]
            save,
            against=against,
            target=0.7,
            repetitions=REPETITIONS,
        )


def _ahead(path: Path) -> Row:
    # Planes as images. On warm files with a core for each rank, a thread can only win what a read waits.
    dataset = ShardDataset(path, grid=(COMM.size, 1), channels=False)
    weight = torch.ones(1, 1, 3, 3)

    def epoch(prefetch: int) -> None:
        for x in ShardLoader(dataset, 8, shuffle=True, prefetch=prefetch):
            torch.nn.functional.conv2d(x.to_local(), weight)

    return compare(
        f"an epoch of {MIB} MiB with two batches read ahead, memory map",
        lambda: epoch(2),
        lambda: epoch(0),
        against="reading in the loop",
        target=1.0,
        repetitions=REPETITIONS,
    )


def _sliced(opened: Callable[[], Any], own: tuple[slice, ...]) -> Callable[[], object]:
    return lambda: opened()[own]


def _memory(what: str, read: Callable[[], SplitTensor]) -> Row:
    samples, block = [], 0.0
    for _ in range(5):
        Path("/proc/self/clear_refs").write_text("5")
        before = status_kib("VmRSS")
        found = read()
        samples.append((status_kib("VmHWM") - before) / 1024)
        block = found.to_local().nbytes / (1 << 20)
        del found
    worst = [max(each) for each in zip(*COMM.allgather(samples), strict=True)]
    return Row(what, "a block", *summary(worst), block, 0.0, 1.3, "MiB")


def _write(path: Path, y: SplitTensor) -> None:
    with create_array(path, y.shape, like=y) as sink:
        write_shards(sink, y)
    if COMM.rank == 0:
        path.unlink()
    # The next file has the same name.
    COMM.Barrier()


def _save(path: Path, whole: np.ndarray[Any, Any] | None) -> None:
    if whole is not None:
        with path.open("wb") as file:
            np.save(file, whole)
            file.flush()
            os.fsync(file.fileno())
        path.unlink()
