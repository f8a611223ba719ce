"""Which ranks share statistics; random layers on all ranks check their numbers."""

from distdl_rma.geometry import Decomposition, Partition
from distdl_rma.layers.ops.norm.statistic_groups import NormAxes, StatisticGroups


def test_rows_of_a_group_have_a_weight_each_unless_each_element_has():
    source = Decomposition.balanced(Partition((0,), (1, 1, 1), 0), (2, 6, 5))
    for axes, rows in (
        (NormAxes((0, 2), (1,)), (1, 6, 1)),
        (NormAxes((2,), (1,)), (2, 6, 1)),
        (NormAxes((1, 2), (1,), 3), (2, 6, 1)),
        (NormAxes((1, 2), (1, 2)), (2, 1, 1)),
    ):
        found = StatisticGroups(axes, source, 0)
        assert found.rows == rows
        assert axes.elementwise == (axes.weighted == axes.reduced)


def test_without_groups_the_slab_along_the_reduced_dimensions_shares():
    P_x = Partition(tuple(range(12)), (2, 2, 3), 0)
    source = Decomposition.balanced(P_x, (4, 6, 7))
    batch, layer = NormAxes((0, 2), (1,)), NormAxes((1, 2), (1, 2))
    assert StatisticGroups(batch, source, 4).ranks == (3, 4, 5, 9, 10, 11)
    assert StatisticGroups(layer, source, 4).ranks == (0, 1, 2, 3, 4, 5)
    assert StatisticGroups(batch, source, 4).shape == (1, 3, 1)
    assert StatisticGroups(layer, source, 4).total.item() == 42
    assert layer.instances(3) == (0,)
    assert batch.instances(3) == ()
