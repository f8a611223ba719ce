"""All normalisation layers: random search, errors, callbacks, and settings that all ranks have in common."""

import numpy as np
import pytest
import torch
from torch import nn
from torch.optim.swa_utils import update_bn

from distdl_rma import MismatchError, ShapeError, UnsupportedError
from distdl_rma.layers import (
    DistributedBatchNorm1d,
    DistributedBatchNorm2d,
    DistributedGroupNorm,
    DistributedInstanceNorm1d,
    DistributedLayerNorm,
    DistributedRMSNorm,
)
from tests.layers.partitioned.same_error import same_error
from tests.layers.partitioned.sequential import agree, shard

pytestmark = pytest.mark.mpi


def layers(P_world):
    """A layer of every kind over all ranks, for inputs (2, 6, 5)."""
    n = P_world.size
    line, channels = (P_world.create_cartesian_topology_partition(grid) for grid in ((1, 1, n), (1, n, 1)))
    return [
        DistributedBatchNorm1d(line, 6),
        DistributedBatchNorm1d(channels, 6),
        DistributedInstanceNorm1d(line, 6, affine=True, track_running_stats=True),
        DistributedGroupNorm(channels, 3, 6),
        DistributedLayerNorm(line, (6, 5)),
        DistributedRMSNorm(channels, (6, 5)),
    ]


def test_types_that_torch_does_not_mix_are_refused(P_world, comm):
    for layer in layers(P_world):
        x = shard(layer.P_x, torch.randn(2, 6, 5))
        with pytest.raises(ShapeError, match="floating-point"):
            layer(x.long())
        assert layer(x.bfloat16()).dtype == torch.bfloat16
        layer.bfloat16()
        with pytest.raises(ShapeError, match=r"the parameters are torch\.bfloat16"):
            layer(x)


# Arguments, grid, the shape of an input that has one value for each statistic, and what more is needed.
ONE_VALUE = {
    DistributedBatchNorm1d: ((3,), lambda n: (n, 1), (1, 3), "value per channel is needed in training"),
    DistributedInstanceNorm1d: ((4,), lambda n: (1, 1, n), (2, 4, 1), "spatial element is needed"),
    DistributedGroupNorm: ((4, 4), lambda n: (1, 1, n), (1, 4, 1), "value per group is needed"),
}


@pytest.mark.parametrize("kind", ONE_VALUE)
def test_one_value_of_all_ranks_is_refused_and_one_of_each_is_not(P_world, comm, kind):
    arguments, grid, shape, said = ONE_VALUE[kind]
    P_x = P_world.create_cartesian_topology_partition(grid(comm.size))
    layer = kind(P_x, *arguments).double()
    twin = getattr(nn, kind.__name__.removeprefix("Distributed"))(*arguments).double()
    each = [n * parts for n, parts in zip(shape, P_x.shape, strict=True)]
    one, several = (torch.randn(n, dtype=torch.float64) for n in (shape, each))
    with pytest.raises(ValueError, match="more than 1"):
        twin(one)
    with pytest.raises(ShapeError, match=f"more than 1 {said}"):
        layer(shard(P_x, one))
    if comm.size > 1:
        agree(layer(shard(P_x, several)), shard(P_x, twin(several)))
    if kind is DistributedBatchNorm1d:
        agree(layer.eval()(shard(P_x, one)), shard(P_x, twin.eval()(one)))


def test_cut_parameters_and_buffers_say_where_they_are(P_world, comm):
    P_x = P_world.create_cartesian_topology_partition((1, comm.size, 1, 1))
    layer = DistributedBatchNorm2d(P_x, 7)
    cut = comm.size > 1
    buffers = {"running_mean", "running_var"} if cut else set()
    assert layer.layouts.keys() == {"weight", "bias"} | buffers
    assert sum(comm.allgather(layer.running_mean.numel())) == 7
    assert layer.placed.placements["weight"].store == layer.store
    whole = DistributedBatchNorm2d(P_world.create_cartesian_topology_partition((1, 1, comm.size, 1)), 7)
    assert whole.layouts.keys() == {"weight", "bias"}


@pytest.mark.mpi(min_size=4)
def test_callbacks_name_the_ranks_that_share(P_world, comm):
    four = P_world.create_partition_inclusive(range(4))

    def sharing(kind, grid, *arguments):
        return kind(four.create_cartesian_topology_partition(grid), *arguments).get_ranks_synch_norm()

    mine = comm.rank
    pair = [mine - mine % 2, mine - mine % 2 + 1]
    across = [mine % 2, mine % 2 + 2]
    assert sharing(DistributedBatchNorm1d, (2, 2, 1), 4) == across
    assert sharing(DistributedInstanceNorm1d, (2, 1, 2), 4) == pair
    assert sharing(DistributedLayerNorm, (2, 2), 4) == pair
    assert sharing(DistributedLayerNorm, (4, 1), 4) == []
    assert sharing(DistributedGroupNorm, (1, 4), 4, 8) == []
    assert sharing(DistributedGroupNorm, (1, 4), 2, 8) == pair
    assert sharing(DistributedGroupNorm, (1, 4), 1, 8) == [0, 1, 2, 3]
    weights = DistributedBatchNorm1d(four.create_cartesian_topology_partition((2, 2)), 4)
    assert weights.get_ranks_synch_weights() == across


@pytest.mark.parametrize("grid", [lambda n: (1, 1, n), lambda n: (1, n, 1), lambda n: (n, 1, 1)])
@pytest.mark.parametrize("groups", [1, 3])
def test_groups_of_no_channels_are_normalised_as_by_torch(P_world, comm, grid, groups):
    P_x = P_world.create_cartesian_topology_partition(grid(comm.size))
    layer, x = DistributedGroupNorm(P_x, groups, 0), torch.randn(2, 0, 5, requires_grad=True)
    y = layer(x)
    # torch 2.15 refuses it.
    assert y.shape == x.shape
    y.sum().backward()
    assert layer.weight.grad.shape == (0,)


@pytest.mark.parametrize("shape", [(0, 2, 4), (2, 2, 0)])
def test_an_empty_batch_is_counted_and_leaves_running_statistics(P_world, comm, shape):
    P_x = P_world.create_cartesian_topology_partition((1, 1, comm.size))
    layers = [DistributedBatchNorm1d(P_x, 2), DistributedInstanceNorm1d(P_x, 2, track_running_stats=True)]
    for layer, twin in zip(
        layers, [nn.BatchNorm1d(2), nn.InstanceNorm1d(2, track_running_stats=True)], strict=True
    ):
        x = torch.randn(shape, requires_grad=True)
        layer(x).sum().backward()
        if shape[0] or isinstance(twin, nn.BatchNorm1d):
            twin(x)
        assert all(torch.equal(a, b) for a, b in zip(layer.buffers(), twin.buffers(), strict=True))


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("kind", [DistributedBatchNorm1d, DistributedInstanceNorm1d])
@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda layer: layer.eval(), "'by_batch': True, .*'momentum': 0.1} but rank 1 {.*'by_batch': False"),
        (lambda layer: setattr(layer, "momentum", 0.5), "'momentum': 0.1} but rank 1 {.*'momentum': 0.5}"),
        (lambda layer: setattr(layer, "eps", 0.5), "'eps': 1e-05, .*but rank 1 {'eps': 0.5,"),
    ],
)
def test_modes_that_differ_are_refused_on_all_ranks_and_count_nothing(P_world, comm, kind, change, message):
    layer = kind(P_world.create_cartesian_topology_partition((1, 1, comm.size)), 3, track_running_stats=True)
    x = torch.randn(2, 3, 4)
    layer(x)
    state = {key: value.clone() for key, value in layer.state_dict().items()}
    if comm.rank == 1:
        change(layer)
    same_error(comm, lambda: layer(x), MismatchError, message)
    assert all(torch.equal(value, state[key]) for key, value in layer.state_dict().items())


def twins(P_world, kind, *arguments):
    """A layer with its channels cut, and torch's, for inputs (N, 6, 5)."""
    P_x = P_world.create_cartesian_topology_partition((1, P_world.size, 1))
    torchs = getattr(nn, kind.__name__.removeprefix("Distributed"))
    return kind(P_x, *arguments, dtype=torch.float64), torchs(*arguments, dtype=torch.float64)


def test_states_from_before_batches_were_counted_load(P_world):
    layer, _ = twins(P_world, DistributedBatchNorm1d, 6)
    layer.load_state_dict({key: value for key, value in layer.state_dict().items() if "tracked" not in key})
    assert layer.num_batches_tracked == 0


def test_torchs_update_of_statistics_finds_batch_norms(P_world, comm):
    P_x = P_world.create_cartesian_topology_partition((1, 1, comm.size))
    layer, twin = DistributedBatchNorm1d(P_x, 3, dtype=torch.float64), nn.BatchNorm1d(3, dtype=torch.float64)
    batches = [torch.randn(4, 3, 8, dtype=torch.float64) * n for n in range(1, 4)]
    update_bn(batches, twin)
    update_bn([shard(P_x, x) for x in batches], layer)
    for key, value in twin.state_dict().items():
        agree(layer.state_dict()[key], value, key)
    assert layer.momentum == 0.1


def test_a_conversion_to_torchs_synchronised_batch_norm_is_refused(P_world):
    layer, _ = twins(P_world, DistributedBatchNorm1d, 6)
    with pytest.raises(UnsupportedError, match="shares its statistics over all ranks already"):
        nn.SyncBatchNorm.convert_sync_batchnorm(nn.Sequential(layer))


@pytest.mark.parametrize(
    ("kind", "arguments"),
    [
        (DistributedBatchNorm1d, (6,)),
        (DistributedInstanceNorm1d, (6,)),
        (DistributedGroupNorm, (2, 6)),
        (DistributedLayerNorm, ((6, 5),)),
        (DistributedRMSNorm, ((6, 5),)),
    ],
)
def test_eps_may_be_set_between_calls_alike_on_all_ranks(P_world, comm, kind, arguments):
    layer, twin = twins(P_world, kind, *arguments)
    x = torch.randn(2, 6, 5, dtype=torch.float64)
    for eps in (1e-5, 1e-1, 10.0):
        layer.eps = twin.eps = eps
        agree(layer(shard(layer.P_x, x)), shard(layer.P_x, twin(x)), f"{eps}")
    if comm.size > 1:
        layer.eps = 1.0 + comm.rank
        with pytest.raises(MismatchError, match="eps must be alike on all ranks"):
            layer(shard(layer.P_x, x))


@pytest.mark.sizes(1, 2)
def test_numbers_may_be_those_of_numpy_and_tensors_without_dimensions(P_world):
    eps, momentum, two, six = (torch.tensor(number) for number in (1e-3, 0.3, 2, 6))
    x = torch.randn(2, 6, 5, dtype=torch.float64)
    for kind, arguments in (
        (DistributedBatchNorm1d, (six, eps, momentum)),
        (DistributedInstanceNorm1d, (six, eps, momentum, True, True)),
        (DistributedGroupNorm, (two, six, eps)),
        (DistributedLayerNorm, (torch.tensor([6, 5]), eps)),
        (DistributedLayerNorm, (np.int64(5),)),
        (DistributedLayerNorm, ([np.int64(5)],)),
    ):
        layer, twin = twins(P_world, kind, *arguments)
        assert not hasattr(twin, "normalized_shape") or layer.normalized_shape == twin.normalized_shape
        agree(layer(shard(layer.P_x, x)), shard(layer.P_x, twin(x)), kind.__name__)


def test_momentum_may_be_set_between_calls_and_makes_no_other_operation(P_world, comm):
    layer, twin = twins(P_world, DistributedBatchNorm1d, 6)
    used = set()
    for momentum in (0.1, 0.5, None):
        layer.momentum = twin.momentum = momentum
        x = torch.randn(4, 6, 5, dtype=torch.float64)
        layer(shard(layer.P_x, x))
        twin(x)
        used.add(id(layer.agreement.last))
        start, stop = layer.store.box(comm.rank).bounds[0]
        agree(layer.running_var, twin.running_var[start:stop], "running_var")
    assert len(used) == 1
