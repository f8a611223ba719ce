"""What convolutions and transposed ones share: where their weights are, and how they are printed."""

import pytest

from distdl_rma.layers import DistributedConv1d, DistributedConvTranspose1d

pytestmark = pytest.mark.mpi
each_layer = pytest.mark.parametrize("kind", [DistributedConv1d, DistributedConvTranspose1d])


def line(P_world):
    return P_world.create_cartesian_topology_partition((1, 1, P_world.size))


@each_layer
def test_weights_and_placement_are_one_argument_by_two_names(P_world, comm, kind):
    P_x = line(P_world)
    for named in ({"placement": "root"}, {"weights": "root"}, {"placement": "root", "weights": "root"}):
        layer = kind(P_x, 2, 2, 3, **named)
        assert layer.placement == layer.weights == "root"
        assert layer.weight.numel() == (12 if comm.rank == 0 else 0)


@each_layer
def test_only_what_is_not_usual_of_a_placement_is_printed(P_world, kind):
    P_x = line(P_world)
    assert "placement" not in repr(kind(P_x, 2, 2, 3))
    shown = repr(kind(P_x, P_x, P_x, 2, 2, 3, placement="root", bias=False))
    for part in (
        "2, 2, kernel_size=(3,), stride=(1,), padding=(0,)",
        "bias=False",
        f"P_x={P_x.shape}",
        f"P_W={P_x.shape}",
        "placement='root'",
    ):
        assert part in shown
