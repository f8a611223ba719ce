"""Copies of layers are layers of their own; pickles of them are refused."""

import copy
import io
import pickle

import pytest
import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from distdl_rma import GradientSync, Machine, UnsupportedError, gather_state_dict
from distdl_rma.layers import DistributedBatchNorm2d, DistributedConv1d, DistributedConv2d, DistributedMSELoss
from tests.layers.partitioned.every_layer import EVERY_LAYER, local, outcome, rows
from tests.layers.partitioned.sequential import agree, shard

pytestmark = pytest.mark.mpi
F64 = {"dtype": torch.float64}
IMAGE = (4, 2, 13, 8)


@pytest.mark.parametrize("used", [False, True])
def test_a_copy_of_any_layer_computes_what_the_layer_does(P_world, used):
    for make in EVERY_LAYER.values():
        layer, inputs = make(P_world)
        if used:
            outcome(layer, inputs)
        twin = copy.deepcopy(layer)
        assert repr(twin) == repr(layer)
        assert twin.machine is layer.machine
        # In turns: what both have under way are two things.
        for _ in range(2):
            found, expected = ([*outcome(net, inputs), *net.buffers()] for net in (twin, layer))
            torch.testing.assert_close(found, expected, rtol=0, atol=0)


@pytest.mark.mpi(min_size=2)
def test_a_copy_that_one_rank_makes_disturbs_no_other_layer(P_world, comm):
    layer, other = (DistributedConv2d(rows(P_world), 4, 4, 3, padding=1) for _ in range(2))
    if comm.rank == 1:
        kept = copy.deepcopy(layer)
        torch.testing.assert_close(kept.weight, layer.weight)
    for net in (layer, other):
        outcome(net, [local()])


def test_callbacks_of_a_copy_are_answered_for_the_copy(P_world):
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            P_x = P_world.create_cartesian_topology_partition((1, 1, P_world.size))
            self.conv = DistributedConv1d(P_x, 1, 1, 1, get_ranks_synch_weights=self.nobody)
            self.asked = 0

        def nobody(self):
            self.asked += 1
            return []

    model = Model()
    twin = copy.deepcopy(model)
    twin.conv(torch.rand(1, 1, 3)).sum().backward()
    assert twin.conv.get_ranks_synch_weights() == []
    assert (model.asked, twin.asked > 0) == (0, True)


def network(P_x=None):
    torch.manual_seed(3)
    given = [] if P_x is None else [P_x]
    conv, norm = (nn.Conv2d, nn.BatchNorm2d) if P_x is None else (DistributedConv2d, DistributedBatchNorm2d)
    return nn.Sequential(
        conv(*given, 2, 4, 3, padding=1, **F64),
        norm(*given, 4, **F64),
        nn.ReLU(),
        conv(*given, 4, 2, 3, padding=1, **F64),
    )


def batches(seed, count=3):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(IMAGE, generator=generator, **F64) for _ in range(count)]


def train(model, criterion, xs, cut, after=lambda: None):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for x in xs:
        optimizer.zero_grad()
        criterion(model(cut(x)), cut(torch.sin(x))).backward()
        optimizer.step()
        after()


def like(model, sequential):
    expected = sequential.state_dict()
    for key, value in gather_state_dict(model).items():
        agree(value, expected[key], key)


@pytest.mark.parametrize("synchronised", ["neither", "the layer", "both"])
def test_a_copy_and_its_layer_train_independently(P_world, synchronised):
    P_x = rows(P_world)
    model, sequential, criterion = network(P_x), network(), DistributedMSELoss(P_x)
    sync = None if synchronised == "neither" else GradientSync(model, P_world)

    def cut(x):
        return shard(P_x, x)

    def train_both(ours, theirs, seed):
        train(ours, criterion, batches(seed), cut)
        train(theirs, nn.MSELoss(), batches(seed), torch.clone)

    train_both(model, sequential, 1)
    twin, sequential_twin = copy.deepcopy((model, sequential))
    assert not any(net.placed.taken_over for net in (twin[0], twin[3]))
    other = GradientSync(twin, P_world) if synchronised == "both" else None
    train_both(twin, sequential_twin, 2)
    like(model, sequential)
    train_both(model, sequential, 3)
    like(model, sequential)
    like(twin, sequential_twin)
    for opened in filter(None, (other, sync)):
        opened.close()


@pytest.mark.sizes(1, 2, 3, 4)
@pytest.mark.parametrize("average", [None, get_ema_multi_avg_fn(0.7)])
@pytest.mark.parametrize("weights", ["replicated", "root"])
def test_averaged_model_is_that_of_the_sequential_model(P_world, average, weights):
    P_x = rows(P_world)
    model, sequential, criterion = network(P_x), network(), DistributedMSELoss(P_x)
    if weights == "root":
        torch.manual_seed(3)
        model[0] = DistributedConv2d(P_x, 2, 4, 3, padding=1, weights="root", **F64)
    mean, expected = (AveragedModel(m, multi_avg_fn=average, use_buffers=True) for m in (model, sequential))
    with GradientSync(model, P_world):
        train(model, criterion, batches(4), lambda x: shard(P_x, x), lambda: mean.update_parameters(model))
    train(sequential, nn.MSELoss(), batches(4), torch.clone, lambda: expected.update_parameters(sequential))
    like(mean, expected)
    (x,) = batches(5, 1)
    agree(mean.eval()(shard(P_x, x)).detach(), shard(P_x, expected.eval()(x)))


def test_pickling_is_refused_with_what_to_do_instead(P_world):
    model = network(rows(P_world))
    for save in (pickle.dumps, lambda thing: torch.save(thing, io.BytesIO())):
        for thing in (model, P_world, Machine.of(P_world)):
            with pytest.raises(UnsupportedError, match=r"save state_dict\(\), or gather_state_dict"):
                save(thing)
    torch.save(model.state_dict(), io.BytesIO())
