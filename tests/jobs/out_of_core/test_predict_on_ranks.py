"""Prediction by several processes: each plays some of the slabs, and the result is that of one."""

import time
from itertools import accumulate

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812

from distdl_rma import (
    ArgumentError,
    ConfigurationError,
    DataError,
    Machine,
    MismatchError,
    PeerFailedError,
    ShapeError,
    Sink,
    Source,
    plan_prediction,
    predict,
)
from distdl_rma.jobs.data.sinks import ArraySink
from distdl_rma.jobs.out_of_core.results import Results
from tests.fuzz import predictions as fuzz
from tests.jobs.out_of_core.nets import Calls, UNet, seeded, whole
from tests.layers.sources import formats
from tests.matrix import check_each, over_seeds

# A prediction itself runs virtual ranks.
pytestmark = [pytest.mark.mpi, pytest.mark.processes, pytest.mark.sizes(1, 2, 3)]

FUNCTIONS = {
    "adaptive_avg_pool2d": lambda x: F.adaptive_avg_pool2d(x, 1) * x,
    "amax": lambda x: x.amax(2, keepdim=True) + x,
    "argmax": lambda x: x.argmax(2),
    "attention": lambda x: x.flatten(2).transpose(1, 2) @ x.flatten(2)[:, :, :64],
    "cumsum": lambda x: x.cumsum(2),
    "fft2": lambda x: torch.fft.fft2(x).abs(),
    "flip": lambda x: x.flip(2),
    "index": lambda x: x[:, :, torch.arange(0, 50, 3)],
    "interpolate": lambda x: F.interpolate(x, scale_factor=2, mode="bilinear"),
    "layer_norm": lambda x: F.layer_norm(x, x.shape[1:]),
    "pad": lambda x: F.pad(x, (0, 0, 3, 5)),
    "roll": lambda x: x.roll(3, 2),
    "slice": lambda x: x[:, :, 10:40],
    "softmax": lambda x: x.softmax(2),
    "sort": lambda x: x.sort(2).values,
    "std": lambda x: x / x.std(),
    "sum": lambda x: x.sum((1, 2, 3), keepdim=True),
    "transpose": lambda x: x.transpose(2, 3),
}


WRITER = {"h5": "h5py", "npy": "numpy", "zarr": "zarr"}


def close(path, model, x):
    """Compare a file with what the model makes of an image, or of several with their channels."""
    found, x = torch.from_numpy(formats.whole(path)), torch.as_tensor(x)
    want = whole(model, x) if x.dim() == 4 else whole(model, x[None, None])[0]
    torch.testing.assert_close(found, want, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", FUNCTIONS)
def test_functions_of_all_slabs(comm, name):
    model, x = seeded(lambda: Calls(FUNCTIONS[name])), torch.rand(1, 1, 50, 20)
    found = predict(model, x, grid={"H": 4}, comm=comm)
    torch.testing.assert_close(found, whole(model, x), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("seen", ["by all", "by the first alone"])
@pytest.mark.parametrize("slabs", [7, 2])
@pytest.mark.parametrize("suffix", ["npy", "h5", "zarr"])
def test_each_process_writes_its_slabs_and_no_two_of_them_one_chunk(
    comm, folder, suffix, slabs, seen, monkeypatch
):
    pytest.importorskip(WRITER[suffix])
    path, chunks, rows = f"y.{suffix}", set(), []
    model, x = seeded(lambda: UNet(2, "instance" if slabs == 7 else "none")), torch.rand(110, 30)
    write = ArraySink.__setitem__

    def noted(sink, box, values):
        write(sink, box, values)
        first, last = box[1].start, box[1].stop
        size = sink.chunks[1] if sink.chunks else 1
        chunks.update(range(first // size, -(-last // size)))
        rows.extend(range(first, last))

    monkeypatch.setattr(ArraySink, "__setitem__", noted)
    if seen != "by all":
        monkeypatch.setattr(Results, "seen", lambda self: [comm.rank])
    assert predict(model, x, folder / path, grid={"H": slabs}, comm=comm) is None
    comm.Barrier()
    close(folder / path, model, x)
    assert [each.name for each in folder.iterdir()] == [path]
    of_all = comm.allgather(chunks)
    assert sorted(row for each in comm.allgather(rows) for row in each) == [*range(110)]
    assert sum(map(len, of_all)) == len(set.union(*of_all))
    if slabs == 7:
        assert all(of_all) if seen == "by all" else not any(of_all[1:])


@pytest.mark.parametrize("suffix", ["npy", "zarr"])
def test_a_result_that_was_complete_when_its_process_was_killed_is_taken_up(
    comm, folder, suffix, monkeypatch
):
    model, x = seeded(lambda: UNet(2, "none")), torch.ones(40, 30)
    path = folder / f"y.{suffix}"
    with monkeypatch.context() as killed:
        # Before it could remove the folder of the progress.
        killed.setattr("distdl_rma.jobs.out_of_core.results.shutil.rmtree", lambda *_, **__: None)
        predict(model, x, path, grid={"H": 3}, comm=comm)
    comm.Barrier()
    assert path.with_name(f"{path.name}.progress").exists()
    comm.Barrier()
    predict(model, x, path, grid={"H": 3}, comm=comm)
    comm.Barrier()
    assert [each.name for each in folder.iterdir()] == [path.name]


@pytest.mark.parametrize(("suffix", "what"), [("npy", "read"), ("npy", "write"), ("zarr", "write")])
def test_a_read_or_write_that_fails_on_one_rank_is_an_error_on_all_and_a_later_call_goes_on(
    comm, folder, suffix, what, monkeypatch
):
    pytest.importorskip(WRITER[suffix])
    model, x, path = seeded(lambda: UNet(2, "none")), torch.rand(160, 20), folder / f"y.{suffix}"
    failing, write = {what} if comm.rank == comm.size - 1 else set(), ArraySink.__setitem__

    def read(box):
        if "read" in failing and box[0].start > 60:
            raise OSError("this disk is broken")
        return x[box]

    def full(sink, box, values):
        if "write" in failing and box[1].start > 60:
            raise OSError(28, "No space left on device")
        write(sink, box, values)

    monkeypatch.setattr(ArraySink, "__setitem__", full)
    source = Source(x.shape, x.dtype, read)
    with pytest.raises(DataError, match="broken" if what == "read" else "No space left"):
        predict(model, source, path, grid={"H": 9}, comm=comm)
    assert not path.exists()
    failing.clear()
    predict(model, source, path, grid={"H": 9}, comm=comm)
    comm.Barrier()
    close(path, model, x)
    assert [each.name for each in folder.iterdir()] == [path.name]


@pytest.mark.parametrize("norm", ["none", "instance"])
def test_a_wait_for_another_process_may_be_long(comm, norm):
    model, x = seeded(lambda: UNet(2, norm)), np.random.default_rng(0).random((48, 16), np.float32)

    def read(box):
        if comm.rank == comm.size - 1 and box[0].start > 0:
            # Longer than it takes until ranks that have left count as failed.
            time.sleep(1.5)
        return x[box]

    found = predict(model, Source(x.shape, x.dtype, read), grid={"H": 4}, comm=comm)
    torch.testing.assert_close(found, whole(model, torch.from_numpy(x)[None, None])[0], rtol=1e-4, atol=1e-5)


@over_seeds(60, each=10)
def test_random_models_on_ranks_that_are_late(P_world, comm, seeds):
    check_each(fuzz.check, P_world, comm, seeds)


@pytest.mark.parametrize(("suffix", "norm"), [("npy", "batch"), ("zarr", "batch"), ("npy", "instance")])
def test_a_job_that_goes_on_reads_only_what_is_left(comm, folder, suffix, norm):
    pytest.importorskip(WRITER[suffix])
    model = seeded(lambda: UNet(2, norm))
    x, reads = np.random.default_rng(0).random((2, 1, 96, 20), np.float32), []
    path, grid = folder / f"y.{suffix}", {"H": 16}
    # The last slabs have results only.
    *starts, end = sorted({0, *accumulate(plan_prediction(model, x, grid=grid).splits[2].lengths)})
    assert end == 96 and len(starts) > 10
    last = len(starts) - 1
    failing = last - 2

    def read(box):
        slab = box[0].start, starts.index(box[2].start)
        if slab == (1, failing) and slab not in fixed:
            raise OSError("the network is gone")
        reads.append(slab)
        return x[box]

    source, fixed = Source(x.shape, x.dtype, read), set()
    with pytest.raises(DataError, match="the network is gone"):
        predict(model, source, path, grid=grid, comm=comm)
    fixed.add((1, failing))
    reads.clear()
    predict(model, source, path, grid=grid, comm=comm)
    again = sorted(slab for each in comm.allgather(reads) for slab in each)
    # On other ranks, slabs before the one that failed may have been under way; of several passes all are.
    least = failing - 2 * (comm.size - 1) if norm == "batch" else 0
    assert again[-3:] == [(1, failing), (1, last - 1), (1, last)]
    assert again[0] >= (1, least) and len(set(again)) == len(again)
    close(path, model, x)


@pytest.mark.parametrize("norm", ["none", "instance"])
def test_the_bar_ends_at_its_end_also_of_a_job_that_goes_on(comm, folder, norm, monkeypatch):
    rich = pytest.importorskip("rich.progress")
    model = seeded(lambda: UNet(2, norm))
    x, reads, bars = np.random.default_rng(0).random((2, 1, 96, 20), np.float32), [], []
    advance = rich.Progress.advance

    def noted(bar, task, passes):
        advance(bar, task, passes)
        bars.append((bar.tasks[0].completed, bar.tasks[0].total))

    def read(box):
        reads.append(box)
        if box[0].start == 1 and len(reads) < 8 // comm.size + 3:
            raise OSError("the network is gone")
        return x[box]

    monkeypatch.setattr(rich.Progress, "advance", noted)
    source, path = Source(x.shape, x.dtype, read), folder / "y.npy"
    plan = plan_prediction(model, x, grid={"H": 8})
    with pytest.raises(DataError, match="the network is gone"):
        predict(model, source, path, grid={"H": 8}, comm=comm, progress=True)
    first = len(bars)
    while not path.exists():
        comm.Barrier()
        try:
            predict(model, source, path, grid={"H": 8}, comm=comm, progress=True)
        except DataError:
            assert not path.exists()
        comm.Barrier()
    total = 2 * plan.slabs * plan.passes
    if comm.rank > 0:
        assert not bars
        return
    assert all(most == total and done <= total for done, most in bars)
    assert bars[-1][0] == total and bars[first - 1][0] < total
    # The second sample alone was left.
    assert len(bars) - first <= plan.slabs * plan.passes


class Checks(nn.Module):
    """A model that calls a function."""

    def __init__(self, check):
        super().__init__()
        self.conv, self.check = nn.Conv2d(1, 1, 3, padding=1), check

    def forward(self, x):
        self.check()
        return self.conv(x)


def failing_read(box):
    if box[0].start > 0:
        raise ValueError("a bad sector")
    return np.zeros([each.stop - each.start for each in box], np.float32)


def failing_write(box, y):
    if box[1].start > 0:
        raise ZeroDivisionError("no room")


# What the last rank does otherwise than the others, or the first one; and the error on all ranks.
WRONG = {
    "memory": (ConfigurationError, "much", {"memory": "much"}),
    "grid": (ArgumentError, "a grid has", {"grid": {"H": 0}}),
    "blocks": (MismatchError, "the grid: ", {"grid": {"H": 3}}),
    "weights": (MismatchError, "the digest of the model: ", {"model": nn.Conv2d(1, 1, 3, padding=1)}),
    "model": (MismatchError, "the digest of the model: ", {"model": nn.Conv2d(1, 1, 5, padding=2)}),
    "no model": (ConfigurationError, r"takes a torch\.nn\.Module", {"model": torch.relu}),
    "channels": (ShapeError, "do not take .*= \\(1, 3, 64, 16\\)", {"source": torch.zeros(3, 64, 16)}),
    "missing file": (DataError, "not found on", {"source": "nowhere.npy"}),
    "bad source": (DataError, "a bad sector", {"source": Source((64, 16), np.float32, failing_read)}),
    "bad model": (DataError, "in the model", {}),
    "bad post": (DataError, "TypeError", {"post": lambda y: y + "1"}),
    "source": (MismatchError, "the source: ", {"source": torch.ones(64, 17)}),
    "sink": (MismatchError, "the sink: ", {"sink": torch.empty(1, 64, 16)}),
    "post": (MismatchError, "post: ", {"post": torch.relu}),
    "scratch": (DataError, "no folder", {"scratch": "/nowhere"}),
    "bad sink": (DataError, "no room", {"sink": Sink((1, 64, 16), np.float32, failing_write)}),
}


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("name", WRONG)
def test_what_one_rank_does_wrong_is_an_error_on_all_and_they_can_go_on(comm, name):
    kind, text, change = WRONG[name]
    odd, reads = comm.rank == comm.size - 1, []

    def read(box):
        reads.append(box)
        return np.ones([each.stop - each.start for each in box], np.float32)

    def check():
        if name == "bad model" and odd and len(reads) > 1:
            raise KeyError("in the model")

    torch.manual_seed(1)
    source, model = Source((64, 16), np.float32, read), Checks(check)
    call = {"model": model, "source": source, "sink": None, "grid": {"H": 6}, "comm": comm}
    with pytest.raises(kind, match=text):
        predict(**call | (change if odd or name == "bad sink" else {}))
    good = call | {"model": nn.Conv2d(1, 1, 1), "sink": None, "post": None}
    torch.nn.init.ones_(good["model"].weight)
    torch.nn.init.zeros_(good["model"].bias)
    assert torch.equal(predict(**good), torch.ones(1, 64, 16))


def test_a_result_that_is_there_is_an_error_on_all(comm, folder):
    if comm.rank == 0:
        (folder / "y.npy").touch()
    comm.Barrier()
    with pytest.raises(DataError, match="is there already"):
        predict(nn.Conv2d(1, 1, 1), torch.ones(9, 9), folder / "y.npy", grid={"H": 3}, comm=comm)
    comm.Barrier()
    assert [each.name for each in folder.iterdir()] == ["y.npy"]


class Stop(BaseException):
    """Such as ``KeyboardInterrupt``."""


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("norm", ["none", "instance"])
def test_of_any_exception_the_others_learn(comm, norm):
    reads, odd = [], comm.rank == comm.size - 1

    def read(box):
        reads.append(box)
        if odd and len(reads) > 1:
            raise Stop("now")
        return np.ones([each.stop - each.start for each in box], np.float32)

    model, source = seeded(lambda: UNet(2, norm)), Source((96, 16), np.float32, read)
    # Its machine is lost.
    apart, (kind, text) = comm.Dup(), (Stop, "now") if odd else (PeerFailedError, "Stop: now")
    with pytest.raises(kind, match=text) as caught:
        predict(model, source, grid={"H": 12}, comm=apart)
    assert odd or (caught.value.rank == comm.size - 1 and "by Machine.on().close()" in str(caught.value))
    Machine.on(apart).close()
    y = predict(model, np.ones((96, 16), np.float32), grid={"H": 12}, comm=apart)
    assert y.shape[-2:] == (96, 16)
    # A segment of the default size is half of what is left on the node.
    Machine.on(apart).close()
