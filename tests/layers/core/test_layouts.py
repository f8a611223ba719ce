"""A dense shard may lie in memory as it likes, in the forward and in the backward."""

import pytest
import torch

from distdl_rma import layers
from tests.layers.sequential import agree

pytestmark = pytest.mark.mpi


def rows(P):
    return P.create_cartesian_topology_partition((1, 1, P.size, 1))


def channels(P):
    return P.create_cartesian_topology_partition((1, P.size, 1, 1))


LAYERS = {
    "convolution": lambda P: layers.DistributedConv2d(rows(P), 2, 3, 3, padding=1),
    "groups": lambda P: layers.DistributedConv2d(channels(P), 2 * P.size, 2 * P.size, 1, groups=P.size),
    "reflect": lambda P: layers.DistributedConv2d(rows(P), 2, 3, 3, padding=1, padding_mode="reflect"),
    "transposed": lambda P: layers.DistributedConvTranspose2d(rows(P), 2, 3, 3),
    "average": lambda P: layers.DistributedAvgPool2d(rows(P), 3, 1, 1),
    "maximum": lambda P: layers.DistributedMaxPool2d(rows(P), 3, 1, 1),
    "adaptive average": lambda P: layers.DistributedAdaptiveAvgPool2d(rows(P), 3),
    "adaptive maximum": lambda P: layers.DistributedAdaptiveMaxPool2d(rows(P), 3),
    "upsampling": lambda P: layers.DistributedUpsample(rows(P), scale_factor=2, mode="bilinear"),
    "replication": lambda P: layers.DistributedReplicationPad2d(rows(P), 1),
    "batch norm": lambda P: layers.DistributedBatchNorm2d(rows(P), 2),
    "instance norm": lambda P: layers.DistributedInstanceNorm2d(rows(P), 2, affine=True),
    "group norm": lambda P: layers.DistributedGroupNorm(rows(P), 1, 2),
    "straddling groups": lambda P: layers.DistributedGroupNorm(channels(P), 1, 2 * P.size),
    "layer norm": lambda P: layers.DistributedLayerNorm(rows(P), (4 * P.size, 5)),
    "root mean square": lambda P: layers.DistributedRMSNorm(channels(P), 5),
    "linear": lambda P: layers.DistributedLinear(
        rows(P), rows(P), P.create_cartesian_topology_partition((1, P.size)), 5, 3
    ),
    "sharded": lambda P: layers.DistributedLinearAllGatherZero(
        P.create_cartesian_topology_partition((P.size, 1, 1, 1)), 5, 3
    ),
    "halo": lambda P: layers.HaloExchange(rows(P), 1),
    "repartition": lambda P: layers.Repartition(rows(P), channels(P)),
    "sum": lambda P: layers.AllSumReduce(rows(P), 2),
    "gather": lambda P: layers.AllGather(rows(P), 2),
    "scatter": lambda P: layers.ReduceScatter(rows(P), 3),
}
LOSSES = (
    "MSELoss",
    "L1Loss",
    "SmoothL1Loss",
    "HuberLoss",
    "BCELoss",
    "BCEWithLogitsLoss",
    "KLDivLoss",
    "PoissonNLLLoss",
    "NLLLoss",
    "CrossEntropyLoss",
)


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
    layer, x = LAYERS[kind](P_world).double(), numbers(comm.rank)
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
@pytest.mark.parametrize("kind", LOSSES)
def test_losses_take_any_layout(P_world, comm, kind, reduction):
    loss = getattr(layers, f"Distributed{kind}")(rows(P_world), reduction=reduction)
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
