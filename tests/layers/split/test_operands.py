"""Tensors that meet: the layout of the result, and each operand as its ranks need it."""

import pytest
import torch

from distdl_rma import Machine, PartitionError, ShapeError, UnsupportedError, shard
from distdl_rma.layers.split.calls.site import site_of
from distdl_rma.layers.split.operands import (
    as_blocks,
    as_part,
    as_whole,
    block_of,
    common_layout,
    common_partition,
    composition,
    needs_of,
    of_any_cut,
    of_cut,
    on_whole_tensors,
    part_for,
)
from tests.layers.split.against_whole import check

pytestmark = pytest.mark.mpi
SHAPE = (2, 3, 5, 4)


@pytest.fixture
def site(P_world):
    return site_of(Machine.of(P_world), common_layout)


@pytest.mark.mpi(min_size=2)
def test_the_largest_operand_says_how_a_result_is_cut(rows):
    layout = rows.decomposition
    columns = rows.redistribute(None, None, 3, None)
    for others in ((), (torch.ones(4),), (torch.ones(5, 1), 1 * columns[:1]), (rows.mean(2, keepdim=True),)):
        assert common_layout(torch.add, [*others, rows]) is layout
    assert common_layout(torch.add, [columns, rows]) == columns.decomposition
    thin = common_layout(torch.add, [rows[:1, :1], torch.ones(2, 3, 1, 1)])
    assert thin.shape == SHAPE and thin.cut_dims == (2,)
    with pytest.raises(ShapeError, match=r"do not go together\. All shapes are those of whole.*from_local"):
        common_layout(torch.add, [rows, torch.ones(2, 3, 3, 4)])


@pytest.mark.mpi(min_size=2)
def test_an_operand_is_cut_where_the_result_is_and_whole_where_it_has_one_element(rows, site):
    layout, whole = rows.decomposition, torch.arange(20.0).view(5, 4)
    assert part_for(SHAPE, layout) is layout
    assert part_for((5, 4), layout).cut_dims == (0,)
    assert not part_for((3, 1, 4), layout).cut_dims
    first, last = layout.box(layout.partition.me).bounds[2]
    for x in (whole, torch.stack([whole, whole])[0] + 0 * rows[0, 0]):
        mine = as_part(site, x, part_for((5, 4), layout), layout)
        assert torch.equal(mine, whole[first:last])
    assert torch.equal(as_whole(site, rows, layout, "rows"), rows.full_tensor())


@pytest.mark.mpi(min_size=2)
def test_tensors_of_several_partitions_do_not_meet(rows, P_world):
    other = P_world.create_cartesian_topology_partition((1, P_world.size, 1, 1))
    assert common_partition(torch.add, [torch.ones(1), rows]) is rows.partition
    with pytest.raises(PartitionError, match="different partitions meet"):
        common_partition(torch.add, [rows, shard(other, torch.ones(SHAPE))])
    with pytest.raises(PartitionError, match="no split tensor"):
        common_partition(torch.add, [torch.ones(1)])


@pytest.mark.mpi(min_size=2)
def test_copies_are_computed_by_every_rank(rows):
    everywhere = rows.redistribute()
    y = on_whole_tensors(torch.special.airy_ai, (everywhere,), {})
    assert not y.is_split and torch.equal(y.to_local(), torch.special.airy_ai(everywhere.to_local()))
    assert on_whole_tensors(torch.Tensor.fill_, (everywhere, 1.0), {}) is everywhere
    assert torch.equal(on_whole_tensors(torch.histc, (rows,), {}).to_local(), torch.histc(rows.full_tensor()))
    with pytest.raises(UnsupportedError, match="in place that not every rank has all of"):
        on_whole_tensors(torch.Tensor.fill_, (rows, 1.0), {})


def test_gradients_are_needed_where_a_graph_is_recorded(rows):
    weight = torch.ones(1, requires_grad=True)
    assert needs_of(rows, weight) == (False, True, ())
    assert needs_of(rows.requires_grad_()) == (True, False, ())
    with torch.no_grad():
        assert not needs_of(rows, weight).any


def test_operators_of_aten_go_by_the_rules_of_the_functions_that_they_are(P_world):
    aten = torch.ops.aten
    for function in (
        lambda x, y: aten.add.Tensor(x, y, alpha=2),
        lambda x, y: aten.mul(self=x, other=y),
        lambda x, y: aten.where.self(y > 0, x, y),
        lambda x, y: aten.sum.dim_IntList(x, [1], True),
        lambda x, y: aten.add_.Tensor(x.clone(), y),
        lambda x, y: aten.linalg_vector_norm(x, 2, [0]),
        lambda x, y: aten.view.default(x, [20]),
        lambda x, y: aten.embedding.default(x, torch.tensor([2, 0])),
    ):
        check(P_world, function, [torch.randn(4, 5).double().requires_grad_() for _ in range(2)])
    x = shard(P_world.create_cartesian_topology_partition((P_world.size, 1)), torch.ones(4, 5))
    if P_world.size > 1:
        with pytest.raises(UnsupportedError, match="aten"):
            aten._softmax(x, 0, False)


@pytest.mark.parametrize(
    "call",
    [
        lambda x: torch.nn.functional.pixel_shuffle(upscale_factor=1, input=x),
        lambda x: torch.linalg.matrix_rank(hermitian=True, input=x),
        lambda x: torch.roll(shifts=1, input=x),
        lambda x: torch.gather(dim=0, index=torch.zeros(1, 1, 1, 0, dtype=torch.int64), input=x),
        lambda x: torch.index_select(dim=0, index=torch.tensor([0]), input=x),
        lambda x: torch.diff(dim=0, input=x),
        lambda x: torch.reshape(shape=(-1,), input=x.new_ones(2)),
    ],
)
def test_copies_may_be_named(P_world, call):
    x = torch.empty(1, 1, 2, 0)
    check(P_world, call, [x], gradients=False)


@pytest.mark.mpi(min_size=2)
def test_handlers_of_what_is_cut_get_arguments_by_name(rows):
    handler = of_cut()(lambda call, site, x, **given: (call, site.name, x, given))
    call, name, x, given = handler(torch.sum, (rows, 1), {})
    assert call == (torch.sum, (rows, 1), {}) and "sum" in name and x is rows
    assert given == {"dim": 1, "keepdim": False, "dtype": None}
    whole = rows.redistribute()
    assert of_cut(otherwise=lambda func, *_: func)(None)(torch.sum, (whole,), {}) is torch.sum
    assert of_cut(uncut=True)(lambda _, __, x, **___: x)(torch.sum, (whole,), {}) is whole
    assert of_any_cut(lambda _, __, x, other, **___: other)(torch.sub, (whole, rows), {}) is rows


@pytest.mark.mpi(min_size=2)
def test_a_plain_first_tensor_beside_split_ones_may_be_refused(rows):
    whole = rows.full_tensor()
    handler = of_cut(plain="it would be cut")(lambda _, __, x, **___: x)
    with pytest.raises(UnsupportedError, match="it would be cut"):
        handler(torch.sub, (whole, rows), {})
    assert handler(torch.sub, (rows, whole), {}) is rows


def test_all_arguments_of_a_call_become_blocks(rows, site):
    whole, layout = rows.full_tensor(), rows.decomposition
    (x, number), options = as_blocks(site, ((rows, 2), {"other": whole}), layout)
    assert number == 2 and torch.equal(x, options["other"]) and torch.equal(x, rows.to_local())
    assert block_of(rows) is rows.to_local() and block_of(whole) is whole


@pytest.mark.mpi(min_size=2)
def test_a_composition_calls_others_by_their_rules(rows):
    doubled = composition(lambda x, other: x + other)
    y = doubled(torch.maximum, (rows, rows), {})
    assert y.is_split and torch.equal(y.to_local(), 2 * rows.to_local())
    # Of what every rank has all of torch's own function is called.
    whole = rows.redistribute()
    assert torch.equal(doubled(torch.maximum, (whole, whole), {}).to_local(), whole.to_local())
