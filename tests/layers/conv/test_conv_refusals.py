"""What distributed convolutions refuse, and that all ranks hear of it."""

import gc
import time

import pytest
import torch

from distdl_rma import ArgumentError, Machine, PartitionError, ShapeError, UnsupportedError
from distdl_rma.layers import DistributedConv1d, DistributedConv2d

pytestmark = pytest.mark.mpi


@pytest.mark.filterwarnings("ignore:Initializing zero-element tensors:UserWarning")
def test_rules_are_checked_at_construction(P_world, comm):
    line = P_world.create_cartesian_topology_partition((1, 1, comm.size))
    with pytest.raises(PartitionError, match=r"P_x has 3 dimensions .* the tensor has 4"):
        DistributedConv2d(line, 1, 1, 3)
    with pytest.raises(ArgumentError, match="placement is one of"):
        DistributedConv1d(line, 1, 1, 3, weights="sharded")
    with pytest.raises(ArgumentError, match="DistributedConv1d: in_channels must be divisible by groups"):
        DistributedConv1d(line, 3, 3, 3, groups=2)
    with pytest.raises(ArgumentError, match="DistributedConv1d: padding_mode must be one of"):
        DistributedConv1d(line, 1, 1, 3, padding_mode="mirror")
    with pytest.raises(
        ArgumentError, match="DistributedConv1d: kernel, stride and dilation must be at least 1"
    ):
        DistributedConv1d(line, 1, 1, 3, stride=0)
    with pytest.raises(ArgumentError, match="DistributedConv1d: stride needs 1 numbers"):
        DistributedConv1d(line, 1, 1, 3, stride=(1, 2))
    with pytest.raises(ArgumentError, match="needs channels, got 1 in and 0 out"):
        DistributedConv1d(line, 1, 0, 3)
    with pytest.raises(PartitionError, match="P_W is given twice"):
        DistributedConv1d(line, line, line, 1, 1, 3, P_w=line)
    with pytest.raises(PartitionError, match="takes P_x, P_y and P_W, got 4 partitions"):
        DistributedConv1d(line, line, line, line, 1, 1, 3)
    with pytest.raises(PartitionError, match="P_W has 1 dimensions"):
        DistributedConv1d(line, line, P_world, 1, 1, 3)
    with pytest.raises(UnsupportedError, match=r"dtype torch\.complex64 is not supported"):
        DistributedConv1d(line, 1, 1, 3, dtype=torch.complex64)
    with pytest.raises(UnsupportedError, match="device meta is not supported"):
        DistributedConv1d(line, 1, 1, 3, device="meta")


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


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (torch.zeros(1, 3, 4, 5), r"rank 0 has .* and rank 1 has .* must agree in dimension 1"),
        (torch.zeros(1, 2, 4), "rank 1 has a tensor of 3 dimensions"),
        (torch.zeros(1, 2, 3, 5), "must agree in dimension 2"),
        (torch.zeros(1, 2, 4, 5).double(), "rank 0 passes torch.float32 but rank 1 torch.float64"),
    ],
)
def test_wrong_input_in_one_block_of_the_batch_is_refused_on_all(P_world, comm, wrong, message):
    P_x = P_world.create_cartesian_topology_partition((comm.size, 1, 1, 1))
    layer = DistributedConv2d(P_x, 2, 2, 3, padding=1)
    good = torch.randn(1, 2, 4, 5)
    layer(good).sum().backward()
    with pytest.raises(ShapeError, match=message) as caught:
        layer(wrong if comm.rank == 1 else good).sum().backward()
    assert len(set(comm.allgather(str(caught.value)))) == 1
    layer(good[: comm.rank]).sum().backward()


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
