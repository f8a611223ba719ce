"""The U-Net of the interface document trains as on one machine, however its levels are distributed."""

from functools import partial

import pytest
import torch
from torch import nn

from distdl_rma import Distribution, GradientSync, Machine, gather_state_dict
from distdl_rma.layers import DistributedConvTranspose2d, DistributedMSELoss, Repartition
from examples.unet_network import Distributed, Sequential, UNet, layouts, levels
from tests.layers.sequential import shard

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


@pytest.mark.sizes(2, 3, 4)
def test_holes_at_every_level(comm):
    parts, gap = (comm.size + 1) // 2, comm.size // ((comm.size + 1) // 2)
    channels = Distribution(1, parts, 1, 1, strides=(1, parts, gap))
    samples = Distribution(min(2, parts), 1, 1, 1, strides=(min(2, parts), 1, gap))
    check(comm, range(comm.size), (samples, channels, samples))


def test_channels_are_split_at_every_level(comm):
    channels = Distribution(1, comm.size, 1, 1)
    check(comm, range(comm.size), (channels, channels, channels))


def test_fewer_ranks_with_every_level(comm):
    rows, fewer, one = (Distribution(1, 1, n, 1) for n in (comm.size, (comm.size + 1) // 2, 1))
    check(comm, range(comm.size), (rows, fewer, one))


def test_photographs_on_one_rank_and_the_rest_on_all(comm):
    one, columns = Distribution(1, 1, 1, 1), Distribution(1, 1, 1, comm.size)
    check(comm, [*range(comm.size)][::-1], (one, columns, one))


def test_more_ranks_than_the_coarsest_image_has_rows(comm):
    rows = Distribution(1, 1, comm.size, 1)
    check(comm, range(comm.size), (rows, rows, rows), (9, 20))


@pytest.mark.mpi(min_size=4)
def test_packed_where_the_box_does_not_fit(comm):
    # Two channel blocks of two rows in a box of one by four.
    rows, packed = Distribution(1, 1, 4, 1), Distribution(1, 2, 2, 1, strides=(1, 1, 4))
    check(comm, [1, 3, 0, 2], (rows, packed, Distribution(2, 1, 1, 2, strides=(1, 1, 4))))
