"""Parameters of a layer: over whom their gradients are summed, and who may take that over."""

import pytest
import torch
from torch import nn

from distdl_rma import ProtocolError
from distdl_rma.layers import DistributedConv2d, DistributedLinear
from tests.layers.partitioned.every_layer import local, rows

pytestmark = [pytest.mark.mpi, pytest.mark.sizes(1, 2, 3)]


def conv(P_world, **options):
    return DistributedConv2d(rows(P_world), 4, 4, 3, padding=1, **options)


@pytest.mark.mpi(min_size=2)
def test_initial_values_are_those_of_the_first_rank(P_world, comm):
    torch.manual_seed(comm.rank)
    for key, value in conv(P_world).named_parameters():
        assert torch.equal(value, torch.from_numpy(comm.bcast(value.detach().numpy()))), key


def test_the_layer_is_asked_once_and_its_user_in_every_call(P_world, comm):
    class Counting(DistributedConv2d):
        asked = 0

        def get_ranks_synch_weights(self):
            self.asked += 1
            return super().get_ranks_synch_weights()

    layer, asked = Counting(rows(P_world), 4, 4, 3, padding=1), []
    for _ in range(3):
        layer(local())
    assert layer.asked == 1
    # At any time, as an attribute.
    layer.get_ranks_synch_weights = lambda: asked.append(1) or [comm.rank]
    layer(local()).sum().backward()
    own = layer.weight.grad.clone()
    assert asked and layer.asked == 1
    del layer.get_ranks_synch_weights
    layer.zero_grad()
    layer(local()).sum().backward()
    assert comm.size == 1 or not torch.equal(own, layer.weight.grad)
    same = torch.from_numpy(comm.bcast(layer.weight.grad.numpy()))
    assert torch.equal(same, layer.weight.grad)


def test_what_is_taken_over_is_not_summed_and_fills_what_is_offered(P_world, comm):
    layer, memory = conv(P_world), torch.full((4, 4, 3, 3), 9.0)
    places = [memory, None]
    layer.placed.take_over("weight", layer.weight, lambda: places.pop(0))
    layer.placed.take_over("bias", layer.bias, lambda: None)
    layer(local() + comm.rank).sum().backward()
    assert torch.equal(memory, layer.weight.grad) and not places[1:]
    if comm.size > 1:
        assert len({grad.tobytes() for grad in comm.allgather(layer.weight.grad.numpy())}) > 1
    for key in ("weight", "bias", "bias"):
        layer.placed.let_go(key)
    layer.zero_grad()
    layer(local() + comm.rank).sum().backward()
    assert len({grad.tobytes() for grad in comm.allgather(layer.weight.grad.numpy())}) == 1


def test_a_parameter_that_nobody_took_over_is_refused_beside_others(P_world):
    layer = conv(P_world)
    layer.placed.take_over("weight", layer.weight, lambda: None)
    with pytest.raises(ProtocolError, match="unfrozen or replaced"):
        layer(local())
    layer.bias.requires_grad_(False)
    layer(local())
    layer.weight = nn.Parameter(layer.weight.detach().clone())
    with pytest.raises(ProtocolError, match="unfrozen or replaced"):
        layer(local())


@pytest.mark.mpi(min_size=2)
def test_what_travels_is_used_where_it_is_needed_and_its_gradient_comes_back(P_world, comm):
    P_W = P_world.create_cartesian_topology_partition((comm.size, 1, 1))
    P_b = P_world.create_cartesian_topology_partition((comm.size, 1))
    layer = DistributedLinear(P_b, P_b, P_W, 3, 2, placement="root")
    used = layer.placed.use()
    assert {key: value.shape for key, value in used.items()} == {"weight": (2, 3), "bias": (2,)}
    (used["weight"] * (comm.rank + 1)).sum().backward()
    if comm.rank == 0:
        assert torch.equal(layer.weight.grad, torch.full((2, 3), float(sum(range(1, comm.size + 1)))))
