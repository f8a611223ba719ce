"""Modes of norms with running statistics, which all ranks must have in common."""

import gc

import pytest
import torch

from distdl_rma import MismatchError
from distdl_rma.layers import DistributedBatchNorm1d, DistributedInstanceNorm1d

pytestmark = pytest.mark.mpi(min_size=2)


@pytest.mark.parametrize("kind", [DistributedBatchNorm1d, DistributedInstanceNorm1d])
@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda layer: layer.eval(),
            "with momentum 0.1 but rank 1 normalises by .*earlier batches",
        ),
        (lambda layer: setattr(layer, "momentum", 0.5), "momentum 0.1 but rank 1 .*with momentum 0.5"),
        (lambda layer: setattr(layer, "eps", 0.5), "with eps 1e-05 .*but rank 1 .*with eps 0.5"),
    ],
)
def test_modes_that_differ_are_refused_on_all_ranks_and_count_nothing(P_world, comm, kind, change, message):
    P_x = P_world.create_cartesian_topology_partition((1, 1, comm.size))
    layer = kind(P_x, 3, track_running_stats=True)
    x = torch.randn(2, 3, 4)
    layer(x)
    state = {key: value.clone() for key, value in layer.state_dict().items()}
    if comm.rank == 1:
        change(layer)
    with pytest.raises(MismatchError, match=message) as caught:
        layer(x)
    assert len(set(comm.allgather(str(caught.value)))) == 1
    for key, value in layer.state_dict().items():
        assert torch.equal(value, state[key]), key


def test_evaluation_needs_no_memory_for_statistics(P_world, comm):
    P_x = P_world.create_cartesian_topology_partition((1, 1, comm.size))
    layer = DistributedBatchNorm1d(P_x, 3).eval()
    layer(torch.randn(2, 3, 4))
    # Layers of earlier tests may still be garbage.
    gc.collect()
    used = layer.machine.segments.stats().used
    layer(torch.randn(2, 3, 5))
    assert layer.machine.segments.stats().used == used
