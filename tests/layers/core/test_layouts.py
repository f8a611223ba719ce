"""A dense shard may lie in memory as it likes, in the forward and in the backward."""

import pytest
import torch

from distdl_rma import layers
from tests.fuzz.loss import CLASSES, ELEMENTWISE
from tests.layers.sequential import agree
from tests.layers.twins import FLOATING, FORMS, IMAGE, Twins, channels, rows

pytestmark = pytest.mark.mpi


def grid(P, shape):
    return P.create_cartesian_topology_partition(shape(P.size))


OTHERS = {
    "halo": lambda P: layers.HaloExchange(grid(P, rows), 1),
    "repartition": lambda P: layers.Repartition(grid(P, rows), grid(P, channels)),
    "sum": lambda P: layers.AllSumReduce(grid(P, rows), 2),
    "gather": lambda P: layers.AllGather(grid(P, rows), 2),
    "scatter": lambda P: layers.ReduceScatter(grid(P, rows), 3),
}
LAYERS = [*OTHERS, *(form for form in FLOATING if FORMS[form].shape == IMAGE and "root" not in form)]


def dense(x):
    return x.clone(memory_format=torch.contiguous_format)


# The same numbers as a contiguous tensor, otherwise laid out.
LAYOUTS = {
    "channels last": lambda x: x.contiguous(memory_format=torch.channels_last),
    "transposed": lambda x: dense(x.transpose(-1, -2)).transpose(-1, -2),
    "every other element": lambda x: torch.stack([x, x], -1)[..., 0],
    "negative bit": lambda x: torch.complex(x, -x).conj().imag,
    "with an offset": lambda x: torch.cat([x, x], -1)[..., x.shape[-1] :],
}


def numbers(seed):
    generator = torch.Generator().manual_seed(seed)
    return torch.rand((2, 2, 4, 5), dtype=torch.float64, generator=generator)


def outcome(call, x, gradient):
    x = x.detach().requires_grad_()
    y = call(x)
    y.backward(gradient(y) if y.dim() else None)
    return y.detach(), x.grad


@pytest.mark.in_turn(3)
@pytest.mark.parametrize("kind", LAYERS)
def test_layers_take_any_layout_of_input_and_gradient(P_world, comm, kind):
    x = numbers(comm.rank)
    if kind in OTHERS:
        layer = OTHERS[kind](P_world)
    else:
        twins = Twins(P_world, kind)
        layer, x = twins.layer, twins.into(twins.draw())
    y, d_x = outcome(layer, x, lambda y: torch.ones_like(y).cumsum(-1))
    for at, lay_out in enumerate(LAYOUTS.values()):
        laid = lay_out(x) if comm.rank == at % comm.size else x
        assert torch.equal(laid, x)

        def gradient(y, lay_out=lay_out):
            plain = torch.ones_like(y, memory_format=torch.contiguous_format).cumsum(-1)
            return lay_out(plain) if y.dim() == 4 and y.numel() else plain

        again, d_again = outcome(layer, laid, gradient)
        agree(again, y, kind)
        agree(d_again, d_x, kind)
    alike = x[:, :, :, :1].expand_as(x)
    agree(outcome(layer, alike, torch.ones_like)[0], outcome(layer, dense(alike), torch.ones_like)[0], kind)


@pytest.mark.in_turn(3)
@pytest.mark.parametrize("reduction", ["mean", "none"])
@pytest.mark.parametrize("kind", ELEMENTWISE + CLASSES)
def test_losses_take_any_layout(P_world, comm, kind, reduction):
    loss = getattr(layers, f"Distributed{kind}")(grid(P_world, rows), reduction=reduction)
    x = numbers(comm.rank)
    labels = torch.zeros(2, 4, 5, dtype=torch.int64)
    target = labels if kind == "NLLLoss" else numbers(9)
    value, d_x = outcome(lambda x: loss(x, target), x, torch.ones_like)
    for at, lay_out in enumerate(LAYOUTS.values()):
        mine = comm.rank == at % comm.size
        laid, aim = (lay_out(x), target if kind == "NLLLoss" else lay_out(target)) if mine else (x, target)
        again, d_again = outcome(lambda x, aim=aim: loss(x, aim), laid, torch.ones_like)
        agree(again, value, kind)
        agree(d_again, d_x, kind)
    if kind in ("NLLLoss", "CrossEntropyLoss"):
        spread = labels.transpose(1, 2).contiguous().transpose(1, 2)
        agree(
            outcome(lambda x: loss(x, spread), LAYOUTS["channels last"](x), torch.ones_like)[1],
            outcome(lambda x: loss(x, labels), x, torch.ones_like)[1],
        )
