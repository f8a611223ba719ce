"""What goes wrong around gradients in real programs: it is right, or refused, and never silently local."""

import copy
from functools import partial

import pytest
import torch
from torch import nn
from torch.nn.utils.parametrizations import weight_norm

from distdl_rma import ConfigurationError, GradientSync, ProtocolError, UnsupportedError
from distdl_rma.geometry import Decomposition
from distdl_rma.layers import DistributedConv1d, DistributedEmbedding, DistributedLinear
from tests.layers.partitioned.sequential import agree, shard

pytestmark = pytest.mark.mpi

DTYPE = {"dtype": torch.float64}


def ones(*shape):
    return torch.ones(*shape, **DTYPE)


def conv(P_x, **options):
    return DistributedConv1d(P_x, 1, 1, 3, padding=1, **DTYPE, **options)


@pytest.fixture
def P_x(P_world):  # noqa: N802
    return P_world.create_cartesian_topology_partition((1, 1, P_world.size))


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("bucket_nbytes", [0, 1 << 20])
def test_a_weight_that_two_layers_share(P_world, P_x, comm, bias, bucket_nbytes):
    nets = []
    for make in (partial(conv, P_x), partial(nn.Conv1d, 1, 1, 3, padding=1, **DTYPE)):
        torch.manual_seed(1)
        nets.append(nn.Sequential(make(bias=False), nn.ELU(), make(bias=bias)))
        nets[-1][2].weight = nets[-1][0].weight
    ours, twin = nets
    x = torch.randn(2, 1, 4 * comm.size + 1, **DTYPE)
    with GradientSync(ours, P_world, bucket_nbytes=bucket_nbytes):
        for _ in range(3):
            for net, given in ((ours, shard(P_x, x)), (twin, x)):
                net.zero_grad()
                net(given).square().sum().backward()
            for mine, theirs in zip(ours.parameters(), twin.parameters(), strict=True):
                agree(mine.grad, theirs.grad)


def test_an_embedding_and_the_linear_layer_that_shares_its_table(P_world, comm):
    P_i = P_world.create_cartesian_topology_partition((comm.size, 1))
    P_v = P_world.create_cartesian_topology_partition((comm.size, 1, 1))
    embedding = DistributedEmbedding(P_i, 7, 4, **DTYPE)
    linear = DistributedLinear(P_v, P_v, P_v, 4, 7, bias=False, **DTYPE)
    linear.weight = embedding.weight
    table = embedding.weight.detach().clone().requires_grad_()
    words = torch.arange(2 * comm.size * 3).reshape(2 * comm.size, 3) % 7
    with GradientSync(nn.Sequential(embedding, linear), P_world):
        mine = words[2 * comm.rank : 2 * comm.rank + 2]
        linear(embedding(mine)).square().sum().backward()
    nn.functional.linear(nn.functional.embedding(words, table), table).square().sum().backward()
    agree(embedding.weight.grad, table.grad)


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("alone", [False, True])
def test_a_step_after_a_backward_that_failed_is_refused(P_world, comm, alone):
    trunk, last = nn.Linear(2, 2, **DTYPE), nn.Linear(2, 2, **DTYPE)
    sync = GradientSync(trunk, P_world)
    sync.register(
        last, name="last", get_ranks_synch_weights=lambda: [comm.rank] if alone else range(comm.size)
    )
    y = trunk(ones(1, 2))
    y.register_hook(lambda _: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        last(y).sum().backward()
    for layer in (trunk, last):
        layer.zero_grad()
    with pytest.raises(ProtocolError, match="an earlier backward failed"):
        last(trunk(ones(1, 2))).sum().backward()
    sync.release()
    with GradientSync(trunk, P_world):
        trunk.zero_grad()
        trunk(ones(1, 2)).sum().backward()
        assert trunk.weight.grad[0, 0] == comm.size


@pytest.mark.mpi(min_size=2)
def test_a_layer_that_went_its_own_way_comes_back_equal(P_world, P_x, comm):
    layer = conv(P_x)
    everyone = range(comm.size)
    with GradientSync(None, P_world) as sync:
        sync.register(layer, get_ranks_synch_weights=lambda: [comm.rank])
        with torch.no_grad():
            layer.weight += comm.rank
        first = comm.bcast(layer.weight.detach().clone())
        sync.register(layer, get_ranks_synch_weights=lambda: everyone)
        agree(layer.weight.detach(), first)


@pytest.mark.mpi(min_size=2)
def test_a_plain_module_has_one_sync(P_world, comm):
    plain = nn.Linear(2, 2)
    with GradientSync(plain, P_world):
        with pytest.raises(ConfigurationError, match=r"'0\.weight' already belongs to another GradientSync"):
            GradientSync(nn.Sequential(plain), P_world)
        plain(torch.ones(1, 2)).sum().backward()
        assert plain.weight.grad[0, 0] == comm.size
    GradientSync(nn.Sequential(plain), P_world).close()


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda P_x: weight_norm(conv(P_x, name="c")), "the weight of 'c' is computed from other parameters"),
        (lambda P_x: nn.Embedding(3, 2, sparse=True), "'Embedding' has sparse gradients"),
        (lambda P_x: nn.LazyLinear(2), "'LazyLinear' has parameters without a shape yet"),
        (lambda P_x: "model", "a torch.nn.Module is needed, got 'model'"),
    ],
)
def test_what_cannot_be_synchronised_on_one_rank_is_refused_on_all(P_world, P_x, comm, make, message):
    conv(P_x)
    odd = make(P_x)
    with pytest.raises(ConfigurationError, match=message):
        GradientSync(odd if comm.rank == comm.size - 1 else None, P_world)


@pytest.mark.mpi(min_size=2)
def test_a_refused_module_leaves_no_trace(P_world, comm):
    sync = GradientSync(None, P_world)
    for _ in range(20):
        wrong = nn.Linear(1 + comm.rank, 3)
        with pytest.raises(ConfigurationError, match="on rank 0 but"):
            sync.register(wrong, name="wrong")
        del wrong
        sync.register(nn.Linear(4, 1), name=f"right {_}")
    sync.close()


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("way", ["shape", "number"])
def test_buffers_that_differ_are_named(P_world, comm, way):
    norm = nn.BatchNorm1d(2)
    if comm.rank == 1:
        norm.register_buffer("running_mean" if way == "shape" else "extra", torch.zeros(3))
    message = r"running_mean\): is \(2,\) float32 on rank 0 but \(3,\)" if way == "shape" else r"\(extra\)"
    with pytest.raises(ConfigurationError, match=message):
        GradientSync(norm, P_world)


def test_sizes_of_tensors_that_a_user_states_are_compared_once_they_are_known(P_world, P_x, comm):
    layer = conv(P_x, get_sizeof_input_tensor=lambda: 7)
    GradientSync(layer, P_world).close()
    blocks = Decomposition.balanced(P_x, (1, 1, 2 * comm.size))
    layer.announce((blocks,), blocks, torch.float64)
    with pytest.raises(
        ConfigurationError, match=r"get_sizeof_input_tensor\(\) gave 7 on rank 0, it is 16 bytes"
    ):
        GradientSync(layer, P_world)


def test_a_sync_cannot_be_copied(P_world):
    with (
        GradientSync(nn.Linear(2, 2), P_world) as sync,
        pytest.raises(UnsupportedError, match="GradientSync"),
    ):
        copy.deepcopy(sync)
