"""Products whose gradients are written where they are wanted."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812

from distdl_rma import GradientSync, Machine
from distdl_rma.layers import DistributedLinear, DistributedLinearAllGather, DistributedLinearReduceScatter
from distdl_rma.layers.ops.linear import LinearInPlaces
from tests.layers.ops.places import segment_of, watch

SHAPES = [(5,), (4, 5), (2, 3, 5), (0, 5), (2, 0, 5)]


def operands(shape, outputs=3, dtype=torch.float64):
    torch.manual_seed(1)
    shapes, drawn = (shape, (outputs, shape[-1]), (outputs,)), dtype if dtype.is_complex else torch.float32
    return [torch.randn(each, dtype=drawn).to(dtype).requires_grad_() for each in shapes]


@pytest.mark.parametrize(
    "dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.complex64]
)
@pytest.mark.parametrize("shape", [*SHAPES, (4, 0)])
def test_gradients_equal_torchs_and_are_written_to_the_places(shape, dtype):
    x, weight, bias = operands(shape, dtype=dtype)
    places = {"weight": torch.full_like(weight, 7.0), "bias": torch.full_like(bias, 7.0)}
    y = LinearInPlaces.apply(x, weight, bias, dict(places).pop)
    expected = F.linear(x, weight, bias)
    gradient = torch.randn_like(y)
    mine = torch.autograd.grad(y, (x, weight, bias), gradient)
    theirs = torch.autograd.grad(expected, (x, weight, bias), gradient)
    for actual, wanted in zip((y, *mine), (expected, *theirs), strict=True):
        torch.testing.assert_close(actual, wanted)
    assert [g.data_ptr() for g in mine[1:]] == [place.data_ptr() for place in places.values()]


def test_what_is_frozen_is_not_asked_for():
    for frozen in range(3):
        inputs = operands((4, 5))
        inputs[frozen].requires_grad_(False)
        asked = []
        LinearInPlaces.apply(*inputs, asked.append).sum().backward()
        assert asked == [key for at, key in ((1, "weight"), (2, "bias")) if at != frozen]
    asked.clear()
    x, weight, _ = operands((4, 5))
    LinearInPlaces.apply(x, weight, None, asked.append).sum().backward()
    assert asked == ["weight"]
    assert weight.grad is not None


def test_second_derivatives_are_torchs_and_write_to_no_place():
    inputs = operands((4, 5))
    product = lambda *t: LinearInPlaces.apply(*t, lambda _: pytest.fail("asked"))  # noqa: E731
    assert torch.autograd.gradgradcheck(product, inputs)


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("kind", [DistributedLinearAllGather, DistributedLinearReduceScatter])
@pytest.mark.parametrize("uses", [1, 2])
def test_gradients_of_copies_are_computed_in_the_segment_at_their_first_use(P_world, comm, kind, uses):
    P = P_world.create_cartesian_topology_partition((comm.size, 1))
    layer, twin = kind(P, 4, 4, dtype=torch.float64), nn.Linear(4, 4, dtype=torch.float64)
    twin.load_state_dict(layer.state_dict())
    sync = GradientSync(layer, P_world)
    taken, segment = watch(layer.placed), segment_of(Machine.of(P_world))
    for step in range(4):
        x = torch.randn(2 * comm.size, 4, dtype=torch.float64)
        for module, data in ((layer, x[2 * comm.rank :][:2]), (twin, x)):
            # The last two steps add to what is there.
            if step < 2:
                module.zero_grad()
            for _ in range(uses):
                data = module(data)
            data.square().sum().backward()
        for key, parameter in layer.named_parameters():
            torch.testing.assert_close(parameter.grad, getattr(twin, key).grad)
            first, *others = taken[key][-uses:]
            assert others == [None] * (uses - 1)
            if step < 2:
                assert first == parameter.grad.data_ptr() in segment
    sync.close()


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("way", ["travelling", "autocast", "alone"])
def test_nothing_is_offered_but_for_the_parameter_itself(P_world, comm, way):
    P = P_world.create_cartesian_topology_partition((comm.size, 1))
    options = {"weights": "root"} if way == "travelling" else {}
    blocks = P_world.create_cartesian_topology_partition((comm.size, 1, 1))
    layer = DistributedLinear(P, P, blocks, 6, 4, **options)
    sync = None if way == "alone" else GradientSync(layer, P_world)
    taken = watch(layer.placed)
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=way == "autocast"):
        y = layer(torch.randn(2, 6))
    y.float().square().sum().backward()
    assert not any(taken.values())
    if sync is not None:
        sync.close()
