"""What distributed convolutions refuse, and that all ranks hear of it."""

import gc
import time

import pytest
import torch

from distdl_rma import Machine, ShapeError
from distdl_rma.layers import DistributedConv1d, DistributedConv2d

pytestmark = pytest.mark.mpi


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (torch.zeros(1, 3, 4, 5), r"rank 0 has .* and rank 1 has .* must agree in dimension 1"),
        (torch.zeros(1, 2, 4), "rank 1 has a tensor of 3 dimensions"),
        (torch.zeros(2, 2, 4, 5), "must agree in dimension 0"),
        (torch.zeros(1, 2, 4, 6), "must agree in dimension 3"),
        (
            torch.zeros(1, 2, 4, 5, dtype=torch.float64),
            "rank 0 passes torch.float32 but rank 1 torch.float64",
        ),
    ],
)
def test_wrong_input_on_one_rank_raises_the_same_error_on_all(P_world, comm, wrong, message):
    P_x = P_world.create_cartesian_topology_partition((1, 1, comm.size, 1))
    layer = DistributedConv2d(P_x, 2, 2, 3, padding=1, name="enc1.conv")
    good = torch.randn(1, 2, 4, 5)
    before = layer(good)
    with pytest.raises(ShapeError, match=f"'enc1.conv': .*{message}") as caught:
        layer(wrong if comm.rank == 1 else good)
    assert len(set(comm.allgather(str(caught.value)))) == 1
    assert torch.equal(layer(good), before), "the layer can be used again"


def test_input_that_no_window_fits_is_refused(P_world, comm):
    P_x = P_world.create_cartesian_topology_partition((1, 1, comm.size))
    layer = DistributedConv1d(P_x, 1, 1, 9)
    with pytest.raises(ShapeError, match=r"global input \(\d,\) is too small for kernel \(9,\)"):
        layer(torch.randn(1, 1, 1))


def refused(layer, x):
    """Whether a call is refused; what it raised holds no layer afterwards."""
    try:
        layer(x)
    except ShapeError:
        return True
    return False


@pytest.mark.mpi(min_size=2)
def test_a_layer_dropped_after_a_refused_call_gives_its_memory_back_once_all_edges_came(P_world, comm):
    # With two taps each rank reads the edge of the next one. All but the first have put theirs.
    P_x = P_world.create_cartesian_topology_partition((1, 1, comm.size))
    segments = Machine.of(P_x).segments
    layer = DistributedConv1d(P_x, 1, 1, 2, name="dropped")
    x = torch.randn(1, 1, 8)
    layer(x)
    assert refused(layer, x.double() if comm.rank == 0 else x)
    del layer
    gc.collect()
    deadline = time.monotonic() + 60
    while "dropped" in segments.stats().owners and time.monotonic() < deadline:
        segments.progress()
    assert "dropped" not in segments.stats().owners
