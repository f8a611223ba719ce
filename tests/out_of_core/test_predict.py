"""Prediction slab by slab, compared with the whole at once."""

import json
import random
import subprocess
import sys
from math import prod
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
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
from distdl_rma.out_of_core.inference import Inference, fixed_tensors, twin_of
from distdl_rma.out_of_core.pages import Pages
from distdl_rma.out_of_core.results import Results
from distdl_rma.out_of_core.scratch import Scratch
from distdl_rma.segments.buffered_channel import Mailbox
from tests.out_of_core.nets import Attention, UNet, whole


class Run:
    """A forward on virtual ranks: the result, who waited where, and what was left of the messages."""

    def __init__(self, model, x, blocks, folder, limit=1 << 40, post=None):
        self.waits, self.ended = [], []
        self.pages = Pages(limit, lambda: Scratch(folder), self._wait)
        self.mailbox, self._y, self._x = Mailbox(), {}, x
        splits = [Balanced(n, b) for n, b in zip(x.shape, blocks, strict=True)]
        inference = Inference(
            model, post, splits, self.pages, self.mailbox, self._read, self._write, self._end
        )
        inference.run()

    def _read(self, box):
        return self._x[box].clone()

    def _write(self, rank, box, y):
        self._y[rank] = box, y.clone()

    def _wait(self, rank, path):
        self.waits.append((rank, path))

    def _end(self, rank, y):
        self.ended.append(rank)

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
            assert run.ended == sorted(run.ended) and not run.pages.held
    return run


def seeded(make):
    torch.manual_seed(0)
    return make()


CHAINS = {
    "convolutions": lambda: nn.Sequential(nn.Conv2d(1, 4, 3, padding=1), nn.ReLU(), nn.Conv2d(4, 2, 5)),
    "even kernels": lambda: nn.Sequential(nn.Conv2d(1, 4, 4, padding=1), nn.Conv2d(4, 2, 2, padding=1)),
    "strides": lambda: nn.Sequential(nn.Conv2d(1, 4, 3, 2, 1), nn.Conv2d(4, 4, 3, 3), nn.Conv2d(4, 2, 1, 2)),
    "dilation": lambda: nn.Sequential(nn.Conv2d(1, 4, 3, padding=4, dilation=4), nn.Conv2d(4, 2, 3, 1, 2, 2)),
    "transposed": lambda: nn.Sequential(
        nn.Conv2d(1, 4, 3, 2, 1), nn.ConvTranspose2d(4, 4, 3, 2, 1, 1), nn.ConvTranspose2d(4, 2, 5, 3, 2)
    ),
    "pools": lambda: nn.Sequential(
        nn.Conv2d(1, 4, 3, padding=1), nn.MaxPool2d(3, 2, 1), nn.AvgPool2d(2), nn.Conv2d(4, 2, 3)
    ),
    "resized": lambda: nn.Sequential(
        nn.MaxPool2d(2),
        nn.Upsample(scale_factor=2, mode="bilinear"),
        nn.Conv2d(1, 2, 3),
        nn.Upsample(scale_factor=2),
    ),
    "reflected": lambda: nn.Sequential(nn.ReflectionPad2d(2), nn.Conv2d(1, 2, 5), nn.ReplicationPad2d(1)),
    "batch norm": lambda: nn.Sequential(
        nn.Conv2d(1, 4, 3, padding=1), nn.BatchNorm2d(4), nn.Sigmoid(), nn.Conv2d(4, 2, 3, padding=1)
    ),
    "grouped": lambda: nn.Sequential(nn.Conv2d(1, 4, 1), nn.Conv2d(4, 4, 3, padding=1, groups=4)),
    "shuffled": lambda: nn.Sequential(
        nn.Conv2d(1, 4, 3, padding=1), nn.PixelShuffle(2), nn.Conv2d(1, 2, 3, 2, 1)
    ),
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


@settings(max_examples=15, deadline=None)
@given(
    st.integers(1, 6),
    st.lists(st.sampled_from(["conv", "stride", "up", "pool", "norm", "relu"]), min_size=1, max_size=6),
    st.integers(24, 50),
)
def test_random_chains_equal_the_whole(tmp_path_factory, ranks, kinds, rows):
    torch.manual_seed(len(kinds))
    made = {
        "conv": lambda: nn.Conv2d(2, 2, 3, padding=1),
        "stride": lambda: nn.Conv2d(2, 2, 3, 2, 1),
        "up": lambda: nn.ConvTranspose2d(2, 2, 2, 2),
        "pool": lambda: nn.MaxPool2d(2, ceil_mode=True),
        "norm": lambda: nn.InstanceNorm2d(2),
        "relu": nn.ReLU,
    }
    if kinds.count("stride") + kinds.count("pool") > 3:
        kinds = ["conv", *kinds[:2]]
    model = nn.Sequential(*(made[kind]() for kind in kinds))
    check(model, torch.randn(1, 2, rows, 21), (1, 1, ranks, 1), tmp_path_factory.mktemp("scratch"))


@pytest.mark.parametrize("name", MODELS)
def test_public_models_equal_the_whole(name, tmp_path):
    model = MODELS[name]
    if model.missing:
        pytest.skip(f"needs {model.missing}")
    x = model.image(1 if len(model.shape) == 5 else 2)
    x = x[..., :192] if len(model.shape) == 4 else x
    check(model.made(), x, (1, 1, 3, *[1] * (x.dim() - 3)), tmp_path)


class Spectrum(nn.Module):
    def forward(self, x):
        return torch.fft.ifft2(torch.fft.fft2(x) * 0.5).real


@pytest.mark.parametrize("make", [Attention, Spectrum])
def test_functions_of_everything_go_by_whole_passes_that_the_plan_names(make, tmp_path):
    model, x = seeded(make), torch.randn(1, 1, 256, 32)
    plan = plan_prediction(model, x, grid={"H": 4})
    assert plan.passes > 1 and "functions need all slabs" in str(plan)
    torch.testing.assert_close(predict(model, x, grid={"H": 4}), whole(model, x), rtol=1e-4, atol=1e-5)


def test_what_depends_on_values_is_refused_before_anything_is_written(tmp_path):
    class Picks(nn.Module):
        def forward(self, x):
            return x[x > 0].reshape(1, 1, -1)

    with pytest.raises(UnsupportedError, match="depends on values"):
        predict(Picks(), torch.randn(1, 1, 64, 64), tmp_path / "y.npy", memory="32MiB")
    assert not list(tmp_path.iterdir())


def test_what_has_no_rule_is_refused_before_anything_is_written(tmp_path):
    class Solves(nn.Module):
        def forward(self, x):
            return torch.as_strided(x, x.shape, x.stride())

    with pytest.raises(UnsupportedError, match="as_strided"):
        predict(Solves(), torch.randn(1, 1, 64, 64), tmp_path / "y.npy", grid={"H": 2})
    assert not list(tmp_path.iterdir())


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
    found = open_array(target)[tuple(slice(0, n) for n in want.shape)] if found is None else found
    assert np.array_equal(np.asarray(found), want.numpy())
    assert {each.name for each in tmp_path.iterdir()} <= {"x.npy", str(sink)}


def test_the_model_stays_as_it_is(tmp_path):
    model = seeded(lambda: UNet(2, "batch")).train()
    before = {name: x.clone() for name, x in model.state_dict().items()}
    x = torch.randn(1, 1, 48, 32)
    torch.testing.assert_close(predict(model, x, grid={"H": 2}), whole(model, x), rtol=1e-4, atol=1e-5)
    assert model.training and all(torch.equal(x, before[name]) for name, x in model.state_dict().items())
    assert not any(part._forward_hooks or part._forward_pre_hooks for part in model.modules())


def test_modules_that_keep_tensors_of_a_call_have_them_for_each_slab(tmp_path):
    class Keeps(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv, self.norm = nn.Conv2d(1, 2, 3, padding=1), nn.InstanceNorm2d(2)

        def forward(self, x):
            self.kept = x
            return self.norm(self.conv(x)) + self.kept

    check(seeded(Keeps), torch.randn(1, 1, 40, 20), (1, 1, 4, 1), tmp_path)


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
    assert all(x is y for x, y in zip(fixed_tensors(model), fixed_tensors(twin), strict=True))
    assert {id(model.table), id(model.tables["one"][0]), id(model.kept)} <= set(map(id, fixed_tensors(model)))
    check(model, torch.randn(1, 1, 40, 20), (1, 1, 4, 1), tmp_path, 0)


@pytest.mark.parametrize("kind", ["buffer", "attribute"])
def test_tensors_that_the_model_changes_in_place_are_refused(kind, tmp_path):
    class Counts(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv = nn.Conv2d(1, 2, 3, padding=1)
            if kind == "buffer":
                self.register_buffer("calls", torch.zeros(()))
            else:
                self.calls = torch.zeros(())

        def forward(self, x):
            self.calls += 1
            return self.conv(x)

    model = nn.Sequential(Counts())
    with pytest.raises(UnsupportedError, match=r"changes its tensor '0\.calls' in place"):
        predict(model, torch.randn(1, 1, 64, 64), tmp_path / "y.npy", grid={"H": 2})
    assert not list(tmp_path.iterdir())


def test_what_torch_does_not_take_is_said_with_the_shape():
    with pytest.raises(
        ShapeError, match=r"do not take .* = \(1, 3, 40, 20\) of torch\.float32: RuntimeError"
    ):
        predict(nn.Conv2d(1, 1, 3), torch.zeros(3, 40, 20))
    with pytest.raises(ShapeError, match="post= do not take"):
        predict(nn.Conv2d(1, 1, 3), torch.zeros(40, 20), post=lambda y: y.view(1, 7))


def test_a_layer_that_is_called_with_two_extents_and_parameters_that_are_shared(tmp_path):
    class Twice(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv, self.other = nn.Conv2d(1, 1, 3, padding=1), nn.Conv2d(1, 1, 3, padding=1)
            self.other.weight = self.conv.weight

        def forward(self, x):
            small = self.conv(F.avg_pool2d(x, 2))
            return self.conv(x) + self.other(F.interpolate(self.conv(small), scale_factor=2.0))

    check(seeded(Twice), torch.randn(1, 1, 64, 20), (1, 1, 4, 1), tmp_path, 0)


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

    check_x = torch.randn(1, 1, 300, 300)
    run = Run(Shows(), check_x, (1, 1, 3, 1), tmp_path, 0)
    want = nn.InstanceNorm2d(1)(check_x)
    torch.testing.assert_close(run.joined(want), want, rtol=1e-4, atol=1e-5)


def run_program(what, **arguments):
    command = [sys.executable, "-m", "tests.out_of_core.nets", what, json.dumps(arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)


@pytest.mark.in_turn(0)
@pytest.mark.parametrize(
    ("name", "net", "extents", "memory"),
    [
        ("u-net", {"norm": "none", "channels": 8}, (3000, 700), 160),
        ("u-net", {"norm": "instance", "channels": 8}, (3000, 700), 160),
        ("u-net", {"norm": "group", "channels": 4, "dims": 3, "classes": 20}, (160, 80, 80), 160),
        ("gated", {}, (2000, 1000), 160),
        ("attention", {}, (1280, 1280), 160),
        ("cumsum", {}, (2000, 2000), 160),
        ("flip", {}, (2000, 2000), 160),
        ("roll", {}, (2000, 2000), 160),
        ("unfold", {}, (1000, 1000), 160),
        ("fft", {}, (2000, 1000), 160),
        ("channels", {}, (1000, 1000), 160),
    ],
)
def test_the_process_grows_by_the_memory_at_most(name, net, extents, memory, tmp_path):
    options = {"memory": f"{memory}MiB", "scratch": str(tmp_path), "out": str(tmp_path / "y.npy")}
    found = run_program("measured", model=name, net=net, extents=extents, **options)
    assert found.returncode == 0, found.stderr
    facts = json.loads(found.stdout)
    assert facts["grown"] <= memory << 20, facts
    # The plan wastes no memory.
    assert facts["planned"] <= 1.6 * facts["grown"], facts


@pytest.mark.parametrize("norm", ["none", "instance"])
def test_a_prediction_that_is_killed_goes_on(norm, tmp_path):
    random.seed(norm)
    model = seeded(lambda: UNet(2, norm))
    x = torch.randn(2, 1, 240, 30)
    torch.save(x, tmp_path / "x.pt")
    want, slabs, out = whole(model, x), 8, tmp_path / "y.npy"
    arguments = {
        "net": {"norm": norm},
        "source": str(tmp_path / "x.pt"),
        "out": str(out),
        "grid": {"H": slabs},
    }
    total = 0
    # Two at once, and one slab at a time afterwards.
    for kill in random.sample(range(2, 7), 3) if norm == "none" else (slabs + 3,):
        found = run_program("killed", kill=kill, **arguments)
        assert found.returncode == -9, found.stderr
        assert not out.exists() and Path(f"{out}.part").exists()
        total += kill - 1
    found = run_program("killed", kill=-1, **arguments)
    assert found.returncode == 0, found.stderr
    reads = json.loads(found.stdout)["reads"]
    # In one pass no slab that was noted is read again.
    assert total + reads == 2 * slabs if norm == "none" else reads == slabs
    torch.testing.assert_close(torch.from_numpy(np.load(out)), want, rtol=1e-4, atol=1e-5)
    assert {each.name for each in tmp_path.iterdir()} == {"x.pt", "y.npy"}


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
    state.write_text(state.read_text().replace("[0, 1, 1]", "[0, 3, 3]"))
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


@pytest.mark.parametrize(
    "post", [lambda y: y.argmax(1)[0], lambda y: torch.cat([y, y.flip(3)]), lambda y: y.sum()]
)
def test_a_result_without_its_batch_dimension_is_refused(tmp_path, post):
    with pytest.raises(ShapeError, match="its first dimension is the batch"):
        predict(nn.Conv2d(1, 4, 3, padding=1), torch.randn(12, 8), tmp_path / "y.npy", post=post)
    assert not any(tmp_path.iterdir())


def test_complex_elements_are_not_made_real():
    with pytest.raises(ArgumentError, match="has complex elements"):
        predict(nn.Conv2d(1, 4, 3, padding=1), torch.randn(12, 8, dtype=torch.complex64))


def test_a_result_that_is_there_is_not_replaced(tmp_path):
    (tmp_path / "y.npy").touch()
    with pytest.raises(DataError, match="is there already"):
        predict(nn.Conv2d(1, 1, 1), torch.ones(1, 1, 4, 4), tmp_path / "y.npy")


def test_arguments_that_do_not_fit_are_refused(tmp_path):
    model, x = nn.Conv2d(1, 1, 3), torch.ones(1, 1, 64, 64)
    with pytest.raises(ShapeError, match=r"the source has shape \(4,\).*2 spatial dimensions"):
        predict(model, torch.ones(4))
    with pytest.raises(ArgumentError, match="a grid has the numbers of blocks"):
        predict(model, x, grid={"H": -1})
    with pytest.raises(ArgumentError, match="a grid cuts spatial dimensions"):
        predict(model, x, grid={"C": 2})
    with pytest.raises(ConfigurationError, match=r"memory=1\.0 MiB is too small"):
        predict(model, x, memory="1MiB")
    with pytest.raises(ConfigurationError, match="the memory"):
        predict(model, x, memory="much")
    with pytest.raises(DataError, match="is no folder"):
        predict(model, x, scratch=tmp_path / "missing")
    with pytest.raises(ArgumentError, match="choose it by post="):
        predict(_Pair(), x)
    with pytest.raises(ShapeError, match=r"the result has shape \(1, 1, 62, 62\)"):
        predict(model, x, np.zeros((1, 1, 64, 64), np.float32))
    with pytest.raises(ShapeError, match="elements of float64, the result of float32"):
        predict(model, x, np.zeros((1, 1, 62, 62)))
    with pytest.raises(ConfigurationError, match=r"takes a torch\.nn\.Module"):
        predict(lambda x: x, x)


class _Pair(nn.Module):
    def forward(self, x):
        return x, x


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
    text = str(plan)
    for part in (
        "(1500, 400), 1 sample",
        "along H",
        "passes    11: 10 functions need all slabs, in down.1, down.4",
        "the whole at once",
    ):
        assert part in text
    assert prod(plan.grid) == plan.slabs and plan.result == (3, 1500, 400)
    one = plan_prediction(seeded(lambda: UNet(2, "batch", 8)), x, memory="100MiB")
    assert one.passes == 1 and "slabs end one after the other" in str(one) and one.disk_nbytes == 0
