"""Prediction slab by slab, compared with the whole at once."""

import json
import sys
import time
import traceback
from math import prod

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812

from benchmarks.public_models import MODELS
from distdl_rma import (
    ArgumentError,
    ConfigurationError,
    DataError,
    Machine,
    ShapeError,
    Sink,
    Source,
    UnsupportedError,
    distribute,
    open_array,
    plan_prediction,
    predict,
    rehearse,
)
from distdl_rma.geometry.intervals import Balanced
from distdl_rma.jobs.out_of_core.inference import Forward, Inference, fixed_tensors, twin_of
from distdl_rma.jobs.out_of_core.pages import Pages
from distdl_rma.jobs.out_of_core.results import Results
from distdl_rma.jobs.out_of_core.scratch import Scratch
from distdl_rma.segments.mailbox import Mailbox
from tests.jobs.out_of_core.nets import Calls, UNet, seeded, whole
from tests.layers.sources import formats
from tests.layers.sources.server import serving
from tests.run_mpi import completed


class Run(Inference):
    """A forward on virtual ranks: the result, who waited where, and what was left of the messages."""

    def __init__(self, model, x, blocks, folder, limit=1 << 40, post=None):
        splits = [Balanced(n, b) for n, b in zip(x.shape, blocks, strict=True)]
        super().__init__(Forward(model, post, x.dtype), splits)
        self.waits, self.done = [], []
        self.pages = Pages(limit, lambda: Scratch(folder), self._wait)
        self.mailbox, self._y, self._x = Mailbox(), {}, x
        self.play(self.pages, self.mailbox)

    def read(self, box):
        return self._x[box].clone()

    def write(self, rank, box, y):
        self._y[rank] = box, y.clone()

    def _wait(self, rank, path):
        self.waits.append((rank, path))

    def ended(self, rank, y):
        self.done.append(rank)

    def joined(self, like):
        y, covered = torch.full_like(like, torch.nan), torch.zeros(like.shape, dtype=torch.int)
        for box, part in self._y.values():
            y[box] = part
            covered[box] += 1
        assert bool((covered == 1).all())
        return y


def check(model, x, blocks, folder, passes=None, **how):
    """Compare a run with the whole, in memory and with everything that waits on disk."""
    want = whole(model, x)
    for limit in (1 << 40, 0):
        run = Run(model, x, blocks, folder, limit, **how)
        torch.testing.assert_close(run.joined(want), want, rtol=1e-4, atol=1e-5)
        assert run.mailbox.nbytes == 0 and not run.mailbox.messages and not run.mailbox.vectors
        if passes is not None:
            assert sum(rank == 0 for rank, _ in run.waits) == passes
        if passes == 0:
            assert run.done == sorted(run.done) and not run.pages.held
    return run


CONV, UP, CHAIN = nn.Conv2d, nn.ConvTranspose2d, nn.Sequential
CHAINS = {
    "convolutions": lambda: CHAIN(CONV(1, 4, 3, padding=1), nn.ReLU(), CONV(4, 2, 5)),
    "even kernels": lambda: CHAIN(CONV(1, 4, 4, padding=1), CONV(4, 2, 2, padding=1)),
    "strides": lambda: CHAIN(CONV(1, 4, 3, 2, 1), CONV(4, 4, 3, 3), CONV(4, 2, 1, 2)),
    "dilation": lambda: CHAIN(CONV(1, 4, 3, padding=4, dilation=4), CONV(4, 2, 3, 1, 2, 2)),
    "transposed": lambda: CHAIN(CONV(1, 4, 3, 2, 1), UP(4, 4, 3, 2, 1, 1), UP(4, 2, 5, 3, 2)),
    "pools": lambda: CHAIN(CONV(1, 4, 3, padding=1), nn.MaxPool2d(3, 2, 1), nn.AvgPool2d(2), CONV(4, 2, 3)),
    "resized": lambda: CHAIN(
        nn.MaxPool2d(2),
        nn.Upsample(scale_factor=2, mode="bilinear"),
        CONV(1, 2, 3),
        nn.Upsample(scale_factor=2),
    ),
    "reflected": lambda: CHAIN(nn.ReflectionPad2d(2), CONV(1, 2, 5), nn.ReplicationPad2d(1)),
    "batch norm": lambda: CHAIN(
        CONV(1, 4, 3, padding=1), nn.BatchNorm2d(4), nn.Sigmoid(), CONV(4, 2, 3, padding=1)
    ),
    "grouped": lambda: CHAIN(CONV(1, 4, 1), CONV(4, 4, 3, padding=1, groups=4)),
    "shuffled": lambda: CHAIN(CONV(1, 4, 3, padding=1), nn.PixelShuffle(2), CONV(1, 2, 3, 2, 1)),
}


@pytest.mark.parametrize("name", CHAINS)
@pytest.mark.parametrize("blocks", [(1, 1, 4, 1), (1, 1, 1, 3), (1, 1, 2, 3)])
def test_chains_without_statistics_take_one_pass_in_the_order_of_slabs(name, blocks, tmp_path):
    x = torch.randn(1, 1, 66, 62)
    check(seeded(CHAINS[name]), x, blocks, tmp_path, passes=0)


@pytest.mark.parametrize("norm", ["none", "batch", "instance", "group"])
@pytest.mark.parametrize(("dims", "extents"), [(2, (67, 45)), (3, (37, 18, 21)), (1, (203,))])
def test_u_nets_with_skips_equal_the_whole(norm, dims, extents, tmp_path):
    model = seeded(lambda: UNet(dims, norm))
    passes = 0 if norm in ("none", "batch") else 10
    check(model, torch.randn(1, 1, *extents), (1, 1, 3, *[1] * (dims - 1)), tmp_path, passes)


def test_more_slabs_than_rows_of_the_deepest_level(tmp_path):
    model = seeded(lambda: UNet(2, "none"))
    check(model, torch.randn(1, 1, 40, 24), (1, 1, 13, 1), tmp_path, 0)


@pytest.mark.parametrize("name", MODELS)
def test_public_models_equal_the_whole(name, tmp_path):
    model = MODELS[name]
    if model.missing:
        pytest.skip(f"needs {model.missing}")
    x = model.image(1 if len(model.shape) == 5 else 2)
    x = x[..., :192] if len(model.shape) == 4 else x
    check(model.made(), x, (1, 1, 3, *[1] * (x.dim() - 3)), tmp_path)


class Spectrum(nn.Module):
    """Has no tensors, and no layers that say how many dimensions are spatial."""

    def forward(self, x):
        y = torch.fft.ifft2(torch.fft.fft2(x) * 0.5).real
        return y @ (y.transpose(2, 3) @ y)


def test_a_model_without_tensors_takes_batches():
    x = torch.rand(1, 1, 256, 32) * 0.1
    assert plan_prediction(Spectrum(), x, grid={"H": 4}).passes > 1
    found = predict(Spectrum(), x, grid={"H": 4})
    torch.testing.assert_close(found, whole(Spectrum(), x), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("shape", [(60, 40), (1, 60, 40), (3, 1, 60, 40)])
@pytest.mark.parametrize("sink", [None, "y.npy", "y.zarr", "y.h5", "array", "function"])
def test_sources_and_sinks_of_all_forms(shape, sink, tmp_path):
    model = seeded(lambda: UNet(2, "instance"))
    x = np.random.default_rng(0).integers(0, 255, shape).astype(np.uint8)
    want = whole(model, torch.from_numpy(x).float().view(-1, 1, 60, 40)).argmax(1).to(torch.uint8)
    want = want if len(shape) == 4 else want[0]
    target, found = sink, None
    if sink == "array":
        target = found = np.zeros(tuple(want.shape), np.uint8)
    elif sink == "function":
        found = np.zeros(tuple(want.shape), np.uint8)
        target = Sink(found.shape, np.uint8, found.__setitem__)
    elif sink:
        target = tmp_path / sink
    np.save(tmp_path / "x.npy", x)
    y = predict(model, tmp_path / "x.npy", target, grid={"H": 3}, post=lambda y: y.argmax(1).to(torch.uint8))
    if sink is None:
        assert y.dtype == torch.uint8 and torch.equal(y, want)
        return
    assert y is None
    assert np.array_equal(formats.whole(target) if found is None else found, want.numpy())
    assert {each.name for each in tmp_path.iterdir()} <= {"x.npy", str(sink)}


def test_the_model_stays_as_it_is(tmp_path):
    model = seeded(lambda: UNet(2, "batch")).train()
    before = {name: x.clone() for name, x in model.state_dict().items()}
    x = torch.randn(1, 1, 48, 32)
    torch.testing.assert_close(predict(model, x, grid={"H": 2}), whole(model, x), rtol=1e-4, atol=1e-5)
    assert model.training and all(torch.equal(x, before[name]) for name, x in model.state_dict().items())
    assert not any(part._forward_hooks or part._forward_pre_hooks for part in model.modules())


class Keeps(nn.Module):
    """Keeps a tensor of a call, which is one of its slab."""

    def __init__(self):
        super().__init__()
        self.conv, self.norm = nn.Conv2d(1, 2, 3, padding=1), nn.InstanceNorm2d(2)

    def forward(self, x):
        self.kept = x
        return self.norm(self.conv(x)) + self.kept


class Twice(nn.Module):
    """Calls a layer with two extents, and shares a parameter."""

    def __init__(self):
        super().__init__()
        self.conv, self.other = nn.Conv2d(1, 1, 3, padding=1), nn.Conv2d(1, 1, 3, padding=1)
        self.other.weight = self.conv.weight

    def forward(self, x):
        small = self.conv(F.avg_pool2d(x, 2))
        return self.conv(x) + self.other(F.interpolate(self.conv(small), scale_factor=2.0))


@pytest.mark.parametrize(("make", "passes"), [(Keeps, None), (Twice, 0)])
def test_modules_as_users_write_them(make, passes, tmp_path):
    check(seeded(make), torch.randn(1, 1, 64, 20), (1, 1, 4, 1), tmp_path, passes)


class Tables(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv, self.table = nn.Conv2d(1, 2, 3, padding=1), torch.rand(1, 1, 1, 20)
        self.tables = {"one": [torch.rand(1, 2, 1, 1)]}

    def forward(self, x):
        return self.conv(x) * self.table + self.tables["one"][0]


def test_all_slabs_share_tensors_that_are_attributes(tmp_path):
    model = seeded(Tables)
    # What is left of a training step, which torch does not copy.
    model.kept = model.conv(torch.ones(1, 1, 4, 4))
    twin = twin_of(model)
    both = (fixed_tensors(each).values() for each in (model, twin))
    for x, y in zip(*both, strict=True):
        assert x.data_ptr() == y.data_ptr() and x._version == y._version and type(x) is type(y)
        # Autocast keeps its copies of leaves that need gradients.
        assert not (y.requires_grad and y.is_leaf)
    own = model.table, model.tables["one"][0], model.kept
    assert {*map(id, own)} <= {*map(id, fixed_tensors(model).values())}
    check(model, torch.randn(1, 1, 40, 20), (1, 1, 4, 1), tmp_path, 0)


def test_numpy_views_of_blocks_keep_them_in_memory(tmp_path):
    # A user's array of a block stays valid, since torch does not resize a tensor that has one.
    class Shows(nn.Module):
        def __init__(self):
            super().__init__()
            self.norm = nn.InstanceNorm2d(1)

        def forward(self, x):
            array = x.to_local().numpy()
            before = array.copy()
            y = self.norm(x)
            assert np.array_equal(array, before)
            return y

    x = torch.randn(1, 1, 300, 300)
    want = nn.InstanceNorm2d(1)(x)
    found = Run(Shows(), x, (1, 1, 3, 1), tmp_path, 0).joined(want)
    torch.testing.assert_close(found, want, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(("kernel", "stride"), [(3, 2), (3, 1)])
def test_a_transposed_convolution_in_16_bits_is_rounded_once_where_slabs_meet(kernel, stride, tmp_path):
    model = seeded(lambda: nn.ConvTranspose2d(2, 2, kernel, stride, 1)).bfloat16()
    x = torch.randn(1, 2, 40, 24, dtype=torch.bfloat16)
    want = whole(model, x)
    assert Run(model.eval(), x, (1, 1, 4, 1), tmp_path).joined(want).equal(want)


def test_samples_that_are_computed_together_may_end_on_ranks_of_their_own():
    model = Takes(lambda x: x.cumsum(0).flip(2)).eval()
    x = torch.randn(2, 1, 24, 8)
    with torch.no_grad():
        want = model(x)
    torch.testing.assert_close(predict(model, x, grid={"H": 4, "W": 2}), want)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "net", "extents"),
    [
        ("u-net", {"norm": "none", "channels": 8}, (3000, 700)),
        ("u-net", {"norm": "instance", "channels": 8}, (3000, 700)),
        ("u-net", {"norm": "group", "channels": 4, "dims": 3, "classes": 20}, (160, 80, 80)),
        ("gated", {}, (2000, 1000)), ("attention", {}, (1280, 1280)), ("cumsum", {}, (2000, 2000)),
        ("flip", {}, (2000, 2000)), ("roll", {}, (2000, 2000)), ("unfold", {}, (1000, 1000)),
        ("fft", {}, (2000, 1000)), ("channels", {}, (1000, 1000)),
    ],
)  # fmt: skip
def test_the_process_grows_by_the_memory_at_most(name, net, extents, tmp_path):
    options = {"memory": "160MiB", "scratch": str(tmp_path), "out": str(tmp_path / "y.npy")}
    arguments = json.dumps({"model": name, "net": net, "extents": extents, **options})
    done = completed([sys.executable, "-m", "tests.jobs.out_of_core.nets", arguments], limit=300)
    assert done.returncode == 0, done.stderr
    facts = json.loads(done.stdout)
    assert facts["grown"] <= 160 << 20, facts
    # The plan wastes no memory.
    assert facts["planned"] <= 1.6 * facts["grown"], facts


class Takes(nn.Module):
    """A convolution of what a function makes of the input."""

    def __init__(self, function, dtype=torch.float32):
        super().__init__()
        self.conv, self.function = nn.Conv2d(1, 2, 3, padding=1, dtype=dtype), function

    def forward(self, x):
        return self.conv(self.function(x))


TYPES = {
    "labels": (torch.int64, lambda x: (x % 97).float()),
    "identifiers": (torch.uint64, lambda x: (x.long() % 97).float()),
    "one hot": (torch.int64, lambda x: F.one_hot(x[:, 0] % 3, 3).movedim(-1, 1)[:, :1].float()),
    "mask": (torch.bool, lambda x: x.logical_not().float()),
    "complex": (torch.complex64, lambda x: torch.view_as_real(x)[..., 1]),
    "double": (torch.float64, lambda x: x),
}


@pytest.mark.parametrize("name", TYPES)
def test_the_model_gets_the_elements_as_they_are_if_it_takes_them(name):
    dtype, function = TYPES[name]
    x = torch.arange(200).view(25, 8) + 2**40
    x = torch.complex(x.cos(), x.sin()) if dtype.is_complex else x.cos() if name == "double" else x
    model, x = seeded(lambda: Takes(function)), x.to(dtype)
    want = whole(model, (x.float() if name == "double" else x)[None, None])[0]
    torch.testing.assert_close(predict(model, x, grid={"H": 3}), want)


@pytest.mark.parametrize("dtype", [torch.int16, torch.uint16, torch.uint8, torch.bool, torch.int64])
def test_integers_that_the_model_does_not_take_become_floats_which_hold_them(dtype):
    model, x = seeded(lambda: Takes(lambda x: x)), (torch.arange(200).view(25, 8) % 255).to(dtype)
    want = whole(model, x.float()[None, None])[0]
    torch.testing.assert_close(predict(model, x, grid={"H": 3}), want)


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int32])
def test_the_largest_of_integers_is_taken_as_they_are(dtype):
    pooled = lambda x: F.max_pool2d(x, 2) / 255 + F.max_pool2d(x, 3, 2, 1).float()  # noqa: E731
    model, x = seeded(lambda: Takes(pooled)), (torch.arange(320).view(1, 40, 8) * 7 % 255).to(dtype)
    want = whole(model, x[None])[0]
    torch.testing.assert_close(predict(model, x, grid={"H": 3}), want)


def test_a_function_of_floats_alone_says_that_the_source_can_have_them():
    model, x = seeded(lambda: Takes(lambda x: F.avg_pool2d(x, 2).float())), np.arange(320).reshape(40, 8)
    with pytest.raises(UnsupportedError, match=r"torch.int64; only floating.*give the source as floats"):
        predict(model, x, grid={"H": 3})
    want = whole(model, torch.from_numpy(x).float()[None, None])[0]
    torch.testing.assert_close(predict(model, x.astype(np.float32), grid={"H": 3}), want)


DEPENDENT = {
    "mean": lambda y: y - y.mean(0, keepdim=True),
    "batch norm": nn.BatchNorm2d(2, track_running_stats=False).eval(),
    "cumsum": lambda y: y.cumsum(0),
    "first": lambda y: y + y[:1],
    "count": lambda y: y / y.shape[0],
    "two apart": lambda y: y - torch.cat([y[2:], y[:2]]),
    "fours": lambda y: y - (0 if len(y) % 4 else y.unflatten(0, (-1, 4)).mean(1).repeat_interleave(4, 0)),
    "third": lambda y: y + y[2:3].sum() if y.shape[0] > 2 else y,
    "more than two": lambda y: y * (2 if y.shape[0] > 2 else 1),
    "numbered": lambda y: y + 1e-4 * torch.arange(y.shape[0]).view(-1, 1, 1, 1),
    "a small channel": lambda y: y + torch.tensor([1e4, 0]).view(1, 2, 1, 1) + 1e-3 * len(y),
}
INDEPENDENT = {
    "instance norm": nn.InstanceNorm2d(2),
    "classes": lambda y: y.argmax(1),
    "attention": lambda y: y.flatten(2).transpose(1, 2) @ y.flatten(2)[:, :, :2],
}


@pytest.mark.parametrize("name", DEPENDENT | INDEPENDENT)
def test_samples_are_computed_together_only_if_they_depend_on_each_other(name):
    function = (DEPENDENT | INDEPENDENT)[name]
    model, x = seeded(lambda: Calls(function, 2)), torch.rand(4, 1, 24, 12)
    plan = plan_prediction(model, x, grid={"H": 3})
    assert plan.samples == (1 if name in DEPENDENT else 4)
    assert ("4 samples at once" in str(plan)) == (name in DEPENDENT)
    found = predict(model, x, grid={"H": 3})
    torch.testing.assert_close(found, whole(model, x), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.int64, torch.bool, torch.complex64])
def test_elements_of_all_types_show_whether_samples_depend_on_each_other(dtype):
    def counted(x):
        y = x.imag if x.is_complex() else x.float()
        return y * (2 if x.shape[0] > 2 else 1)

    x = torch.rand(4, 1, 24, 12).round().to(torch.float32)
    x = torch.complex(x, 1 - x) if dtype.is_complex else x.to(dtype)
    model = seeded(lambda: Takes(counted))
    assert plan_prediction(model, x, grid={"H": 3}).samples == 1
    torch.testing.assert_close(predict(model, x, grid={"H": 3}), whole(model, x))


def test_more_samples_than_fit_are_compared_on_a_smaller_crop():
    x, options = torch.rand(200, 1, 256, 64), {"grid": {"H": 8}, "memory": "16MiB"}
    assert plan_prediction(seeded(lambda: Calls(lambda y: y.relu())), x, **options).samples == 200
    late = seeded(lambda: Calls(lambda y: y + y[150:151].sum() if len(y) > 150 else y))
    with pytest.raises(ConfigurationError, match=r"too small: the model is tried on a crop of \(200, "):
        plan_prediction(late, x, **options)


class Casts(nn.Module):
    """Computes in bfloat16 whatever the caller does."""

    def __init__(self):
        super().__init__()
        self.inner = UNet(2, "instance")

    @torch.autocast("cpu", torch.bfloat16)
    def forward(self, x):
        return self.inner(x)


@pytest.mark.parametrize("memory", ["8GiB", "64MiB"])
@pytest.mark.parametrize("make", [lambda: UNet(2, "instance"), Casts])
def test_the_model_computes_in_the_callers_autocast(make, memory, tmp_path):
    model, x, seen = seeded(make), torch.randn(1, 1, 500, 300), []
    model.register_forward_hook(lambda *_: seen.append(torch.is_autocast_enabled("cpu")))
    with torch.autocast("cpu", torch.bfloat16):
        want = whole(model, x)
        # Autocast keeps copies of parameters here, of which slabs make none.
        found = predict(model, x, tmp_path / "y.npy", grid={"H": 4}, memory=memory, post=lambda y: y.float())
        assert found is None and {*seen} == {True}
    found = torch.from_numpy(np.load(tmp_path / "y.npy"))
    torch.testing.assert_close(found, want.float(), rtol=0.05, atol=0.05)


@pytest.mark.parametrize("mode", [torch.inference_mode, lambda: torch.device("cpu")])
def test_a_prediction_goes_with_other_modes(mode):
    model, x = seeded(lambda: UNet(2, "instance")), torch.randn(1, 1, 48, 32)
    with mode():
        found = predict(model, x, grid={"H": 3})
    torch.testing.assert_close(found, whole(model, x), rtol=1e-4, atol=1e-5)


def test_a_later_call_with_another_model_begins_anew(tmp_path):
    model, x = seeded(lambda: UNet(2, "none")), torch.randn(1, 1, 96, 30)

    reads = []

    def read(box):
        reads.append(box)
        if len(reads) == 3:
            raise OSError("the disk is gone")
        return x[box]

    source = Source(x.shape, torch.float32, read)
    out = tmp_path / "y.npy"
    with pytest.raises(DataError, match="the disk is gone"):
        predict(model, source, out, grid={"H": 4})
    assert sorted(each.name for each in tmp_path.iterdir()) == ["y.npy.part", "y.npy.progress"]
    with torch.no_grad():
        model.last.weight.mul_(2)
    predict(model, source, out, grid={"H": 4})
    assert len(reads) == 3 + 4
    torch.testing.assert_close(torch.from_numpy(np.load(out)), whole(model, x), rtol=1e-4, atol=1e-5)


def test_a_damaged_state_is_that_of_no_prediction(tmp_path, monkeypatch):
    model, x, out = nn.Conv2d(1, 1, 3, padding=1), torch.randn(1, 1, 24, 6), tmp_path / "y.npy"
    ended = Results.ended

    def end(self, sample, slabs):
        ended(self, sample, slabs)
        raise KeyError("stop")

    monkeypatch.setattr(Results, "ended", end)
    with pytest.raises(KeyError, match="stop"):
        predict(model, x, out, grid={"H": 3})
    monkeypatch.undo()
    state = tmp_path / "y.npy.progress" / "state.json"
    # It says that all slabs are written.
    state.write_text(state.read_text().replace("[0, 1]", "[0, 3]"))
    predict(model, x, out, grid={"H": 3})
    torch.testing.assert_close(torch.from_numpy(np.load(out)), whole(model, x))


def test_a_disk_that_is_full_at_the_beginning_leaves_nothing(tmp_path, monkeypatch):
    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Results, "_note", full)
    with pytest.raises(DataError, match="No space left"):
        predict(nn.Conv2d(1, 1, 1), torch.ones(1, 1, 8, 4), tmp_path / "y.npy", grid={"H": 2})
    assert not any(tmp_path.iterdir())


def test_a_conjugate_is_written(tmp_path):
    model, x = nn.Conv2d(1, 1, 1), torch.randn(1, 1, 8, 4)
    predict(model, x, tmp_path / "y.npy", grid={"H": 2}, post=lambda y: torch.complex(y, y).conj())
    y = whole(model, x)
    torch.testing.assert_close(torch.from_numpy(np.load(tmp_path / "y.npy")), torch.complex(y, -y))


class Counts(Calls):
    """Counts its calls in a tensor of its own."""

    def __init__(self, is_buffer):
        super().__init__(self.counted)
        if is_buffer:
            self.register_buffer("calls", torch.zeros(()))
        else:
            self.calls = torch.zeros(())

    def counted(self, y):
        self.calls += 1
        return y


LAYER, X, PART = nn.Conv2d(1, 1, 3), torch.ones(1, 1, 64, 64), nn.Conv2d(1, 4, 3, padding=1)
TAKE = r"do not take .* = \(1, 3, 40, 20\) of torch\.float32: RuntimeError"
# A model and other arguments than ``X``, an error and its words.
REFUSED = [
    (Calls(lambda x: x[x > 0].reshape(1, 1, -1)), {"memory": "32MiB"}, UnsupportedError, "depends on values"),
    (Calls(lambda x: x.as_strided(x.shape, x.stride())), {"grid": {"H": 2}}, UnsupportedError, "as_strided"),
    *(
        (nn.Sequential(Counts(is_buffer)), {}, UnsupportedError, r"changes its tensor '0\.calls' in place")
        for is_buffer in (True, False)
    ),
    (LAYER, {"source": torch.zeros(3, 40, 20)}, ShapeError, TAKE),
    (LAYER, {"post": lambda y: y.view(1, 7)}, ShapeError, r"do not take .* at test_predict\.py:\d+: shape"),
    *(
        (PART, {"post": post}, ShapeError, "its first dimension is the batch")
        for post in (lambda y: y.argmax(1)[0], lambda y: torch.cat([y, y.flip(3)]), lambda y: y.sum())
    ),
    (PART, {"source": torch.ones(12, 8, dtype=torch.cfloat)}, ShapeError, r"do not take .*torch\.complex64"),
    (
        LAYER,
        {"source": torch.full((9, 9), 2**24 + 1)},
        DataError,
        r"int64 that torch\.float32, .*cannot hold",
    ),
    (LAYER, {"source": torch.full((9, 9), 1e300, dtype=torch.float64)}, DataError, "cannot hold"),
    (PART, {"source": torch.ones(3, 1, 9, 9), "post": lambda y: y.sum(0, True)}, ShapeError, "of 3 samples"),
    (LAYER, {"source": torch.ones(4)}, ShapeError, r"the source has shape \(4,\).*2 spatial dimensions"),
    (LAYER, {"grid": {"H": -1}}, ArgumentError, "a grid has the numbers of blocks"),
    (LAYER, {"grid": {"C": 2}}, ArgumentError, "a grid cuts spatial dimensions"),
    (LAYER, {"memory": "1MiB"}, ConfigurationError, r"memory=1\.0 MiB is too small"),
    (LAYER, {"memory": "much"}, ConfigurationError, "the memory"),
    (LAYER, {"scratch": "missing"}, DataError, "is no folder"),
    (Calls(lambda x: (x, x)), {}, ArgumentError, "choose it by post="),
    (LAYER, {"sink": np.zeros(X.shape)}, ShapeError, r"the result has shape \(1, 1, 62, 62\)"),
    (LAYER, {"sink": np.zeros((1, 1, 62, 62))}, ShapeError, "elements of float64, the result of float32"),
    (torch.relu, {}, ConfigurationError, r"takes a torch\.nn\.Module"),
]


@pytest.mark.parametrize(("model", "options", "error", "words"), REFUSED)
def test_what_does_not_fit_is_refused_before_anything_is_written(model, options, error, words, tmp_path):
    with pytest.raises(error, match=words) as caught:
        predict(model, **{"source": X, "sink": tmp_path / "y.npy"} | options)
    assert not any(tmp_path.iterdir())
    # In place of the frames of torch the text names the user's line.
    assert error is not ShapeError or len(traceback.format_exception(caught.value)) < 12


def test_a_distributed_model_and_virtual_ranks_are_refused():
    def play(comm):
        with pytest.raises(UnsupportedError, match="cannot run virtual ranks"):
            predict(nn.Conv2d(1, 1, 1), torch.ones(1, 1, 4, 4))
        model = distribute(nn.Conv2d(1, 1, 1), {"H": -1})
        model.distributed.close()
        return Machine.on().size

    assert rehearse(2, play) == [2, 2]


def test_the_plan_says_what_will_be_done(tmp_path):
    model, x = seeded(lambda: UNet(2, "instance", 8)), torch.zeros(1500, 400)
    plan = plan_prediction(model, x, memory="100MiB", scratch=tmp_path)
    assert plan.passes == 11 and plan.slabs > 1 and plan.nbytes <= plan.memory < plan.whole_nbytes
    needed = "passes    11: 10 functions need all slabs, in down.1, down.4"
    for part in ("(1500, 400), 1 sample", "along H", needed, "the whole at once"):
        assert part in str(plan)
    assert prod(plan.grid) == plan.slabs and plan.result == (3, 1500, 400)
    one = plan_prediction(seeded(lambda: UNet(2, "batch", 8)), x, memory="100MiB")
    assert one.passes == 1 and "slabs end one after the other" in str(one) and one.disk_nbytes == 0


def test_a_new_file_gets_chunks_for_its_last_dimensions(tmp_path):
    x, model = torch.rand(2, 40, 30), nn.Conv2d(2, 3, 1)
    predict(model, x, tmp_path / "y.zarr", chunks=(8, 10))
    found = open_array(tmp_path / "y.zarr")
    assert found.chunks == (1, 8, 10) and found.shape == (3, 40, 30)
    with pytest.raises(ArgumentError, match="chunks= are of Zarr, one extent above 0 for each"):
        predict(model, x, tmp_path / "z.zarr", chunks=(1, 1, 8, 10))
    with pytest.raises(ArgumentError, match="the sink is no path"):
        predict(model, x, chunks=(8, 10))


def labels(y):
    return y.argmax(1)


def smaller(y):
    return y[:, :, 1:]


@pytest.mark.parametrize(
    ("names", "shape", "suffix", "post", "axes", "spacing"),
    [
        ("tcyx", (4, 2, 16, 16), ".zarr", labels, "tyx", (7, 2, 3)),
        ("tcyx", (4, 2, 16, 16), ".ome.zarr", labels, "tyx", (7, 2, 3)),
        ("tcyx", (4, 2, 16, 16), ".zarr", None, "tcyx", (7, 1, 2, 3)),
        ("bc", (16, 16), ".zarr", None, None, (1, 2, 3)),
        ("xy", (16, 16), ".ome.zarr", None, "cxy", (1, 2, 3)),
        ("yt", (16, 16), ".ome.zarr", None, "cyx", (1, 2, 3)),
        (None, (4, 2, 16, 16), ".ome.zarr", None, "tcyx", (7, 1, 2, 3)),
        ("yx", (16, 16), ".h5", None, "cyx", (1, 2, 3)),
        ("yx", (16, 16), ".h5", labels, "yx", (2, 3)),
        ("yx", (16, 16), ".h5", smaller, None, None),
        ("yx", (16, 16), ".npy", None, None, None),
    ],
)
def test_samples_and_space_of_a_result_are_those_of_the_source(
    tmp_path, names, shape, suffix, post, axes, spacing
):
    import zarr

    scales = [7, 5, 2, 3][-len(shape) :]
    how = {"dtype": "f4", "dimension_names": names, "attributes": {"axis_spacing": scales}}
    zarr.create_array(tmp_path / "x.zarr", shape=shape, **how)[...] = 1
    model = nn.Conv2d(2 if len(shape) > 2 else 1, 3, 3, padding=1)
    predict(model, tmp_path / "x.zarr", tmp_path / f"y{suffix}", post=post)
    y = open_array(tmp_path / f"y{suffix}")
    assert (y.axes, y.spacing) == (axes and tuple(axes), spacing)


@pytest.mark.parametrize("kind", ["npy", "zarr", "server"])
def test_a_prediction_of_a_file_that_has_changed_begins_anew(tmp_path, kind):
    import zarr

    def written(value):
        x = np.full((64, 32), value, np.float32)
        np.save(tmp_path / "x.npy", x)
        zarr.save_array(tmp_path / "x.zarr", x, mode="w")
        return torch.from_numpy(x)[None]

    def stops(y):
        calls.append(1)
        if len(calls) == 6:
            raise ValueError("stop")
        return y

    model, calls = seeded(lambda: nn.Conv2d(1, 1, 3, padding=1)), []
    with serving(tmp_path) as server:
        source = f"{server.url}/x.npy" if kind == "server" else tmp_path / f"x.{kind}"
        written(0)
        with pytest.raises((ValueError, ArgumentError, DataError), match="stop"):
            predict(model, source, tmp_path / "y.npy", grid={"H": 8}, post=stops)
        # Servers tell seconds.
        time.sleep(1.1)
        x = written(5)
        predict(model, source, tmp_path / "y.npy", grid={"H": 8}, post=stops)
    torch.testing.assert_close(torch.from_numpy(np.load(tmp_path / "y.npy")), whole(model, x[None])[0])
