"""The U-Net of the interface document trains as on one machine, however its levels are distributed."""

from functools import partial

import pytest
import torch
from torch import nn

from distdl_rma import Distribution, GradientSync, Machine, gather_state_dict
from distdl_rma.layers import DistributedConvTranspose2d, DistributedMSELoss, Repartition
from examples.unet_network import Distributed, Sequential, UNet, layouts, levels
from tests.layers.partitioned.sequential import shard

pytestmark = pytest.mark.mpi
SIZE, BATCH, WIDTH, STEPS = (49, 37), 2, 3, 4
LAYOUTS = list(layouts(1))


class DistributedTransposed(Distributed):
    """Up by convolutions instead of interpolation."""

    def upsample(self, source, target, channels, output):
        P_x, P_y = (self.machine.distribute(each) for each in (source.distribution, output))
        return DistributedConvTranspose2d(P_x, channels, channels, 3, 2, 1, extra(target), P_y=P_y)


class SequentialTransposed(Sequential):
    """The same from torch."""

    def upsample(self, source, target, channels, output):
        return nn.ConvTranspose2d(channels, channels, 3, 2, 1, extra(target))


def extra(target):
    """Output padding that leads to extents which the strided convolution had."""
    return tuple((extent + 1) % 2 for extent in target.size)


def tensors(size):
    """Question and answer of one step after the other, the same on all ranks."""
    generator = torch.Generator().manual_seed(5)
    shape = (STEPS, 2, BATCH, 3, *size)
    return torch.randn(shape, dtype=torch.float64, generator=generator)


def network(layers, places):
    torch.manual_seed(8)
    return UNet(layers, places, WIDTH).double()


def train(model, loss, batches, clip):
    """Losses of some steps of plain training."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, nesterov=True)
    losses = []
    for x, target in batches:
        optimizer.zero_grad()
        value = loss(model(x), target)
        value.backward()
        clip()
        optimizer.step()
        losses.append(value.item())
    return losses


def agree(actual, expected, tolerance, what):
    torch.testing.assert_close(
        actual, expected, rtol=tolerance, atol=tolerance, msg=lambda text: f"{what}: {text}"
    )


def check(comm, ranks, distributions, size=SIZE, ways=(Distributed, Sequential), max_norm=1e9):
    """Train on a machine of some ranks in some order, and alone; the rest of the ranks does nothing."""
    distributed, sequential = ways
    if comm.rank not in ranks:
        return
    batches, places = tensors(size), levels(size, distributions)
    theirs = network(sequential(), places)
    clip = partial(nn.utils.clip_grad_norm_, [*theirs.parameters()], max_norm)
    expected = train(theirs, nn.MSELoss(), batches, clip)
    assert len(set(expected)) == STEPS
    with Machine(comm, ranks, segment_size="64MiB", timeout=15) as machine:
        ours = network(distributed(machine, BATCH), places)
        sync = GradientSync(ours, machine)
        P_x = machine.distribute(places[0].distribution)
        own = [[shard(P_x, tensor) for tensor in batch] for batch in batches]
        losses = train(ours, DistributedMSELoss(P_x), own, partial(sync.clip_grad_norm_, max_norm))
        if P_x.active:
            agree(torch.tensor(losses).double(), torch.tensor(expected).double(), 1e-12, "losses")
        state = gather_state_dict(ours)
        assert state.keys() == theirs.state_dict().keys()
        for key, value in theirs.state_dict().items():
            agree(state[key], value, 1e-10, key)
        everyone = machine.distribute(Distribution(1, 1, 1, 1))
        with torch.no_grad():
            y = Repartition(P_x, everyone)(ours(own[0][0]))
            if everyone.active:
                agree(y, theirs(batches[0][0]), 1e-10, "output")


@pytest.mark.sizes(1, 2, 3, 4)
@pytest.mark.in_turn(3, 4)
@pytest.mark.parametrize("name", LAYOUTS)
def test_layout_of_the_demo(comm, name):
    check(comm, range(comm.size), layouts(comm.size)[name])


@pytest.mark.sizes(2, 3, 4)
@pytest.mark.in_turn(3, 4)
@pytest.mark.parametrize("name", LAYOUTS)
def test_permuted_machine_with_transposed_convolutions_and_clipped_gradients(comm, name):
    order = [2, 0, 3, 1] if comm.size == 4 else [*range(1, comm.size), 0]
    ways = DistributedTransposed, SequentialTransposed
    check(comm, order, layouts(comm.size)[name], SIZE if comm.size == 3 else (24, 35), ways, max_norm=0.05)


@pytest.mark.sizes(3, 4)
@pytest.mark.parametrize("name", ["columns", "channels"])
def test_machine_of_some_ranks(comm, name):
    ranks = [*range(comm.size)][:0:-1] or [0]
    check(comm, ranks, layouts(len(ranks))[name])


@pytest.mark.in_turn(3)
@pytest.mark.parametrize("size", [(24, 36), (17, 50), (9, 5)], ids=str)
def test_sizes_of_images(comm, size):
    # In the last one the coarsest images have 3 x 2 pixels, fewer than ranks.
    check(comm, range(comm.size), layouts(comm.size)["columns"], size)


def rows(n):
    return Distribution(1, 1, n, 1)


def channels(n):
    return Distribution(1, n, 1, 1)


def with_holes(n):
    parts, gap = (n + 1) // 2, n // ((n + 1) // 2)
    samples = Distribution(min(2, parts), 1, 1, 1, strides=(min(2, parts), 1, gap))
    return samples, Distribution(1, parts, 1, 1, strides=(1, parts, gap)), samples


# By the number of ranks the machine, the distributions of the levels, and the size of images if another one.
CASES = {
    "holes at every level": lambda n: (range(n), with_holes(n)),
    "channels are split at every level": lambda n: (range(n), (channels(n),) * 3),
    "fewer ranks with every level": lambda n: (range(n), (rows(n), rows((n + 1) // 2), rows(1))),
    "photographs on one rank": lambda n: ([*range(n)][::-1], (rows(1), Distribution(1, 1, 1, n), rows(1))),
    "more ranks than the coarsest image has rows": lambda n: (range(n), (rows(n),) * 3, (9, 20)),
}


@pytest.mark.sizes(2, 3)
@pytest.mark.parametrize("case", CASES)
def test_distributions_that_are_unusual(comm, case):
    check(comm, *CASES[case](comm.size))


@pytest.mark.mpi(min_size=4)
def test_packed_where_the_box_does_not_fit(comm):
    # Two channel blocks of two rows in a box of one by four.
    packed = Distribution(1, 2, 2, 1, strides=(1, 1, 4))
    check(comm, [1, 3, 0, 2], (rows(4), packed, Distribution(2, 1, 1, 2, strides=(1, 1, 4))))
