"""Norms are torch's layers for whatever looks for those."""

import pytest
import torch
from torch import nn
from torch.optim.swa_utils import update_bn

from distdl_rma import MismatchError, UnsupportedError
from distdl_rma import layers as distributed
from tests.layers.sequential import agree, shard

pytestmark = pytest.mark.mpi
ARGUMENTS = {
    "BatchNorm1d": (3, (6,)),
    "BatchNorm2d": (4, (6,)),
    "BatchNorm3d": (5, (6,)),
    "InstanceNorm1d": (3, (6,)),
    "InstanceNorm2d": (4, (6,)),
    "InstanceNorm3d": (5, (6,)),
    "GroupNorm": (3, (2, 6)),
    "LayerNorm": (3, ((6, 5),)),
    "RMSNorm": (3, ((6, 5),)),
}


def pair(P_world, kind, **options):
    dims, arguments = ARGUMENTS[kind]
    P_x = P_world.create_cartesian_topology_partition((1, P_world.size, *(1,) * (dims - 2)))
    layer = getattr(distributed, f"Distributed{kind}")(P_x, *arguments, **options)
    options.pop("placement", None)
    return layer, getattr(nn, kind)(*arguments, **options)


def test_states_from_before_batches_were_counted_load(P_world, comm):
    layer, twin = pair(P_world, "BatchNorm1d")
    state = {key: value for key, value in layer.state_dict().items() if key != "num_batches_tracked"}
    layer.load_state_dict(state)
    assert layer.num_batches_tracked == twin.num_batches_tracked == 0


def test_update_bn_finds_them(P_world, comm):
    P_x = P_world.create_cartesian_topology_partition((1, 1, comm.size))
    layer, twin = (
        distributed.DistributedBatchNorm1d(P_x, 3, dtype=torch.float64),
        nn.BatchNorm1d(3, dtype=torch.float64),
    )
    batches = [torch.randn(4, 3, 8, dtype=torch.float64) * n for n in range(1, 4)]
    update_bn(batches, twin)
    update_bn([shard(P_x, x) for x in batches], layer)
    for key, value in twin.state_dict().items():
        agree(layer.state_dict()[key], value, key)
    assert layer.momentum == 0.1


def test_a_conversion_to_torchs_synchronised_batch_norm_is_refused(P_world, comm):
    layer, _ = pair(P_world, "BatchNorm2d")
    with pytest.raises(UnsupportedError, match="shares its statistics over all ranks already"):
        nn.SyncBatchNorm.convert_sync_batchnorm(nn.Sequential(layer))


@pytest.mark.parametrize("kind", ["BatchNorm1d", "InstanceNorm1d", "GroupNorm", "LayerNorm", "RMSNorm"])
def test_eps_may_be_set_between_calls_alike_on_all_ranks(P_world, comm, kind):
    layer, twin = pair(P_world, kind, dtype=torch.float64)
    x = torch.randn(2, 6, 5, dtype=torch.float64)
    for eps in (1e-5, 1e-1, 10.0):
        layer.eps = twin.eps = eps
        agree(layer(shard(layer.P_x, x)), shard(layer.P_x, twin(x)), f"{eps}")
    if comm.size > 1:
        layer.eps = 1.0 + comm.rank
        with pytest.raises(MismatchError, match="eps must be alike on all ranks"):
            layer(shard(layer.P_x, x))


def test_momentum_may_be_set_between_calls_and_makes_no_other_operation(P_world, comm):
    layer, twin = pair(P_world, "BatchNorm1d", dtype=torch.float64)
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


def test_placements_have_one_vocabulary(P_world, comm):
    P_x = P_world.create_cartesian_topology_partition((1, comm.size, 1))
    make = distributed.DistributedInstanceNorm1d
    whole = make(P_x, 6, affine=True, placement="replicated")
    assert whole.weight.shape == make(P_x, 6, affine=True, weights="replicated").weight.shape == (6,)
    assert "placement='replicated'" in repr(whole)
    assert "placement" not in repr(make(P_x, 6))
