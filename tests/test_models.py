"""Whole networks, split over the ranks of the run, train as they do on one machine."""

import pytest
import torch
from torch import nn

from distdl_rma import gather_state_dict, load_global_state_dict
from distdl_rma.layers import (
    DistributedAdaptiveAvgPool2d,
    DistributedBatchNorm2d,
    DistributedConv2d,
    DistributedCrossEntropyLoss,
    DistributedLinearAllGather,
    DistributedMaxPool2d,
)
from tests.layers.sequential import shard

pytestmark = pytest.mark.mpi
STEPS = 20
TOLERANCE = {torch.float32: 1e-4, torch.float64: 1e-10}
each_type = pytest.mark.parametrize(
    "dtype",
    [
        pytest.param(torch.float32, marks=pytest.mark.sizes(2)),
        pytest.param(torch.float64, marks=pytest.mark.sizes(1, 3, 4)),
    ],
    ids=str,
)
GRIDS = {1: (1, 1, 1, 1), 2: (1, 1, 2, 1), 3: (1, 1, 1, 3), 4: (1, 1, 2, 2)}
DISTRIBUTED = {
    nn.Conv2d: DistributedConv2d,
    nn.BatchNorm2d: DistributedBatchNorm2d,
    nn.MaxPool2d: DistributedMaxPool2d,
    nn.AdaptiveAvgPool2d: DistributedAdaptiveAvgPool2d,
}


def sequential(kind, *args, **kwargs):
    """A torch layer."""
    return kind(*args, **kwargs)


def on(P_x):
    """What makes the distributed twin of a torch layer."""
    return lambda kind, *args, **kwargs: DISTRIBUTED[kind](P_x, *args, **kwargs)


class Block(nn.Module):
    """Basic block of a ResNet."""

    def __init__(self, make, inputs, width, stride):
        super().__init__()
        self.conv1 = make(nn.Conv2d, inputs, width, 3, stride, 1, bias=False)
        self.bn1 = make(nn.BatchNorm2d, width)
        self.conv2 = make(nn.Conv2d, width, width, 3, 1, 1, bias=False)
        self.bn2 = make(nn.BatchNorm2d, width)
        self.relu = nn.ReLU(inplace=True)
        self.downsample = None
        if stride > 1 or inputs != width:
            self.downsample = nn.Sequential(
                make(nn.Conv2d, inputs, width, 1, stride, bias=False), make(nn.BatchNorm2d, width)
            )

    def forward(self, x):
        y = self.bn2(self.conv2(self.relu(self.bn1(self.conv1(x)))))
        return self.relu(y + (x if self.downsample is None else self.downsample(x)))


class ResNet(nn.Module):
    """ResNet-18 with few channels."""

    def __init__(self, make, head, width=4):
        super().__init__()
        self.stem = nn.Sequential(
            make(nn.Conv2d, 3, width, 7, 2, 3, bias=False),
            make(nn.BatchNorm2d, width),
            nn.ReLU(inplace=True),
            make(nn.MaxPool2d, 3, 2, 1),
        )
        blocks, inputs = [], width
        for stage in range(4):
            outputs = width << stage
            blocks += [Block(make, inputs, outputs, 1 + (stage > 0)), Block(make, outputs, outputs, 1)]
            inputs = outputs
        self.stages = nn.Sequential(*blocks)
        self.pool = make(nn.AdaptiveAvgPool2d, 1)
        self.head = head(inputs, 10)

    def forward(self, x):
        return self.head(self.pool(self.stages(self.stem(x))).flatten(1))


def train(model, loss, x, target, rate):
    """Losses of some steps of plain training."""
    optimizer = torch.optim.SGD(model.parameters(), lr=rate, momentum=0.9)
    losses = []
    for _ in range(STEPS):
        optimizer.zero_grad()
        value = loss(model(x), target)
        value.backward()
        optimizer.step()
        losses.append(value.item())
    return torch.tensor(losses, dtype=torch.float64)


def resnets(P_world, comm):
    """ResNet on the ranks of the run, and on one."""
    size = comm.size
    P_x = P_world.create_cartesian_topology_partition(GRIDS[size])
    P_root = P_world.create_partition_inclusive([0]).create_cartesian_topology_partition((1, 1))
    P_y = P_world.create_cartesian_topology_partition((1, size))
    torch.manual_seed(7)
    ours = ResNet(on(P_x), lambda n, m: DistributedLinearAllGather(P_y, n, m, P_x=P_root))
    torch.manual_seed(7)
    return P_x, P_y, ours, ResNet(sequential, nn.Linear)


@each_type
def test_resnet_trains_as_on_one_machine(P_world, comm, dtype):
    P_x, P_y, ours, theirs = resnets(P_world, comm)
    ours, theirs = ours.to(dtype), theirs.to(dtype)
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(3, 3, 33, 40, dtype=dtype, generator=generator)
    target = torch.randint(10, (3,), generator=generator)
    loss = DistributedCrossEntropyLoss(P_y)
    expected = train(theirs, nn.CrossEntropyLoss(), x, target, 0.01)
    losses = train(ours, loss, shard(P_x, x), target, 0.01)
    torch.testing.assert_close(losses, expected, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])
    assert losses[-1] < losses[0]
    state = gather_state_dict(ours)
    for key, value in theirs.state_dict().items():
        torch.testing.assert_close(state[key], value, rtol=10 * TOLERANCE[dtype], atol=10 * TOLERANCE[dtype])


def test_state_of_a_network_moves_to_other_partitions_and_to_torch(P_world, comm):
    _, _, ours, theirs = resnets(P_world, comm)
    with torch.no_grad():
        for value in (*theirs.parameters(), *theirs.buffers()):
            value.copy_(torch.arange(value.numel()).view(value.shape) % 7)
    state = dict(reversed(theirs.state_dict().items()))
    missing, unexpected = load_global_state_dict(ours, state)
    assert not missing
    assert not unexpected
    gathered = gather_state_dict(ours)
    assert gathered.keys() == theirs.state_dict().keys()
    for key, value in theirs.state_dict().items():
        assert torch.equal(gathered[key], value), key
    theirs.load_state_dict(gathered)
    only = gather_state_dict(ours, rank=0)
    assert bool(only) == (comm.rank == 0)
