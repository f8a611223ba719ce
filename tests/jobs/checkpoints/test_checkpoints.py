"""A job goes on where it was saved, on any ranks, or all its ranks say why it cannot."""

import json
import os
import shutil
import signal
import threading

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import checkpoint as dcp

from distdl_rma import (
    CheckpointError,
    Checkpoints,
    ClosedError,
    ConfigurationError,
    DistributedGradScaler,
    Machine,
    MismatchError,
    PartitionError,
    ShapeError,
    SplitTensor,
    UnsupportedError,
    gather_state_dict,
    load_checkpoint,
    shard,
)
from distdl_rma.jobs.checkpoints import files
from distdl_rma.jobs.checkpoints.files import DATA, MANIFEST
from distdl_rma.layers.state import scattered
from tests.handles import files_up_to
from tests.jobs.checkpoints.training import OPTIMIZERS, Job, goes_on
from tests.layers.test_state import twins

pytestmark = [pytest.mark.mpi, pytest.mark.sizes(1, 2, 3, 4)]


@pytest.mark.parametrize("asynchronous", [False, True])
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_losses_are_those_of_the_job_that_was_not_killed(comm, folder, optimizer, asynchronous):
    alone = goes_on(comm, folder, optimizer, asynchronous)
    # One process, without ranks.
    last = Job(optimizer)
    assert load_checkpoint(folder, last.state) == 8
    torch.testing.assert_close(last.model.state_dict(), alone.model.state_dict())
    torch.testing.assert_close(last.optimizer.state_dict(), alone.optimizer.state_dict())
    average = Job(optimizer).model
    load_checkpoint(folder, torch.optim.swa_utils.AveragedModel(average, use_buffers=True), name="average")
    assert last.state["best"].tolist() == [6, 7, 8]
    comm.Barrier()


def trained(model, optimizer, cuts):
    """Two steps along gradients that are parts of the same whole ones."""
    for number in range(2):
        for key, p in model.named_parameters():
            shape = cuts[key].shape if key in cuts else p.shape
            draw = torch.Generator().manual_seed(100 * number + len(key) + sum(map(ord, key)))
            whole = torch.rand(shape, generator=draw, dtype=p.dtype)
            if key not in cuts:
                p.grad = whole
            elif p.numel():
                p.grad = whole[cuts[key].slices()].clone()
        optimizer.step()


@pytest.mark.parametrize("make", [OPTIMIZERS["Adam"], OPTIMIZERS["SGD"], OPTIMIZERS["AdamW, fused"]])
def test_parameters_that_ranks_hold_parts_of_become_those_of_any_others(P_world, comm, folder, make):
    (ours, alone), rank = twins(P_world), comm.rank
    state = {"model": ours, "optimizer": make(ours.parameters()), "scaler": DistributedGradScaler(P_world)}
    start = gather_state_dict(ours)
    alone.load_state_dict(start)
    reference = make(alone.parameters())
    trained(ours, state["optimizer"], scattered(ours))
    trained(alone, reference, {})
    with Checkpoints(folder, machine=P_world) as kept:
        kept.save(state, 5)
    # The sequential model.
    _, plain = twins(P_world)
    again = make(plain.parameters())
    assert load_checkpoint(folder, {"model": plain, "optimizer": again}) == 5
    # Fused kernels round the last elements of a block otherwise than those within.
    torch.testing.assert_close(plain.state_dict(), alone.state_dict(), rtol=1e-14, atol=1e-14)
    torch.testing.assert_close(again.state_dict(), reference.state_dict(), rtol=1e-14, atol=1e-14)
    comm.Barrier()
    # Other partitions, of fewer ranks.
    if rank < max(1, comm.size - 1):
        with Machine(comm, range(max(1, comm.size - 1))) as machine:
            fewer, _ = twins(machine.partition())
            optimizer = make(fewer.parameters())
            with Checkpoints(folder, machine=machine) as kept:
                assert kept.restore({"model": fewer, "optimizer": optimizer}) == 5
            trained(fewer, optimizer, scattered(fewer))
            trained(plain, again, {})
            found, wanted = gather_state_dict(fewer), dict(plain.state_dict())
            torch.testing.assert_close(found, wanted, rtol=1e-14, atol=1e-14)
    comm.Barrier()


def test_an_lbfgs_of_cut_parameters_is_refused_by_the_name_of_one(P_world, comm, kept):
    ours, whole = twins(P_world)[0], nn.Linear(1, 1)
    optimizer = torch.optim.LBFGS([*whole.parameters(), *ours.parameters()])
    state = {"model": ours, "whole": whole, "optimizer": optimizer}
    kept.save(state, 1)
    optimizer.state[whole.weight]["n_iter"] = 1
    if cut := [name for name, _ in ours.named_parameters() if name in scattered(ours)]:
        with pytest.raises(UnsupportedError, match=f"is an LBFGS, .* but '{cut[0]}' is cut over ranks"):
            kept.save(state, 2)
    assert cut or comm.size == 1


def test_split_tensors_go_into_another_layout(P_world, kept):
    whole = torch.arange(35.0).view(5, 7)
    grids = (P_world.size, 1), (1, P_world.size)
    rows, columns = map(P_world.create_cartesian_topology_partition, grids)
    kept.save({"x": shard(rows, whole)}, 1)
    found = shard(columns, torch.zeros(5, 7))
    assert kept.restore({"x": found}) == 1
    with pytest.raises(ShapeError, match=r"'x' is float32 of shape \(5, 7\)"):
        kept.restore({"x": shard(columns, torch.zeros(5, 8))})
    assert isinstance(found, SplitTensor)
    assert torch.equal(found.full_tensor(), whole)
    # Within other values: into the split tensor that is there, else whole.
    kept.save({"x": [shard(rows, whole + 1)]}, 2)
    assert kept.restore({"x": [found]}) == 2
    assert torch.equal(found.full_tensor(), whole + 1)
    assert kept.restore(state := {"x": None}) == 2
    assert torch.equal(state["x"][0], whole + 1)


def test_every_byte_is_read_by_one_rank(P_world, comm, monkeypatch, kept):
    ours, _ = twins(P_world)
    state = {"model": ours, "more": torch.rand(1 << 20), "odd": torch.rand(3, 7).bfloat16()}
    reads = []
    file = kept.save(state, 1) / DATA
    real = os.preadv
    monkeypatch.setattr(os, "preadv", lambda *a: reads.append(real(*a)) or reads[-1])
    kept.restore(state)
    assert file.stat().st_size * 0.97 < comm.allreduce(sum(reads)) <= 1.02 * file.stat().st_size


class Odd(nn.Module):
    """Tensors that cannot all be filled where they are: with two names, gaps, or lazy signs."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(300, 200)
        self.tied = nn.Linear(300, 200)
        self.tied.weight = self.first.weight
        self.gaps = nn.Parameter(torch.rand(200, 300).T)
        self.register_buffer("count", torch.rand(1 << 18).bfloat16())
        self.register_buffer("conjugate", torch.rand(5, dtype=torch.complex64).conj())
        self.register_buffer("negative", torch.rand(5, dtype=torch.complex64).conj().imag)
        self.register_buffer("one", torch.rand(5, 2)[:1, 1])
        self.register_buffer("tensor", torch.rand(3))


def test_weights_are_restored_where_they_are(P_world, kept):
    torch.manual_seed(1)
    model = Odd()
    wanted = {key: x.clone() for key, x in model.state_dict().items()}
    places = {key: x.data_ptr() for key, x in model.state_dict().items()}
    kept.save({"model": model}, 1)
    with torch.no_grad():
        for x in model.state_dict().values():
            x.fill_(P_world.me)
    kept.restore({"model": model})
    for key, x in model.state_dict().items():
        assert torch.equal(x, wanted[key])
        assert x.data_ptr() == places[key]


def test_old_ones_go_after_a_new_one_is_complete(P_world, folder):
    state = {"x": torch.zeros(2)}
    with Checkpoints(folder, keep=2, every=10, machine=P_world) as kept:
        assert kept.restore(state) == 0
        assert [step for step in range(45) if kept.due(step) and kept.save(state, step)] == [10, 20, 30, 40]
        kept.save(state, 40)
        kept.wait()
        assert sorted(path.name for path in folder.iterdir()) == ["step-30", "step-40"]
        state["x"] += 1
        kept.save(state, 40)
        assert kept.restore(other := {"x": torch.zeros(2)}) == 40
        assert other["x"].tolist() == [1, 1]
        assert kept.restore(other, step=30) == 30
        assert other["x"].tolist() == [0, 0]
        P_world.home.group().barrier()
        # A job was killed while a new one took its place.
        if P_world.me == 0:
            (folder / "step-40").rename(folder / "step-40.old")
        P_world.home.group().barrier()
        for step in (None, 40):
            assert kept.restore(other, step=step) == 40
            assert other["x"].tolist() == [1, 1]
        kept.save(state, 50)
        kept.wait()
        assert sorted(path.name for path in folder.iterdir()) == ["step-40.old", "step-50"]
    with pytest.raises(ClosedError):
        kept.save(state, 50)


@pytest.mark.parametrize("asynchronous", [False, True])
def test_different_copies_are_no_checkpoint(P_world, comm, folder, asynchronous):
    state = {"s": {"x": torch.ones(1 << 17), "y": torch.zeros(3)}}
    with Checkpoints(folder, machine=P_world, asynchronous=asynchronous) as kept:
        kept.save(state, 1)
        if comm.rank == comm.size - 1:
            state["s"]["x"][5] += 1
        if comm.size > 1:
            words = rf"'s/x', which ranks .* hold: .* on rank 0, but .* on rank {comm.size - 1}"
            with pytest.raises(MismatchError, match=words):
                kept.save(state, 2)
        assert kept.restore(state) == 1
        assert [each.name for each in folder.iterdir()] == ["step-1"]
        assert state["s"]["x"].eq(1).all()


@pytest.mark.processes
@pytest.mark.parametrize("stop_on", [signal.SIGUSR1, [signal.SIGUSR1]])
def test_a_signal_of_one_rank_stops_all(P_world, comm, folder, stop_on):
    before = signal.getsignal(signal.SIGUSR1)
    with Checkpoints(folder, stop_on=stop_on, machine=P_world) as kept:
        assert not kept.due(1)
        assert not kept.stopping
        if comm.rank == comm.size - 1:
            os.kill(os.getpid(), signal.SIGUSR1)
        assert kept.due(2)
        assert kept.stopping
    assert signal.getsignal(signal.SIGUSR1) is before


@pytest.mark.processes
def test_no_handler_stays_after_an_error(P_world, folder):
    before = signal.getsignal(signal.SIGUSR1)
    for path, signals in ((folder / "a" / "b", signal.SIGUSR1), (folder, [signal.SIGUSR1, signal.SIGKILL])):
        with pytest.raises(CheckpointError):
            Checkpoints(path, stop_on=signals, machine=P_world)
        assert signal.getsignal(signal.SIGUSR1) is before
    with pytest.raises(ValueError, match="mine"), Checkpoints(folder, stop_on=signals[0], machine=P_world):
        raise ValueError("mine")
    assert signal.getsignal(signal.SIGUSR1) is before


def test_asynchronous_saves_hold_the_state_of_their_call(P_world, folder):
    state = {"x": torch.zeros(1 << 16), "y": torch.zeros(5)}
    with Checkpoints(folder, keep=None, asynchronous=True, machine=P_world) as kept:
        for step in range(1, 7):
            for x in state.values():
                x.fill_(step)
            kept.save(state, step)
            for x in state.values():
                x.fill_(-1)
        kept.wait()
        for step in range(1, 7):
            assert kept.restore(state, step=step) == step
            assert all((x == step).all() for x in state.values())


@pytest.mark.processes
def test_an_error_of_an_earlier_save_leaves_nothing_of_a_later_one(P_world, folder, monkeypatch):
    real, go_on = files.write, threading.Event()

    def write(path, pieces):
        if path.name == "step-1":
            go_on.wait()
            raise OSError("the disk is gone")
        return real(path, pieces)

    monkeypatch.setattr(files, "write", write)
    with Checkpoints(folder, asynchronous=True, machine=P_world) as kept:
        for step in (1, 2):
            kept.save({"x": torch.ones(9)}, step)
        timer = threading.Timer(0.3, go_on.set)
        timer.start()
        with pytest.raises(CheckpointError, match="the disk is gone"):
            kept.save({"x": torch.ones(9)}, 3)
        kept.wait()
        assert [path.name for path in folder.iterdir()] == ["step-2"]
    timer.join()


def change(comm, path, edit):
    """Let one rank change a file, or remove it."""
    if comm.rank == 0 and edit is None:
        path.unlink()
    elif comm.rank == 0:
        path.write_bytes(edit(bytearray(path.read_bytes())))
    comm.Barrier()


def flipped(at):
    def edit(data):
        data[at] ^= 4
        return data

    return edit


@pytest.mark.parametrize(
    ("file", "edit", "said"),
    [
        (DATA, flipped(-1), r"data.safetensors is damaged: the checksum of 'x/value'"),
        (DATA, flipped(20), r"data.safetensors is damaged: the checksum of its head"),
        (DATA, lambda data: data[:-7], r"data.safetensors is damaged: it has \d+ bytes instead of \d+"),
        (DATA, None, r"data.safetensors is damaged: it is missing"),
        (MANIFEST, lambda data: data[:-7], r"manifest.json is damaged: it is no manifest"),
        *((MANIFEST, lambda _, text=text: text, r"manifest.json is damaged: it is no manifest") for text in (
            b"[" * 100_000, b'{"a":' * 100_000, "{}".encode("utf-16"), bytes(99), b"5", b'{"body": 1}',
        )),
        (MANIFEST, lambda data: data.replace(b'"step": 2', b'"step": 3'), r"its checksum does not fit"),
        (MANIFEST, lambda data: data.replace(b'"version": 1', b'"version": 9'), r"is of version 9.*damaged"),
    ],
)  # fmt: skip
def test_damage_is_named_on_all_ranks_and_nothing_is_changed(comm, folder, file, edit, said, kept):
    state = {"x": torch.full((50,), 1.0), "n": 1}
    kept.save(state, 1)
    path = kept.save({"x": torch.full((50,), 2.0), "n": 2}, 2)
    change(comm, path / file, edit)
    with pytest.raises(CheckpointError, match=said) as error:
        kept.restore(state)
    assert "version" in said or f"the one before it is {folder / 'step-1'}" in str(error.value)
    assert state["x"].eq(1).all()
    assert state["n"] == 1
    assert kept.restore(state, step=1) == 1


def test_half_written_ones_are_passed_over(P_world, comm, folder, kept):
    state = {"x": torch.zeros(50)}
    path = kept.save(state, 1)
    if comm.rank == 0:
        shutil.copytree(path, folder / "step-2.tmp")
        shutil.copytree(path, folder / "step-3")
        (folder / "step-3" / MANIFEST).unlink()
        (folder / "step-5").mkdir()
        (folder / "step-5" / ".metadata").touch()  # of torch.distributed.checkpoint
    comm.Barrier()
    assert kept.restore(state) == 1
    with Checkpoints(folder, machine=P_world) as again:
        again.save(state, 4)
        assert sorted(each.name for each in folder.iterdir()) == ["step-1", "step-4", "step-5"]


def test_another_model_is_refused_by_its_keys_and_shapes(P_world, kept):
    job, wider = Job(partition=P_world), Job(partition=P_world, width=5)
    job.steps(1)
    other, sgd = nn.Sequential(nn.Linear(1, 1)), torch.optim.SGD(job.model.parameters())
    kept.save(job.state, 1)
    before = {key: x.clone() for key, x in wider.model.state_dict().items()}
    for state, error, words in (
        (wider.state, ShapeError, r"step-1: 'model: first.weight' is float64 of shape \(4, 1, 3, 3\) in it"),
        (wider.state, ShapeError, r"in it, and float64 of shape \(5, 1, 3, 3\) here"),
        ({"model": other}, CheckpointError, r"it is not of the model 'model': it lacks '0.weight' \(fl"),
        ({"model": other}, CheckpointError, r"shape \(1,\)\), and has 'first.weight' \(float64 of .* more"),
        ({"model": job.model, "optimizer": sgd}, CheckpointError, "'optimizer' is Adam in it, and SGD"),
        ({"critic": job.model}, CheckpointError, r"it has no 'critic', only \['average'"),
        ({"loader": 3}, CheckpointError, r"'loader' is an object with state_dict\(\), or"),
        ({"optimizer": job.optimizer}, PartitionError, "parameter of no model in the state"),
        (job.model, ConfigurationError, r"a state is a dict such as {'model': model}, got a 'Net'"),
    ):
        with pytest.raises(error, match=words):
            kept.restore(state)
    assert all(torch.equal(x, before[key]) for key, x in wider.model.state_dict().items())
    job.close()
    wider.close()


def test_all_ranks_restore_the_same_objects(P_world, comm, folder, kept):
    model = Job(partition=P_world).model
    optimizer = torch.optim.Adam(model.parameters())
    kept.save({"net": model, "optimizer": optimizer}, 1)
    if comm.size > 1:
        state = {"net": model} | ({"optimizer": optimizer} if comm.rank else {})
        with pytest.raises(MismatchError, match=r"names of the state: \['net'\] on rank 0, but \['net', "):
            kept.restore(state)
    kept.save({"x": 1}, 2)
    with pytest.raises(CheckpointError, match=r"it has no 'model', only \['x'\]"):
        load_checkpoint(folder, nn.Linear(1, 1))
    comm.Barrier()


@pytest.mark.parametrize("failing", ["state_dict", "load_state_dict"])
def test_an_object_that_refuses_its_state_leaves_the_others_as_they_were(comm, failing, kept):
    class Fails:
        saved = False

        def state_dict(self):
            return self.called("state_dict")

        def load_state_dict(self, state):
            self.called("load_state_dict")

        def called(self, name):
            if self.saved and name == failing and comm.rank == comm.size - 1:
                raise KeyError("mine")
            return {}

    job, fails = Job(), Fails()
    state = job.state | {"fails": fails}
    kept.save(state, 1)
    fails.saved = True
    job.steps(1)
    state["epoch"] = 5
    with pytest.raises(CheckpointError, match=r"KeyError: .mine"):
        kept.restore(state)
    assert state["loader"].at == 1
    assert state["epoch"] == 5


def test_what_cannot_be_saved_is_refused_on_all_ranks(comm, kept):
    odd = object() if comm.rank == comm.size - 1 else 3
    differing = [
        ({"y": comm.rank}, 2, MismatchError, "'y' is not alike on ranks 0 and"),
        ({"y": torch.zeros(comm.rank)}, 2, MismatchError, r"'y/value' is .* on rank 0"),
    ]
    kept.save({"x": 1}, 1)
    for state, step, error, words in (
        ({"y": odd}, 2, UnsupportedError, "'y' is a object, which has no form"),
        ({"x": 1}, -1, ConfigurationError, "step is an integer, at least 0, got -1"),
        (nn.Linear(1, 1), 2, ConfigurationError, "a state is a dict such as {'model': model}, got a 'Lin"),
        ({(1, comm.rank): 1}, 2, UnsupportedError, r"names of the state are strings, got \(1, "),
        *(differing if comm.size > 1 else []),
    ):
        with pytest.raises(error, match=words):
            kept.save(state, step)
    if comm.size > 1:
        with pytest.raises(MismatchError, match="at steps from 0 to"):
            kept.due(comm.rank)
    with pytest.raises(ConfigurationError, match=r"at least 0, (got -1|another rank got)"):
        kept.due(-1 if comm.rank == comm.size - 1 else 3)
    assert kept.restore({"x": 0}) == 1


def test_arguments_are_checked_and_compared(P_world, comm, folder):
    other, signals = folder.with_name(f"run-{comm.rank}"), "stop_on is a signal or several, such as"
    for path, options, error, words in (
        (folder, {"every": 0}, ConfigurationError, "every is at least 1 or None, got 0"),
        (folder / "a" / "b", {}, CheckpointError, "its parent exists"),
        *((folder, {"stop_on": wrong}, ConfigurationError, signals) for wrong in ("SIGUSR1", 10**6, [None])),
        (other, {}, ConfigurationError, r"folder: .*run-0 on rank 0, but .*run-1 on rank 1"),
    )[: None if comm.size > 1 else -1]:
        with pytest.raises(error, match=words):
            Checkpoints(path, **options, machine=P_world)


@pytest.mark.parametrize("asynchronous", [False, True])
@pytest.mark.processes
def test_a_disk_that_is_full_for_one_rank_is_an_error_on_all(P_world, comm, folder, asynchronous):
    state = {"x": torch.ones(1 << 18)}
    with Checkpoints(folder, asynchronous=asynchronous, machine=P_world) as kept:
        kept.save(state, 1)
        kept.wait()
        words = r"data.safetensors failed: .*File too large; .*check space"
        limit = 1 << 19 if comm.rank == comm.size - 1 else None
        with files_up_to(limit), pytest.raises(CheckpointError, match=words):
            _ = kept.save(state, 2), kept.wait()
        assert [path.name for path in folder.iterdir()] == ["step-1"]
        state["x"].zero_()
        assert kept.restore(state) == 1
        assert state["x"].eq(1).all()
        kept.save(state, 2)


def test_generators_that_differ_are_those_of_their_rank(comm, folder, kept):
    torch.manual_seed(comm.rank)
    kept.save({}, 1)
    wanted = torch.rand(3)
    assert kept.restore({}) == 1
    assert torch.equal(torch.rand(3), wanted)
    if comm.size > 1 and comm.rank == 0:
        with Machine(comm, [0]) as machine, Checkpoints(folder, machine=machine) as alone:
            with pytest.raises(UnsupportedError, match="seed all ranks alike"):
                alone.restore({})
            assert alone.restore({}, generators=False) == 1
    comm.Barrier()
    assert json.loads((folder / "step-1" / MANIFEST).read_text())["body"]["ranks"] == comm.size


@pytest.mark.processes
def test_torchs_checkpoint_saves_split_tensors_by_blocks_and_fills_other_layouts(comm, P_world, folder):
    dist.init_process_group("rma")
    n, whole = P_world.size, torch.arange(15.0).view(3, 5)
    rows, columns = map(P_world.create_cartesian_topology_partition, ((n, 1), (1, n)))
    saved = {"cut": shard(rows, whole), "copies": shard(rows, whole + 1).redistribute()}
    dcp.save(saved, checkpoint_id=folder)
    found = {"cut": shard(columns, torch.zeros(3, 5)), "copies": torch.zeros(3, 5)}
    dcp.load(found, checkpoint_id=folder)
    assert isinstance(found["cut"], SplitTensor)
    assert torch.equal(found["cut"].full_tensor(), whole)
    assert torch.equal(found["copies"], whole + 1)
    dcp.save({"cut": whole * 2}, checkpoint_id=folder.with_name("plain"))
    dcp.load(found := {"cut": shard(rows, torch.zeros(3, 5))}, checkpoint_id=folder.with_name("plain"))
    assert torch.equal(found["cut"].full_tensor(), whole * 2)
    dist.destroy_process_group()
