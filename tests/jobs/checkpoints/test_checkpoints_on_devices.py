"""A job goes on from the host to a device and back, on any ranks; its state stays where the job has it."""

from __future__ import annotations

import pytest
import torch

from distdl_rma import (
    Checkpoints,
    DistdlError,
    Machine,
    MismatchError,
    UnsupportedError,
    gather_state_dict,
    load_checkpoint,
    load_global_state_dict,
    shard,
)
from distdl_rma.geometry.decomposition import Decomposition
from distdl_rma.layers.ops.set_up_transfer import gather_whole
from tests.fake_device import counted, needs_fake_device, traffic
from tests.jobs.checkpoints.training import Job, goes_on

pytestmark = [
    pytest.mark.mpi,
    needs_fake_device,
    pytest.mark.filterwarnings("ignore:An output with one or more elements was resized"),
]


@pytest.mark.parametrize("asynchronous", [False, True])
@pytest.mark.parametrize("optimizer", ["Adam", "SGD"])
def test_a_job_goes_on_from_the_host_to_a_device_and_back(comm, folder, device, optimizer, asynchronous):
    alone = goes_on(comm, folder, optimizer, asynchronous, ["cpu", device, device, "cpu"])
    last = Job(optimizer, device=device)
    assert load_checkpoint(folder, last.state) == 8
    assert {x.device.type for x in last.tensors()} == {device.type}
    for one, other in zip(last.tensors(), alone.tensors(), strict=True):
        torch.testing.assert_close(one.detach().cpu(), other.detach())
    comm.Barrier()


def test_an_asynchronous_save_copies_each_byte_once_but_for_the_comparison(P_world, comm, folder, device):
    model = torch.nn.Linear(512, 64).to(device)
    x = shard({"H": -1}, torch.rand(1, 1, 24, 16).to(device))
    nbytes = sum(p.nbytes for p in model.parameters())
    with Checkpoints(folder, asynchronous=True, machine=P_world) as kept:
        with counted() as moved:
            kept.save({"model": model, "field": x}, 1)
        share = -(-nbytes // comm.size)
        assert moved.down_nbytes <= nbytes + share + x.to_local().nbytes + 16
        assert moved.ups == 0
        before, field = model.weight.detach().cpu(), x.full_tensor().cpu()
        with torch.no_grad():
            model.weight.zero_()
            x.zero_()
        kept.restore({"model": model, "field": x})
    assert x.device == model.weight.device == device
    assert torch.equal(model.weight.detach().cpu(), before)
    assert torch.equal(x.full_tensor().cpu(), field)


def test_the_generator_of_a_device_goes_on_too(comm, folder, kept, device):
    state, values = {"x": torch.zeros(2).to(device)}, {"x": torch.zeros(2)}
    torch.manual_seed(5)
    drawn = torch.fake.get_rng_state()
    kept.save(state, 1)
    torch.manual_seed(6)
    kept.restore(values)
    assert not torch.equal(torch.fake.get_rng_state(), drawn)
    kept.restore(state)
    assert torch.equal(torch.fake.get_rng_state(), drawn)
    # One of another number of ranks, each with its own.
    torch.fake.manual_seed_all(comm.rank)
    kept.save(state, 2)
    kept.restore(state)
    if comm.size > 1 and comm.rank == 0:
        with Machine(comm, [0]) as machine, Checkpoints(folder, machine=machine) as alone:
            with pytest.raises(UnsupportedError, match="cannot go on with them"):
                alone.restore(state)
            assert alone.restore(state, generators=False) == 2
    comm.Barrier()


@pytest.mark.mpi(min_size=2)
def test_tensors_that_are_on_a_device_on_one_rank_only_are_not_saved(comm, kept, device):
    x = torch.zeros(2)
    with pytest.raises(MismatchError, match=r"devices of tensors: \[\] on rank 0, but \['fake'\] on rank"):
        kept.save({"x": x.to(device) if comm.rank == comm.size - 1 else x}, 1)
    assert kept.save({"x": x}, 1).name == "step-1"


def test_a_state_dict_is_gathered_and_loaded_on_its_device(P_world, comm, device):
    job = Job("SGD", P_world, device=device)
    state = gather_state_dict(job.model)
    assert {value.device for value in state.values()} == {device}
    with torch.no_grad():
        job.model.first.weight.zero_()
    load_global_state_dict(job.model, {key: value.cpu() for key, value in state.items()})
    assert job.model.first.weight.device == device
    assert torch.equal(job.model.first.weight.detach().cpu(), state["first.weight"].cpu())
    job.close()
    whole = torch.arange(35.0).view(7, 5)
    rows = P_world.create_cartesian_topology_partition((comm.size, 1))
    parts = Decomposition.balanced(rows, (7, 5))
    for takers in (P_world, P_world.create_partition_inclusive([0])):
        found = gather_whole(P_world.home, parts, takers, whole[parts.slices()].to(device), "a table")
        assert found.device == device
        assert torch.equal(found.cpu(), whole if takers.active else whole.new_empty(0))


def test_a_device_that_is_full_on_one_rank_is_an_error_on_all_wherever_the_save_is(comm, kept, device):
    model = torch.nn.Linear(2, 1).to(device)
    last, refusals = comm.rank == comm.size - 1, []
    for room in range(0, 60, 3):
        traffic().room = room if last else float("inf")
        try:
            kept.save({"model": model}, room)
        except DistdlError as error:
            refusals.append(str(error))
        finally:
            traffic().room = float("inf")
    assert all("OutOfMemoryError" in text for text in refusals)
    assert 0 < len(refusals) < 20 and len({*comm.allgather(len(refusals))}) == 1
    kept.save({"model": model}, 60)
