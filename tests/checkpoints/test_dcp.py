"""torch.distributed.checkpoint saves split tensors block by block, and fills those of other layouts."""

import pytest
import torch
import torch.distributed as dist
from torch.distributed import checkpoint as dcp

from distdl_rma import SplitTensor, shard
from tests.checkpoints.training import same_folder

pytestmark = [pytest.mark.mpi, pytest.mark.processes, pytest.mark.sizes(1, 2, 3, 4)]


@pytest.fixture
def group(comm, P_world):
    dist.init_process_group("rma")
    yield
    dist.destroy_process_group()


def test_blocks_of_one_layout_fill_those_of_another(comm, P_world, tmp_path, group):
    n, folder = P_world.size, same_folder(comm, tmp_path) / "dcp"
    rows, columns = (P_world.create_cartesian_topology_partition(shape) for shape in ((n, 1), (1, n)))
    whole = torch.arange(15.0).view(3, 5)
    dcp.save(
        {"cut": shard(rows, whole), "copies": shard(rows, whole + 1).redistribute()}, checkpoint_id=folder
    )
    found = {"cut": shard(columns, torch.zeros(3, 5)), "copies": torch.zeros(3, 5)}
    dcp.load(found, checkpoint_id=folder)
    assert isinstance(found["cut"], SplitTensor)
    assert torch.equal(found["cut"].full_tensor(), whole)
    assert torch.equal(found["copies"], whole + 1)
    dcp.save({"cut": whole * 2}, checkpoint_id=folder.with_name("plain"))
    dcp.load(found := {"cut": shard(rows, torch.zeros(3, 5))}, checkpoint_id=folder.with_name("plain"))
    assert torch.equal(found["cut"].full_tensor(), whole * 2)
