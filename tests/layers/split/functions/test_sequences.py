"""Attention and recurrent layers over tokens, heads and samples that are split."""

from functools import partial

import pytest
import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812

from tests.layers.split.against_whole import check, forms, numbers

pytestmark = pytest.mark.mpi
ATTENTION = F.scaled_dot_product_attention
Q, K, V, TOKENS = (2, 3, 5, 4), (2, 3, 6, 4), (2, 3, 6, 2), (2, 3, 5, 4)
TRIANGLE = torch.ones(5, 6, dtype=torch.bool).tril(1)


def of_itself(x, **options):
    return ATTENTION(x, x, x, **options)


FORMS = {
    "three": (ATTENTION, [Q, K, V]),
    "plain keys": (ATTENTION, [Q], [K, V]),
    "plain values": (ATTENTION, [K, partial(torch.randn, K, dtype=torch.float64)], [K]),
    "causal": (partial(ATTENTION, is_causal=True, scale=0.3), [Q, K, V]),
    "a learnable mask": (lambda q, k, v, m: ATTENTION(q, k, v, attn_mask=m), [Q, K, V], [(5, 6)]),
    "a mask for all heads": (ATTENTION, [Q, K, V], [(2, 1, 1, 6)]),
    "a triangle": (partial(ATTENTION, attn_mask=TRIANGLE), [Q, K, V]),
    "shared heads": (partial(ATTENTION, enable_gqa=True), [(2, 4, 5, 3), (2, 2, 5, 3), (2, 2, 5, 3)]),
    "few causal tokens": (partial(of_itself, is_causal=True), [(1, 2, 2, 4)]),
    "no heads": (of_itself, [(3, 5, 4)]),
    **{
        f"no features, {options}": (
            lambda v, q, options=options: ATTENTION(q, q, v, **options), [TOKENS], [(2, 3, 5, 0)]
        )
        for options in ({}, {"is_causal": True}, {"scale": 2.0})
    },
}  # fmt: skip
test_forms = forms(FORMS)


def by_functional_call(layer):
    """A function of an input and the parameters of a layer, and these parameters as leaves."""
    names = [name for name, _ in layer.named_parameters()]

    def run(given, weights, **options):
        return torch.func.functional_call(layer, dict(zip(names, weights, strict=True)), given, options)

    return run, [p.detach().clone().requires_grad_() for p in layer.parameters()]


@pytest.mark.sizes(1, 2, 3, 4)
@pytest.mark.parametrize("weights", [False, True])
@pytest.mark.parametrize("first", [False, True])
def test_multi_head_attention(P_world, first, weights):
    run, plain = by_functional_call(nn.MultiheadAttention(6, 2, batch_first=first, dtype=torch.float64))

    def function(x, *parameters):
        found = run((x, x, x), parameters, need_weights=weights)
        return found if weights else found[0]

    check(P_world, function, [numbers(3, 5, 6)], plain)


def test_gradients_of_plain_operands_meet_where_a_rank_has_no_heads(P_world):
    q, k, v, mask = numbers(2, 1, 3, 4), numbers(2, 1, 5, 4), numbers(2, 1, 5, 4), numbers(3, 5)
    heads = (1, P_world.size, 1, 1)
    check(P_world, lambda v, q, k, mask: ATTENTION(q, k, v, mask), [v], [q, k, mask], only=[heads])


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU, nn.RNN])
@pytest.mark.parametrize("options", [{}, {"batch_first": True, "bidirectional": True, "num_layers": 2}])
def test_recurrent_layers(P_world, kind, options):
    layer = kind(3, 4, **options).double()
    run, plain = by_functional_call(layer)

    def function(x, *weights):
        y, after = run((x,), weights)
        return y, *(after if isinstance(after, tuple) else (after,))

    for shape in ((5, 6, 3), (2, 1, 3)):
        check(P_world, function, [numbers(*shape)], plain)
    check(P_world, lambda x: layer(x)[0], [torch.randn(5, 3, dtype=torch.float64)], gradients=False)


def test_states_may_be_split_or_whole(P_world):
    layer, x, h = nn.LSTM(3, 4).double(), numbers(5, 6, 3), numbers(1, 6, 4)
    check(P_world, lambda x, h: (y := layer(x, (h, 2 * h)))[0] + y[1][0], [x], [h])
    check(P_world, lambda x, h: layer(x, (h, h))[1][1], [x, h])


@pytest.mark.parametrize("kind", [nn.LSTMCell, nn.GRUCell, nn.RNNCell])
def test_cells(P_world, kind):
    run, plain = by_functional_call(kind(3, 4).double())
    for shape in ((5, 3), (1, 3)):
        check(P_world, lambda x, *w: run((x, run((x, None), w)), w), [numbers(*shape)], plain)
