"""Gradients of a whole training loop against the sequential loop."""

import copy
import math

import pytest
import torch
from torch import nn

from distdl_rma import ConfigurationError, GradientSync, Machine, ProtocolError, distribute
from distdl_rma.layers import DistributedConv1d
from tests.layers.partitioned.same_error import same_error
from tests.layers.partitioned.sequential import agree, shard
from tests.layers.sync.training import Spectral, make, train_on_every_grid

pytestmark = pytest.mark.mpi


@pytest.mark.sizes(1, 2, 3, 4)
@pytest.mark.parametrize("bucket_nbytes", [0, 1 << 10, 1 << 20])
@pytest.mark.parametrize("set_to_none", [True, False])
def test_training_equals_the_sequential_run_on_every_grid(P_world, comm, bucket_nbytes, set_to_none):
    train_on_every_grid(P_world, comm, set_to_none, bucket_nbytes=bucket_nbytes)


@pytest.mark.parametrize("dtype", [torch.complex64, torch.complex128])
@pytest.mark.parametrize("reduction", ["sum", "mean"])
def test_complex_gradients_are_those_of_all_ranks_and_are_clipped_as_torchs(P_world, comm, dtype, reduction):
    model, twin = Spectral(dtype), Spectral(dtype)
    twin.load_state_dict(model.state_dict())
    xs, optimizer = torch.randn(comm.size, 5, 4, dtype=dtype.to_real()), torch.optim.SGD(model.parameters())
    with GradientSync(model, P_world, reduction=reduction) as sync:
        for order in (2.0, 1.0, math.inf):
            model.zero_grad(), twin.zero_grad()
            model(xs[comm.rank]).pow(3).sum().backward()
            for x in xs:
                (twin(x).pow(3).sum() / (comm.size if reduction == "mean" else 1)).backward()
            found, expected = ([p.grad for p in net.parameters()] for net in (model, twin))
            torch.testing.assert_close(found, expected)
            norm = sync.clip_grad_norm_(0.1, order)
            wanted = nn.utils.clip_grad_norm_(twin.parameters(), 0.1, order)
            torch.testing.assert_close(norm.to(wanted.dtype), wanted)
            torch.testing.assert_close(found, expected)
        sizes = {row["nbytes"] for row in sync.describe()}
        assert comm.size == 1 or sizes == {p.numel() * p.element_size() for p in model.parameters()}
    optimizer.step()


@pytest.mark.mpi(min_size=2)
def test_mean_reaches_weights_that_one_rank_keeps(P_world, comm):
    # Every rank's loss counts the same, wherever a weight is kept.
    P_x = P_world.create_cartesian_topology_partition((1, 1, comm.size))
    gradients = {}
    for weights in ("replicated", "root"):
        torch.manual_seed(1)
        layer = DistributedConv1d(P_x, 1, 2, 3, padding=1, dtype=torch.float64, weights=weights)
        with GradientSync(layer, P_world, reduction="mean"):
            for _ in range(2):  # adds up
                layer(shard(P_x, torch.ones(1, 1, 8, dtype=torch.float64))).sum().backward()
        gradients[weights] = layer.weight.grad
    if comm.rank == 0:
        agree(gradients["root"], gradients["replicated"])


@pytest.mark.mpi(min_size=2)
def test_plain_modules_start_equal_buffers_included(P_world, comm):
    torch.manual_seed(comm.rank)
    model = nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2))
    model[1].running_mean.fill_(comm.rank + 5.0)
    sync = GradientSync(model, P_world)
    assert len({str(p.tolist()) for p in comm.allgather(model[0].weight.detach().numpy())}) == 1
    assert model[1].running_mean[0] == 5.0
    sync.close()


@pytest.mark.mpi(min_size=2)
def test_layers_that_only_some_ranks_use(P_world, comm):
    # Ranks complete their buckets in different orders, and one gets no gradient for a layer at all.
    torch.manual_seed(0)
    model = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))
    twin = copy.deepcopy(model)
    order = [0] if comm.rank == 1 else [1, 0] if comm.rank % 2 else [0, 1]
    sync = GradientSync(model, P_world, bucket_nbytes=0)
    for _ in range(3):
        for net in (model, twin):
            net.zero_grad()
            y = x = torch.full((1, 8), comm.rank + 1.0)
            for at in order:
                y = net[at](y) + x
            y.sum().backward()
        for ours, alone in zip(model.parameters(), twin.parameters(), strict=True):
            everyones = [grad for grad in comm.allgather(alone.grad) if grad is not None]
            assert (ours.grad is None) == (not everyones)
            if everyones:
                torch.testing.assert_close(ours.grad, sum(everyones))
    sync.close()


@pytest.mark.mpi(min_size=2)
def test_what_would_be_silently_local_is_refused(P_world, comm):
    model, sync, loss_of = make(P_world, comm)
    loss = loss_of()
    with pytest.raises(ProtocolError, match=r"autograd.grad of a plain tensor would return local gradients"):
        torch.autograd.grad(loss, model[0].weight)
    comm.Barrier()
    sync.close()


def test_a_model_that_is_registered_again_is_what_it_is_now(P_world, comm):
    plain = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2), nn.Linear(2, 2))
    plain[0].requires_grad_(False)
    sync, total, gone = GradientSync(plain, P_world), sum(range(1, comm.size + 1)), plain[2]
    plain[0].requires_grad_(True)
    plain[2] = nn.Linear(2, 2, bias=False)
    with sync.no_sync():
        (plain[1].bias.sum() * (comm.rank + 1)).backward()
    plain.double()
    sync.register(plain)
    (sum(p.sum() for p in plain.parameters()) * (comm.rank + 1)).backward()
    assert all((p.grad == total).all() for p in plain.parameters() if p is not plain[1].bias)
    assert (plain[1].bias.grad == 2 * total).all()
    gone.weight.sum().backward()
    assert (gone.weight.grad == 1).all(), "what is no longer in it is left alone"
    plain[2] = gone.double()
    with pytest.raises(ProtocolError, match=r"module '2' was added"):
        plain[0].weight.sum().backward()
    comm.Barrier()
    sync.register(plain)
    sync.close()


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"reduction": "product"}, "reduction is one of"),
        ({"replicas": 2}, "replicas=2 divides a mean"),
        ({"reduction": "mean", "replicas": 0}, "and is at least 1"),
        ({"bucket_nbytes": 7}, r"bucket_nbytes is \d+ on rank 0 but \d+ on rank \d"),
    ],
)
def test_wrong_options_on_one_rank_are_refused_on_all(P_world, comm, options, message):
    with pytest.raises(ConfigurationError, match=message):
        GradientSync(nn.Linear(2, 2), P_world, **(options if comm.rank == 1 else {}))


def test_finished_work_is_forgotten(P_world, comm):
    model, sync, loss_of = make(P_world, comm)
    segments = Machine.of(P_world).segments
    for _ in range(5):
        model.zero_grad()
        loss_of().backward()
    assert not segments.waiter._steps
    sync.close()


@pytest.mark.mpi(min_size=3)
def test_layers_of_some_ranks_lie_between_layers_of_all(P_world, comm):
    # Those that do not hold the former must still fuse the latter as the others do.
    everyone = P_world.create_cartesian_topology_partition((1, 1, comm.size))
    some, others = (
        P_world.create_partition_inclusive(ranks).create_cartesian_topology_partition((1, 1, 2))
        for ranks in ([2, 1], [0, 2])
    )
    nets = []
    for kind in (DistributedConv1d, nn.Conv1d):
        torch.manual_seed(4)
        places = [{}, {"P_W": some}, {}, {"P_W": others}, {}]
        first = [everyone] if kind is DistributedConv1d else []
        layers = (
            kind(*first, 2, 2, 3, padding=1, dtype=torch.float64, **(place if first else {}))
            for place in places
        )
        nets.append(nn.Sequential(*layers))
    sync = GradientSync(nets[0], P_world)
    x = torch.randn(2, 2, 11, dtype=torch.float64)
    for _ in range(3):
        for model, given in zip(nets, (shard(everyone, x), x), strict=True):
            model.zero_grad()
            model(given).square().sum().backward()
        for layer, twin in zip(*nets, strict=True):
            for key, parameter in twin.named_parameters():
                if layer.placed.placements[key].store.partition.active:
                    agree(getattr(layer, key).grad, parameter.grad, key)
    sync.close()


@pytest.mark.processes
@pytest.mark.mpi(min_size=2)
def test_a_profile_shows_when_sums_start_and_how_long_they_are_waited_for(P_world, comm):
    plain = nn.Linear(3, 2)
    with GradientSync(plain, P_world), torch.profiler.profile() as profile:
        plain(torch.ones(1, 3)).sum().backward()
    names = [event.name for event in profile.events()]
    assert "GradientSync: start gradients 0" in names and "GradientSync: wait gradients 0" in names


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.complex64])
@pytest.mark.parametrize("reduction", ["sum", "mean"])
def test_a_parameter_that_is_frozen_later_is_frozen_on_all_ranks(P_world, comm, dtype, reduction):
    plain = nn.Sequential(nn.Linear(2, 2, dtype=dtype), nn.Linear(2, 1, dtype=dtype))
    x = torch.ones(1, 2, dtype=dtype)
    with GradientSync(plain, P_world, reduction=reduction):
        plain(x).abs().sum().backward()
        before = plain[0].weight.grad.clone()
        plain.zero_grad()
        plain[0].weight.requires_grad_(comm.rank == 0)
        match = r"parameter '0\.weight' is frozen on some ranks and has a gradient on others"
        same_error(comm, lambda: plain(x).abs().sum().backward(), ProtocolError, match)
        for learns in (False, True):
            plain.zero_grad()
            plain[0].weight.requires_grad_(learns)
            plain(x).abs().sum().backward()
            assert (plain[0].weight.grad is not None) == learns
        assert torch.equal(plain[0].weight.grad, before)


def test_closing_moves_the_gradients_out_of_the_segment(P_world, comm):
    model, segments = nn.Linear(64, 64), Machine.of(P_world).segments
    # Opens what stays, the agreement of the ranks.
    GradientSync(copy.deepcopy(model), P_world).close()
    used = segments.stats().used
    sync = GradientSync(model, P_world)
    model(torch.ones(1, 64)).sum().backward()
    gradients = [p.grad.clone() for p in model.parameters()]
    places = [p.grad.data_ptr() for p in model.parameters()]
    assert segments.stats().used > used
    sync.close()
    assert segments.stats().used == used
    for p, gradient, place in zip(model.parameters(), gradients, places, strict=True):
        assert torch.equal(p.grad, gradient) and p.grad.data_ptr() != place


@pytest.mark.filterwarnings("ignore:distribute")
def test_parameters_that_are_first_used_in_inference_mode_are_trained_later(comm):
    found = []
    for split in (False, True):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Conv2d(1, 2, 3, padding=1), nn.Tanh(), nn.Conv2d(2, 1, 1)).double()
        x = torch.linspace(0, 1, 30, dtype=torch.float64).view(1, 1, 6, 5)
        model[0].requires_grad_(False)
        if split:
            distribute(model, {"H": -1})
        model(x).square().mean().backward()
        model[0].requires_grad_(True)
        model.append(nn.Conv2d(1, 1, 1).double())
        with torch.inference_mode():
            model(x)
        model.zero_grad(set_to_none=False)
        model(x).square().mean().backward()
        found.append([p.grad for p in model.parameters()])
    torch.testing.assert_close(*found)


class Some(torch.autograd.Function):
    """The first argument; the gradient of the second is one, or None."""

    @staticmethod
    def forward(ctx, x, p, has):
        ctx.has = has
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        return gradient, torch.ones(2) if ctx.has else None, None


@pytest.mark.parametrize("of", ["no rank", "one rank"])
def test_a_function_that_returns_no_gradient_of_a_parameter(P_world, comm, of):
    net = nn.ParameterDict({name: nn.Parameter(torch.ones(2)) for name in "ab"})
    with GradientSync(net, P_world):
        for _ in range(2):
            net["a"].grad = net["b"].grad = None
            Some.apply(net["b"] * 2, net["a"], of == "one rank" and comm.rank == 1).sum().backward()
            assert (net["a"].grad is None) if of == "no rank" else torch.equal(net["a"].grad, torch.ones(2))
            assert torch.equal(net["b"].grad, torch.full((2,), 2.0 * comm.size))
