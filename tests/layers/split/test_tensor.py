"""A split tensor shows itself as the whole, and refuses what it cannot answer."""

import pickle

import pytest
import torch
from torch.autograd import forward_ad
from torch.nn import functional as F  # noqa: N812
from torch.utils.checkpoint import checkpoint

from distdl_rma import MPIPartition, PartitionError, ShapeError, SplitTensor, UnsupportedError, shard

pytestmark = pytest.mark.mpi

SHAPE = (2, 3, 7, 4)


def test_blocks_of_any_size_that_form_a_grid(P_x):
    mine = torch.full((2, 3, 1 + P_x.rank, 4), float(P_x.rank))
    x = SplitTensor.from_local(mine, P_x)
    assert x.shape[2] == sum(range(1, P_x.size + 1))
    assert x.to_local() is mine
    assert (x + 1).full_tensor()[0, 0, -1, 0] == P_x.size


@pytest.mark.mpi(min_size=2)
def test_blocks_that_form_no_grid_or_are_of_other_types_are_refused_by_all(P_x):
    dtype = torch.float32 if P_x.rank else torch.float64
    for mine, shape, words in (
        (torch.zeros(2, 3, 4, 4 + P_x.rank), None, "must agree in dimension 3"),
        (torch.zeros(2, 3, 40, 4), SHAPE, "its block of"),
        (torch.zeros(2, 3, 4, 4, dtype=dtype), None, r"float64.* but rank"),
    ):
        with pytest.raises(ShapeError, match=words):
            SplitTensor.from_local(mine, P_x, shape)


VALUES = r"full_tensor\(\).*test_tensor.py|test_tensor.py.*full_tensor\(\)"
NO_LAYOUT = "needs for each of 4 grid dimensions"
# Calls of a cut tensor, and their errors with the remedy.
REFUSED = [
    *((ask, UnsupportedError, VALUES) for ask in (torch.Tensor.numpy, torch.Tensor.tolist, pickle.dumps)),
    (torch.Tensor.data_ptr, UnsupportedError, VALUES),
    (torch.special.bessel_y0, UnsupportedError, r"bessel_y0.*test_tensor\.py:\d+.*register"),
    (lambda x: x.redistribute(2), PartitionError, NO_LAYOUT),
    (lambda x: x.redistribute(None, None, None, 9), PartitionError, NO_LAYOUT),
    (torch.utils.dlpack.to_dlpack, UnsupportedError, "memory that is not all here"),
]


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize(("ask", "error", "words"), REFUSED)
def test_what_a_cut_tensor_cannot_answer_is_refused_with_the_remedy(P_x, whole, ask, error, words):
    with pytest.raises(error, match=words):
        ask(shard(P_x, whole))


def test_tensors_of_two_machines_do_not_meet(comm, P_x, whole):
    other_comm = comm.Dup()
    other = MPIPartition(other_comm)
    try:
        x = shard(other.create_cartesian_topology_partition((1, 1, other.size, 1)), whole)
        with pytest.raises(PartitionError, match="two machines"):
            shard(P_x, whole) + x
    finally:
        other.deactivate()
        other_comm.Free()


def test_tensors_to_write_results_into_are_refused(P_world):
    x = shard(P_world.create_cartesian_topology_partition((1, P_world.size)), torch.randn(3, 7))
    out, places = torch.empty(0), torch.empty(0, dtype=torch.int64)
    for call in (
        lambda: torch.add(x, x, out=out),
        lambda: torch.stack([x, x], out=out),
        lambda: torch.gather(x, 0, torch.zeros(1, 7, dtype=torch.int64), out=out),
        lambda: torch.index_select(x, 0, torch.tensor([1]), out=out),
        lambda: torch.max(x, 1, out=(out, places)),
        lambda: torch.exp(torch.ones(3, 7), out=x),
    ):
        with pytest.raises(UnsupportedError, match="out= is not supported"):
            call()
    assert torch.add(x, x, out=None).shape == x.shape
    everywhere = x.redistribute()
    torch.special.airy_ai(everywhere, out=(given := torch.empty(3, 7)))
    torch.testing.assert_close(given, torch.special.airy_ai(everywhere.to_local()))


def _add_to_rows(x):
    x[:, :, 1:3] += 1.5


@pytest.mark.parametrize(
    "change",
    [
        lambda x: x.add_(1.5),
        torch.relu_,
        lambda x: torch.nn.functional.elu(x, inplace=True),
        lambda x: x.transpose(0, 1).mul_(2),
        lambda x: x.detach().zero_(),
        lambda x: x.to_local().detach().add_(1),
        _add_to_rows,
    ],
)
def test_what_a_checkpoint_was_given_is_not_recomputed_once_it_has_changed(P_x, whole, change):
    leaf = shard(P_x, whole.clone().requires_grad_())
    y = leaf * 1
    rows = checkpoint(torch.sin, y[:, 1:], use_reentrant=False)
    z = checkpoint(torch.sin, y, use_reentrant=False)
    change(y)
    for found in (rows, z):
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            found.sum().backward()
    # All ranks raised alike, and go on.
    checkpoint(torch.sin, leaf, use_reentrant=False).sum().backward()
    torch.testing.assert_close(leaf.grad.full_tensor(), whole.cos())


def _view_written(x):
    y = x * 1
    y.transpose(0, 1)[:, :1].mul_(3)
    return y


@pytest.mark.sizes(1, 2, 3, 4)
@pytest.mark.parametrize(
    "function",
    [
        # Ranks recompute at the same place where it ends in a view.
        lambda x: F.pad(x.roll(1, 2).exp().sum(0).logsumexp(0).mT, [0, 3], mode="replicate"),
        lambda x: F.pad(x.roll(1, 2).exp().sum(0), [0, 0, 2, 1], mode="reflect"),
        lambda x: x.roll(1, 2).exp().logsumexp(2),
        lambda x: x.roll(1, 2).exp()[:, :, :2].std(2),
        _view_written,
    ],
)
def test_a_checkpoint_is_recomputed_as_on_whole_tensors(P_x, whole, function):
    x = whole.clone().requires_grad_()
    (y := function(x)).square().sum().backward()
    leaf = shard(P_x, whole.clone().requires_grad_())
    (z := checkpoint(function, leaf, use_reentrant=False)).square().sum().backward()
    torch.testing.assert_close(z.full_tensor(), y)
    torch.testing.assert_close(leaf.grad.full_tensor(), x.grad)


def test_what_became_split_has_a_version_too(P_x, whole):
    y, p = torch.zeros(SHAPE, dtype=torch.float64), torch.ones((), dtype=torch.float64, requires_grad=True)
    y[:] = shard(P_x, whole)
    z = checkpoint(torch.mul, y, p, use_reentrant=False)
    y.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        z.sum().backward()


def test_what_a_graph_keeps_does_not_become_split(P_x, whole):
    y, p = torch.zeros(SHAPE, dtype=torch.float64), torch.ones((), dtype=torch.float64, requires_grad=True)
    z = (y * p).sum()
    with pytest.raises(UnsupportedError, match="a graph or a weak reference holds it"):
        y[:] = shard(P_x, whole).requires_grad_()
    z.backward(retain_graph=True)
    y[:] = shard(P_x, whole)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        z.backward()


@pytest.mark.mpi(min_size=2)
@pytest.mark.filterwarnings("ignore:.*torch.jit.script:DeprecationWarning")
@pytest.mark.processes
def test_tangents_of_cut_tensors_are_refused_and_those_of_copies_exact(P_x, whole):
    x, tangent = shard(P_x, whole), torch.randn(SHAPE, dtype=torch.float64)
    with forward_ad.dual_level():
        dual = forward_ad.make_dual(whole, tangent)
        for use in (
            lambda: forward_ad.make_dual(x, x),
            lambda: forward_ad.unpack_dual(x),
            lambda: shard(P_x, dual),
            lambda: SplitTensor.from_local(dual[x.decomposition.slices()], P_x),
            lambda: x * dual,
            lambda: torch.where(x > 0, x, other=dual),
        ):
            with pytest.raises(UnsupportedError, match=r"forward-mode derivatives|_dual at"):
                use()
        torch.testing.assert_close((x * 2).sum().full_tensor(), 2 * whole.sum())
        copies = forward_ad.make_dual(x.redistribute(), shard(P_x, tangent).redistribute())
        found = forward_ad.unpack_dual((copies.sin() * dual).sum(1)).tangent
        expected = forward_ad.unpack_dual((dual.sin() * dual).sum(1)).tangent
        torch.testing.assert_close(found.full_tensor(), expected)
