"""What functions along dimensions share."""

import pytest
import torch
from torch.nn import functional as F  # noqa: N812

from distdl_rma import shard
from distdl_rma.layers.split import layout_choice, reduction_axes
from distdl_rma.layers.split.calls.site import site_of
from distdl_rma.layers.split.reduction_axes import (
    Along,
    chosen_dims,
    computed,
    laid_out,
    positive,
    put_back,
    with_whole,
)


def test_dimensions_are_counted_from_either_end():
    assert chosen_dims(None, 3) == chosen_dims((), 3) == (0, 1, 2)
    assert chosen_dims((-1, 0), 3) == (0, 2)
    assert chosen_dims(1, 3) == (1,) and positive(-1, 0) == 0
    for wrong in (3, -4):
        with pytest.raises(IndexError, match=r"\[-3, 2\]"):
            positive(wrong, 3)


@pytest.mark.mpi(min_size=2)
def test_results_of_blocks_come_together(rows):
    along, other = (Along.of(site_of(rows.machine, torch.amax), rows, dims) for dims in ((2, 3), 3))
    assert along.count == 20 and along.ranks == rows.partition.ranks and other.ranks == (rows.partition.me,)
    mine = computed(lambda x: x.amax((2, 3), True), along.local)
    every = along.together(mine, "largest")
    assert every.shape == (2, 3, rows.partition.size, 1)
    assert torch.equal(every.amax((2, 3)), rows.full_tensor().amax((2, 3)))
    assert not along.result(every.amax((2, 3), True), False).is_split
    assert other.together(mine, "largest") is mine
    kept = other.result(rows.to_local().amax(3, True), True)
    assert kept.decomposition.cut_dims == (2,) and kept.shape == (2, 3, 5, 1)


@pytest.mark.mpi(min_size=2)
def test_another_dimension_is_cut_meanwhile(rows):
    layout, along = rows.decomposition, Along.of(site_of(rows.machine, torch.sort), rows, 2)
    # The longest of those that are left, and copies where none is.
    assert layout_choice.cut_other_dims(layout, (2,)).cut_dims == (3,)
    assert layout_choice.cut_other_dims(layout, (2, 3)).cut_dims == (1,)
    assert layout_choice.cut_other_dims(layout, range(4)).cut_dims == ()
    local, found = with_whole(along.site, rows, (2,))
    assert found.cut_dims == (3,) and local.shape[2] == 5
    back = put_back(along.site, local, found, layout)
    assert back.decomposition is layout and torch.equal(back.to_local(), rows.to_local())
    shorter = put_back(along.site, local[:, :, :3], found, layout)
    assert torch.equal(shorter.full_tensor(), rows.full_tensor()[:, :, :3])
    assert with_whole(along.site, rows, (0, 1)) == (rows.to_local(), layout)


@pytest.mark.mpi(min_size=2)
def test_a_result_is_laid_out_by_the_order_of_dimensions(rows):
    layout = rows.decomposition
    found = laid_out(layout, [2, None, 0, 3], rows.to_local()[:, 0, :, :2].permute(1, 0, 2).unsqueeze(1))
    assert found.shape == (5, 1, 2, 2) and found.cut_dims == (0,) and found.splits[0] == layout.splits[2]


@pytest.mark.sizes(2, 3, 4)
@pytest.mark.parametrize(
    "function",
    [
        lambda x: x.sort(2).values,
        lambda x: torch.fft.fft(x, dim=2),
        lambda x: x.flip(2),
        lambda x: x.index_select(2, torch.tensor([5, 0, 5])),
        lambda x: F.unfold(x[:, :, :, :1].expand(1, 6, 8, 1), (3, 1)),
        lambda x: F.interpolate(
            x.expand(1, 5, 8, 3).contiguous(), scale_factor=0.6, mode="bilinear", antialias=True
        ),
    ],
)
@pytest.mark.mpi(min_size=2)
def test_functions_that_need_a_dimension_whole_cut_the_longest_other_one(
    function, P_world, comm, monkeypatch
):
    seen = []
    move = reduction_axes.redistributed

    def recorded(site, x, source, target, *others):
        seen.append(target)
        return move(site, x, source, target, *others)

    monkeypatch.setattr(reduction_axes, "redistributed", recorded)
    x = torch.rand(1, 1, 8, 3)
    # Of three elements, some of four ranks have none meanwhile.
    y = function(shard(P_world.create_cartesian_topology_partition((1, 1, comm.size, 1)), x))
    free = [d for d in range(len(seen[0].shape)) if d != 2 and seen[0].shape[d] > 1]
    assert seen[0].cut_dims == (max(free, key=lambda d: seen[0].shape[d]),)
    torch.testing.assert_close(y.full_tensor(), function(x))
