"""What holds for all layers of windows: their outputs equal those of the whole, and errors are everywhere."""

import pytest
import torch

from distdl_rma import layers
from tests.fuzz.pooling import check
from tests.layers.sequential import shard
from tests.layers.windows.kinds_of_pooling import image, kinds, layer_of, rows, sequential
from tests.matrix import check_each, over_seeds

pytestmark = pytest.mark.mpi


@kinds
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_short_types_are_rounded_once(P_world, kind, dtype):
    P_x = rows(P_world)
    x = image(dtype)
    expected = sequential(kind)(x)
    local = shard(P_x, x).requires_grad_()
    y = layer_of(kind, P_x)(local)
    assert y.dtype == dtype
    tolerance = {torch.bfloat16: 1e-2, torch.float16: 1e-3}[dtype]
    torch.testing.assert_close(y, shard(P_x, expected), rtol=tolerance, atol=tolerance)
    exact = sequential(kind)(x.double())
    assert ((y.double() - shard(P_x, exact)).abs() <= torch.finfo(dtype).eps * shard(P_x, exact).abs()).all()
    y.sum().backward()
    assert local.grad.dtype == dtype


@over_seeds(80, each=10)
def test_random_layers_equal_the_sequential_ones(P_world, comm, seeds):
    check_each(check, P_world, comm, seeds)


def test_a_subclass_has_the_dimensions_of_its_base(P_world):
    class Mine(layers.DistributedCircularPad2d):
        pass

    layer = Mine(rows(P_world), 1)
    assert repr(layer) == f"Mine(padding=(1, 1, 1, 1), P_x={layer.P_x.shape}, P_y={layer.P_x.shape})"
    assert layer.options.mode == "circular"
