"""Recurrent layers over whole sequences of split samples."""

import pytest
import torch
from torch import nn

from distdl_rma.errors import UnsupportedError
from tests.split.against_whole import block, check


@pytest.mark.mpi
@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU, nn.RNN])
@pytest.mark.parametrize("options", [{}, {"batch_first": True, "bidirectional": True, "num_layers": 2}])
def test_recurrent_layers(P_world, kind, options):
    torch.manual_seed(0)
    layer = kind(3, 4, **options).double()
    names = [name for name, _ in layer.named_parameters()]

    def run(x, *weights):
        y, after = torch.func.functional_call(layer, dict(zip(names, weights, strict=True)), (x,))
        return y, *(after if isinstance(after, tuple) else (after,))

    for shape in ((5, 6, 3), (2, 1, 3)):
        x = torch.randn(shape, dtype=torch.float64, requires_grad=True)
        weights = [w.detach().requires_grad_() for w in layer.parameters()]
        check(P_world, run, [x], weights)
    check(P_world, lambda x: layer(x)[0], [torch.randn(5, 3, dtype=torch.float64)], gradients=False)


@pytest.mark.mpi
def test_states_are_cut_as_samples_are(P_world):
    layer = nn.LSTM(3, 4).double()
    x, h = (torch.randn(n, 6, m, dtype=torch.float64, requires_grad=True) for n, m in ((5, 3), (1, 4)))
    check(P_world, lambda x, h: (y := layer(x, (h, 2 * h)))[0] + y[1][0], [x], [h])
    check(P_world, lambda x, h: layer(x, (h, h))[1][1], [x, h])


@pytest.mark.mpi
@pytest.mark.parametrize("kind", [nn.LSTMCell, nn.GRUCell, nn.RNNCell])
def test_cells(P_world, kind):
    layer = kind(3, 4).double()
    names = [name for name, _ in layer.named_parameters()]

    def run(x, *weights):
        before = None
        for _ in range(2):
            found = torch.func.functional_call(layer, dict(zip(names, weights, strict=True)), (x, before))
            before = found
        return found

    for shape in ((5, 3), (1, 3)):
        x = torch.randn(shape, dtype=torch.float64, requires_grad=True)
        check(P_world, run, [x], [w.detach().requires_grad_() for w in layer.parameters()])


@pytest.mark.mpi
@pytest.mark.sizes(2)
def test_refused(P_world):
    x = block(P_world.create_cartesian_topology_partition((1, P_world.size, 1)), torch.randn(5, 6, 3))
    with pytest.raises(UnsupportedError, match="dropout"):
        nn.GRU(3, 4, num_layers=2, dropout=0.5)(x)
    assert nn.GRU(3, 4, num_layers=2, dropout=0.5).eval()(x)[0].shape == (5, 6, 4)
