"""Prediction by several processes: each plays some of the slabs, and the result is that of one."""

import time

import numpy as np
import pytest
import torch
from torch.nn import functional as F  # noqa: N812

from distdl_rma import DataError, DistdlError, MismatchError, Source, open_array, predict
from tests.checkpoints.training import same_folder
from tests.out_of_core.nets import Calls, UNet, whole

pytestmark = [pytest.mark.mpi, pytest.mark.sizes(1, 2, 3)]

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


def seeded(make):
    torch.manual_seed(0)
    return make().eval()


@pytest.mark.parametrize("norm", ["none", "batch", "instance", "group"])
@pytest.mark.parametrize("dims", [2, 3])
def test_a_network_computes_what_it_does_on_the_whole(comm, dims, norm):
    model = seeded(lambda: UNet(dims, norm))
    x = torch.rand((2, 1, 53, 10, 9)[: dims + 2])
    found = predict(model, x, grid={"HD"[dims - 2]: 5}, comm=comm)
    torch.testing.assert_close(found, whole(model, x), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", FUNCTIONS)
def test_functions_of_all_slabs(comm, name):
    model, x = seeded(lambda: Calls(FUNCTIONS[name])), torch.rand(1, 1, 50, 20)
    found = predict(model, x, grid={"H": 4}, comm=comm)
    torch.testing.assert_close(found, whole(model, x), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("suffix", ["npy", "h5", "zarr"])
def test_one_process_writes_the_file(comm, tmp_path, suffix):
    pytest.importorskip({"h5": "h5py", "npy": "numpy", "zarr": "zarr"}[suffix])
    folder = same_folder(comm, tmp_path)
    model, x = seeded(lambda: UNet(2, "instance")), torch.rand(90, 30)
    path = folder / f"y.{suffix}"
    assert predict(model, x, path, grid={"H": 7}, comm=comm, post=lambda y: y.argmax(1)) is None
    comm.Barrier()
    found = open_array(path)[0:90, 0:30]
    assert torch.equal(torch.as_tensor(np.asarray(found)), whole(model, x[None, None]).argmax(1)[0])
    assert [each.name for each in folder.iterdir()] == [path.name]


def test_an_error_of_one_process_is_raised_on_all_and_a_later_call_goes_on(comm, tmp_path):
    folder = same_folder(comm, tmp_path)
    model, x = seeded(lambda: UNet(2, "none")), np.random.default_rng(0).random((200, 20), np.float32)
    reads, path = [], folder / "y.npy"

    def read(box):
        reads.append(box)
        if len(reads) == 2 and comm.rank == comm.size - 1:
            raise OSError("this disk is broken")
        return x[box]

    source = Source(x.shape, x.dtype, read)
    with pytest.raises(DistdlError, match="broken"):
        predict(model, source, path, grid={"H": 8}, comm=comm)
    assert not path.exists()
    predict(model, source, path, grid={"H": 8}, comm=comm)
    comm.Barrier()
    torch.testing.assert_close(
        torch.from_numpy(np.load(path)),
        whole(model, torch.from_numpy(x)[None, None])[0],
        rtol=1e-4,
        atol=1e-5,
    )


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


def test_calls_that_differ_are_refused(comm):
    model = seeded(lambda: UNet(2, "none"))
    if comm.size == 1:
        pytest.skip("one process has no other")
    x = torch.rand(1, 1, 40 + comm.rank, 20)
    with pytest.raises(MismatchError, match="the source: "):
        predict(model, x, grid={"H": 4}, comm=comm)
    x = torch.rand(1, 1, 40, 20)
    with pytest.raises(MismatchError, match="the sink: "):
        predict(model, x, None if comm.rank else torch.empty(1, 3, 40, 20), grid={"H": 4}, comm=comm)
    with pytest.raises(MismatchError, match="post: "):
        predict(model, x, grid={"H": 4}, comm=comm, post=torch.relu if comm.rank else torch.sigmoid)
    with pytest.raises(DataError, match="no folder"):
        predict(model, x, scratch="/nowhere" if comm.rank else None, comm=comm)
