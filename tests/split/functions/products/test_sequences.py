"""Attention and recurrent layers over tokens, heads and samples that are split."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812

from distdl_rma.errors import UnsupportedError
from tests.split.against_whole import block, check


def numbers(*shape):
    return torch.randn(shape, dtype=torch.float64, requires_grad=True)


ATTENTION = F.scaled_dot_product_attention


@pytest.mark.mpi
@pytest.mark.sizes(1, 2, 3, 4)
def test_attention(P_world):
    q, k, v = numbers(2, 3, 5, 4), numbers(2, 3, 6, 4), numbers(2, 3, 6, 2)
    check(P_world, ATTENTION, [q, k, v])
    check(P_world, ATTENTION, [q], [k, v])
    check(P_world, ATTENTION, [k, v.detach().repeat(1, 1, 1, 2)], [numbers(2, 3, 6, 4)])
    check(P_world, lambda q, k, v: ATTENTION(q, k, v, is_causal=True, scale=0.3), [q, k, v])
    check(P_world, lambda q, k, v, m: ATTENTION(q, k, v, attn_mask=m), [q, k, v], [numbers(5, 6)])
    check(P_world, ATTENTION, [q, k, v], [numbers(2, 1, 1, 6)])
    mask = torch.ones(5, 6, dtype=torch.bool).tril(1)
    check(P_world, lambda q, k, v: ATTENTION(q, k, v, mask), [q, k, v])


@pytest.mark.mpi
@pytest.mark.sizes(1, 2, 3, 4)
def test_shared_heads_and_few_tokens(P_world):
    check(
        P_world,
        lambda q, k, v: ATTENTION(q, k, v, enable_gqa=True),
        [numbers(2, 4, 5, 3), numbers(2, 2, 5, 3), numbers(2, 2, 5, 3)],
    )
    check(P_world, lambda q: ATTENTION(q, q, q, is_causal=True), [numbers(1, 2, 2, 4)])
    check(P_world, lambda q: ATTENTION(q, q, q), [numbers(3, 5, 4)])


@pytest.mark.mpi
@pytest.mark.sizes(1, 2, 3, 4)
@pytest.mark.parametrize("weights", [False, True])
@pytest.mark.parametrize("first", [False, True])
def test_multi_head_attention(P_world, first, weights):
    torch.manual_seed(1)
    module = nn.MultiheadAttention(6, 2, batch_first=first, dtype=torch.float64)
    names = [name for name, _ in module.named_parameters()]

    def function(x, *parameters):
        given = dict(zip(names, parameters, strict=True))
        y, w = torch.func.functional_call(module, given, (x, x, x), {"need_weights": weights})
        return (y, w) if weights else y

    plain = [p.detach().clone().requires_grad_() for p in module.parameters()]
    check(P_world, function, [numbers(3, 5, 6)], plain)


@pytest.mark.mpi
def test_gradients_of_plain_operands_meet_where_a_rank_has_no_heads(P_world):
    q, k, v = (torch.randn(2, 1, n, 4, dtype=torch.float64).requires_grad_() for n in (3, 5, 5))
    mask = torch.randn(3, 5, dtype=torch.float64).requires_grad_()
    attend = F.scaled_dot_product_attention
    heads = (1, P_world.size, 1, 1)
    check(P_world, lambda v, q, k, mask: attend(q, k, v, mask), [v], [q, k, mask], only=[heads])


@pytest.mark.mpi
@pytest.mark.parametrize("options", [{}, {"is_causal": True}, {"scale": 2.0}])
def test_without_features_all_keys_count_alike(P_world, options):
    check(P_world, lambda v, q: ATTENTION(q, q, v, **options), [numbers(2, 3, 5, 4)], [numbers(2, 3, 5, 0)])


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
