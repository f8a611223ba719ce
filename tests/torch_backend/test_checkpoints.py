"""Distributed checkpoints on our group: written by some ranks, read by another number of them."""

import shutil
import tempfile
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from tests.torch_backend import nets
from tests.torch_backend.backends import process_group

pytestmark = [pytest.mark.mpi, pytest.mark.sizes(2, 3, 4)]


@contextmanager
def shared_folder(comm):
    """A folder that all ranks see."""
    folder = comm.bcast(tempfile.mkdtemp() if comm.rank == 0 else None)
    try:
        yield Path(folder)
    finally:
        comm.Barrier()
        if comm.rank == 0:
            shutil.rmtree(folder)


def sharded(mesh=None):
    model = nets.sharded(mesh)
    return model, torch.optim.Adam(model.parameters(), lr=0.01)


def train(model, optimizer, steps):
    nets.steps(model, [nets.batch(0, step) for step in steps], optimizer)


@pytest.mark.mpi(min_size=2)
def test_training_goes_on_on_fewer_ranks(comm):
    fewer = list(range(comm.size - 1))
    with process_group(comm), shared_folder(comm) as folder:
        model, optimizer = sharded()
        train(model, optimizer, range(2))
        weights, state = get_state_dict(model, optimizer)
        dcp.save({"model": weights, "optimizer": state}, checkpoint_id=folder)
        train(model, optimizer, range(2, 4))
        expected = nets.whole(model)

        group = dist.new_group(fewer)
        if comm.rank in fewer:
            model, optimizer = sharded(DeviceMesh.from_group(group, "cpu"))
            weights, state = get_state_dict(model, optimizer)
            dcp.load({"model": weights, "optimizer": state}, checkpoint_id=folder, process_group=group)
            set_state_dict(model, optimizer, model_state_dict=weights, optim_state_dict=state)
            train(model, optimizer, range(2, 4))
            torch.testing.assert_close(nets.whole(model), expected)


@pytest.mark.mpi(min_size=2)
def test_saving_while_training_goes_on(comm):
    values = torch.arange(35.0).reshape(7, 5)
    with process_group(comm), shared_folder(comm) as folder:
        mesh = init_device_mesh("cpu", (comm.size,))
        x = distribute_tensor(values, mesh, [Shard(0)])
        # A thread saves: it needs a group of its own, as with any backend.
        saving = dcp.async_save({"x": x}, checkpoint_id=folder, process_group=dist.new_group())
        for _ in range(5):
            ones = torch.ones(3)
            dist.all_reduce(ones)
            assert ones.tolist() == [comm.size] * 3
        saving.result()
        state = {"x": distribute_tensor(torch.zeros(7, 5), mesh, [Shard(1)])}
        dcp.load(state, checkpoint_id=folder)
        torch.testing.assert_close(state["x"].full_tensor(), values, rtol=0, atol=0)
