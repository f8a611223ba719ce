"""Norms of gradients that lie in parts on several ranks."""

import math

import pytest
import torch
from torch import nn

from distdl_rma import ConfigurationError, GradientSync, MismatchError, ProtocolError, gather_state_dict
from distdl_rma.layers import DistributedConv2d, DistributedLinear, DistributedLinearAllGather
from tests.layers.partitioned.same_error import same_error
from tests.layers.partitioned.sequential import agree, shard

pytestmark = pytest.mark.mpi

ORDERS = [2.0, 1.0, 3.5, math.inf]


F64 = {"dtype": torch.float64}


def both(P_world):
    """A network whose layers keep weights as copies, blocks and one set, torch's twin, and places."""
    n = P_world.size
    P_x, P_b, P_t = (P_world.create_cartesian_topology_partition(g) for g in ((1, n), (n, 1), (1, 1, n, 1)))
    torch.manual_seed(3)
    ours = nn.ModuleList(
        [
            DistributedLinear(P_x, P_x, P_b, 5, 7, **F64),
            DistributedLinearAllGather(P_b, 7, 5, **F64),
            nn.Linear(5, 5, **F64),
            DistributedConv2d(P_t, 1, 2, 3, padding=1, weights="root", **F64),
            DistributedConv2d(P_t, 2, 1, 3, padding=1, **F64),
        ]
    )
    torch.manual_seed(3)
    linears = [nn.Linear(*features, **F64) for features in ((5, 7), (7, 5), (5, 5))]
    convs = [nn.Conv2d(*channels, 3, padding=1, **F64) for channels in ((1, 2), (2, 1))]
    return ours, nn.ModuleList([*linears, *convs]), (P_x, P_b, P_t)


def backward(net, x, longer, image, share=1):
    """Of a loss of all layers; ``share`` ranks have the plain one alike."""
    loss = net[0](x[0]).square().sum() + net[1](longer).square().sum()
    (loss + net[2](x[1]).square().sum() / share + net[4](net[3](image)).square().sum()).backward()


@pytest.mark.parametrize("order", ORDERS)
def test_the_norm_counts_every_weight_once(P_world, comm, order):
    ours, twins, (P_x, P_b, P_t) = both(P_world)
    sync = GradientSync(ours, P_world)
    x, longer, image = (torch.randn(shape, **F64) for shape in ((6, 5), (6, 7), (1, 1, 9, 7)))
    backward(ours, (shard(P_x, x), x), shard(P_b, longer), shard(P_t, image), comm.size)
    backward(twins, (x, x), longer, image)
    expected = torch.nn.utils.clip_grad_norm_(twins.parameters(), 0.7, order)
    norm = sync.clip_grad_norm_(0.7, order)
    agree(norm, expected)
    assert len(set(comm.allgather(norm.item()))) == 1
    agree(sync.grad_norm(order), torch.nn.utils.get_total_norm([p.grad for p in twins.parameters()], order))
    # The clipped gradients are those of the twin, wherever they are kept.
    with torch.no_grad():
        for p in (*ours.parameters(), *twins.parameters()):
            p.sub_(p.grad) if p.grad is not None else None
    state = gather_state_dict(ours)
    for key, value in twins.state_dict().items():
        agree(state[key], value, key)
    sync.close()


@pytest.mark.parametrize("order", [2.0, 9.0])
def test_powers_that_overflow_on_one_rank_are_infinite_on_all(P_world, comm, order):
    single = nn.Linear(1, 1, bias=False, dtype=torch.float64)
    with GradientSync(single, P_world) as sync:
        single.weight.grad = torch.full((1, 1), 1e200 if comm.rank == 0 else 1.0, dtype=torch.float64)
        assert sync.grad_norm(order) == math.inf


# The limit and the order of the last rank, beside those of the others, and the error of all ranks.
WRONG = {
    "limit": ((0.25, None), MismatchError, r"max_norm must be the same on all ranks: ranks? 0.*: 0\.5; "),
    "no limit": (("x", None), ConfigurationError, r"rank \d: max_norm must be a number, got 'x'"),
    "order": ((0.5, 1.5), MismatchError, r"norm_type must be the same on all ranks: ranks? 0"),
    "another kind of order": (
        (0.5, math.inf),
        MismatchError,
        r"norm_type must be the same on all ranks: ranks? 0",
    ),
    "no order": ((0.5, "x"), ConfigurationError, r"rank \d: norm_type must be positive, got 'x'"),
    "no positive order": ((0.5, 0), ConfigurationError, r"rank \d: norm_type must be positive, got 0"),
}


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("order", [2.0, 9.0])
@pytest.mark.parametrize("what", WRONG)
def test_another_limit_or_order_on_one_rank_is_refused_on_all(P_world, comm, order, what):
    (limit, other), kind, match = WRONG[what]
    wrong = (limit, other or order) if what in ("limit", "no limit") else (limit, other)
    plain = nn.Linear(2, 1, bias=False)
    with GradientSync(plain, P_world) as sync:
        plain(torch.ones(1, 2)).sum().backward()
        before = plain.weight.grad.clone()
        for norm in (order, math.inf, 1.5):
            sync.grad_norm(norm)
        last = comm.rank == comm.size - 1
        same_error(comm, lambda: sync.clip_grad_norm_(*(wrong if last else (0.5, order))), kind, match)
        assert torch.equal(plain.weight.grad, before)
        sync.clip_grad_norm_(0.5, order)
        assert torch.linalg.vector_norm(plain.weight.grad, order).item() == pytest.approx(0.5)


def test_no_gradients_and_strange_ones(P_world, comm):
    plain = nn.Linear(2, 2)
    sync = GradientSync(plain, P_world)
    assert sync.grad_norm() == 0 == sync.clip_grad_norm_(1.0)
    plain(torch.full((1, 2), math.nan if comm.rank == 0 else 1.0)).sum().backward()
    for order in ORDERS:
        assert torch.isnan(sync.grad_norm(order)), order
        with pytest.raises(RuntimeError, match="is nan, not finite"):
            sync.clip_grad_norm_(1.0, order, error_if_nonfinite=True)
    with pytest.raises(ConfigurationError, match="norm_type must be positive, got 0"):
        sync.grad_norm(0)
    plain.zero_grad()
    with sync.no_sync():
        plain(torch.ones(1, 2)).sum().backward()
    if comm.size > 1:
        with pytest.raises(ProtocolError, match="are summed in the next backward"):
            sync.grad_norm()
    plain.zero_grad()
    sync.close()
