"""What a user answers in the place of a layer: used where it can be, refused on all ranks if not true."""

from functools import partial

import pytest
import torch
from torch import nn

from distdl_rma import (
    ConfigurationError,
    Distribution,
    GradientSync,
    Machine,
    PeerFailedError,
    ShapeError,
    zero_volume_tensor,
)
from distdl_rma.layers import Concat, Conv, DistributedConv1d, InstanceNorm
from tests.layers.partitioned.same_error import same_error
from tests.layers.partitioned.sequential import agree

pytestmark = pytest.mark.mpi


def test_statistics_are_shared_by_the_ranks_that_the_user_names(permuted, comm):
    rows, order = Distribution(1, 1, comm.size), permuted.ranks
    at = order.index(comm.rank)
    x = torch.randn(2, 3, 4 * comm.size, dtype=torch.float64)
    norm = nn.InstanceNorm1d(3, dtype=torch.float64)
    for width in (1, 2):
        first = at - at % width
        group = list(order[first : first + width])
        for ranks in (group, group[::-1], [] if group == [comm.rank] else group):
            given = {"dtype": torch.float64, "get_ranks_synch_norm": partial(list, ranks)}
            layer = InstanceNorm(permuted, (2, 3, 4 * comm.size), rows, **given)
            mine = x[:, :, 4 * at : 4 * at + 4].clone().requires_grad_()
            together = x[:, :, 4 * first : 4 * (first + width)].clone().requires_grad_()
            y, expected = layer(mine), norm(together)
            here = slice(4 * (at - first), 4 * (at - first) + 4)
            agree(y, expected[:, :, here], "output")
            y.pow(3).sum().backward()
            expected.pow(3).sum().backward()
            agree(mine.grad, together.grad[:, :, here], "input gradient")
            assert layer.get_ranks_synch_norm() == ranks
            GradientSync(layer, permuted).close()


def norm_of_rows(machine, n, **callbacks):
    return InstanceNorm(machine, (2, 3, 2 * n), Distribution(1, 1, n), **callbacks)


@pytest.mark.mpi(min_size=2)
@pytest.mark.in_turn(3)
@pytest.mark.parametrize("way", ["forward", "connect", "sync"])
@pytest.mark.parametrize(
    ("said", "message"),
    [
        (lambda r, n: [77], r"gave \[77\] on rank"),
        (lambda r, n: -5, "get_ranks_synch_norm"),
        (lambda r, n: 1 / 0, "get_ranks_synch_norm|ZeroDivisionError"),
        (lambda r, n: [(r + 1) % n], r"gave \[\d\] on rank"),
        (lambda r, n: [r, r], r"gave \[\d, \d\] on rank"),
        (lambda r, n: [r, 77], r"gave \[\d, 77\] on rank"),
        (lambda r, n: range(n) if r else [0], "all name each other, and nobody else"),
    ],
)
def test_ranks_that_cannot_share_statistics_are_refused_on_all_ranks(permuted, comm, way, said, message):
    # By all ranks, or by one whose others say nothing.
    for sayers in (range(comm.size), [0]):
        layer = norm_of_rows(permuted, comm.size)
        if comm.rank in sayers:
            layer.get_ranks_synch_norm = partial(said, comm.rank, comm.size)
        acts = {
            "forward": partial(layer, torch.ones(2, 3, 2)),
            "connect": layer.connect,
            "sync": partial(GradientSync, layer, permuted),
        }
        with torch.no_grad():
            same_error(comm, acts[way], ConfigurationError, message)
        if comm.rank in sayers:
            del layer.get_ranks_synch_norm
        # The machine goes on.
        layer(torch.ones(2, 3, 2))


@pytest.mark.mpi(min_size=2)
def test_statistics_of_other_channels_cannot_be_shared(permuted, comm):
    everyone = list(permuted.ranks)
    layer = InstanceNorm(
        permuted, (2, comm.size, 4), Distribution(1, comm.size, 1), get_ranks_synch_norm=lambda: everyone
    )
    with pytest.raises(ConfigurationError, match=r"but only ranks \[\d\] hold elements that share a mean"):
        layer(torch.ones(2, 1, 4))


def test_the_size_of_statistics_is_that_of_a_message_or_refused_on_all_ranks(permuted, comm):
    nbytes = 2 * 8 * (2 * 3)
    x = torch.rand(2, 3, 2)
    for wrong in (-5, 7, nbytes + 8, "a", None):
        layer = norm_of_rows(permuted, comm.size)
        if comm.rank == comm.size - 1:
            layer.get_sizeof_norm = lambda wrong=wrong: wrong
        with torch.inference_mode():
            match = rf"has {nbytes} bytes|on rank \d raised, or"
            same_error(comm, lambda layer=layer: layer(x), ConfigurationError, match)
    sizes = [nbytes, nbytes // 2]
    layer = norm_of_rows(permuted, comm.size, get_sizeof_norm=lambda: sizes[0])
    layer(x)
    sizes.pop(0)
    layer(x[:1])
    with pytest.raises(ConfigurationError, match=rf"gave {nbytes // 2} on rank \d, .* has {nbytes} bytes"):
        layer(x)


@pytest.mark.mpi(min_size=2)
def test_groups_that_share_statistics_count_alike_in_the_running_ones(permuted, comm):
    layer = norm_of_rows(
        permuted,
        comm.size,
        get_ranks_synch_norm=lambda: [comm.rank],
        track_running_stats=True,
        momentum=1.0,
        dtype=torch.float64,
    )
    x = torch.randn(2, 3, 2 * comm.size, dtype=torch.float64)
    at = permuted.ranks.index(comm.rank)
    layer(x[:, :, 2 * at : 2 * at + 2])
    # Each part of the image is an instance of its own.
    parts = x.view(2, 3, comm.size, 2).transpose(1, 2).reshape(-1, 3, 2)
    twin = nn.InstanceNorm1d(3, track_running_stats=True, momentum=1.0, dtype=torch.float64)
    twin(parts)
    agree(layer.running_mean, twin.running_mean)
    agree(layer.running_var, twin.running_var)
    with pytest.raises(ShapeError, match="more than 1 spatial element"):
        layer(x[:, :, :1])


def test_the_last_of_an_idle_ranks_callbacks_are_compared_too(comm):
    if comm.size == 1:
        return
    with Machine(comm, segment_size="4MiB", timeout=15) as machine:
        one = Distribution(1, 1, 1)
        x = torch.rand(2, 3, 4) if comm.rank == 0 else zero_volume_tensor(2)
        mine = [0] if comm.rank == 0 else []
        InstanceNorm(machine, (2, 3, 4), one, get_ranks_synch_norm=lambda: mine)(x)
        tracks = InstanceNorm(
            machine, (2, 3, 4), one, track_running_stats=True, get_ranks_synch_norm=lambda: [comm.rank]
        )
        with pytest.raises(ConfigurationError, match=r"gave \[1\] on rank 1, which has no part of"):
            tracks(x)


@pytest.mark.in_turn(3)
@pytest.mark.parametrize(
    ("callback", "said"),
    [
        ("get_sizeof_gradients", 7),
        ("get_sizeof_input_tensor", 9),
        ("get_sizeof_output_tensor", 9),
        ("get_sizeof_tensor", 9),
        ("get_ranks_synch_weights", [77]),
        ("get_ranks_synch_norm", [0, 77]),
        ("get_sizeof_norm", 3),
        ("get_sizeof_norm", "much"),
    ],
)
@pytest.mark.parametrize("kind", ["conv", "root", "concat"])
def test_what_a_user_says_of_a_layer_is_true_or_refused_without_a_sync_too(comm, callback, said, kind):
    machine = Machine(comm, segment_size="4MiB", timeout=15)
    one = Distribution(1, 1, 1)
    P_x = machine.distribute(one)
    given = {callback: lambda: said}
    if kind == "conv":
        layer = Conv(machine, (2, 3, 4, 9), one, kernel_size=3, **given)
    elif kind == "root":
        layer = DistributedConv1d(P_x, 3, 4, 3, weights="root", **given)
    else:
        layer = Concat(machine, (2, (3,), 9), [one], **given)
    # Nobody fails before all have the layer.
    comm.Barrier()
    x = torch.rand(2, 3, 9) if P_x.active else zero_volume_tensor(2)
    with torch.no_grad(), pytest.raises((ConfigurationError, PeerFailedError), match=callback):
        layer(x)
    comm.Barrier()
    machine.close()


def test_true_answers_of_a_user_are_taken(permuted, comm):
    one = Distribution(1, 1, 1)
    active = comm.rank == permuted.ranks[0]
    conv = Conv(
        permuted,
        (2, 3, 4, 9),
        one,
        kernel_size=3,
        get_sizeof_gradients=lambda: 4 * (4 * 3 * 3 + 4),
        get_sizeof_input_tensor=lambda: 4 * 2 * 3 * 9 * active,
        get_sizeof_output_tensor=lambda: 4 * 2 * 4 * 7 * active,
        get_ranks_synch_norm=list,
        get_sizeof_norm=lambda: 0,
    )
    y = conv(torch.rand(2, 3, 9) if active else zero_volume_tensor(2))
    assert y.numel() == conv.get_sizeof_output_tensor() // 4 == 2 * 4 * 7 * active
