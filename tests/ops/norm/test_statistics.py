"""Mean and variance over ranks are those of all elements together, whichever way the sums go."""

import pytest
import torch

from distdl_rma import Machine
from distdl_rma.geometry import Decomposition
from distdl_rma.ops.core.movement import CallSite
from distdl_rma.ops.norm import statistics
from distdl_rma.ops.norm.statistic_groups import NormAxes, StatisticGroups
from distdl_rma.ops.norm.statistics import Statistics

pytestmark = pytest.mark.mpi


@pytest.mark.parametrize(("nbytes", "few"), [(1 << 20, 4), (1 << 20, 1), (0, 1)])
@pytest.mark.parametrize("centred", [True, False])
@pytest.mark.parametrize("offset", [0, 50])
def test_moments_are_those_of_the_whole_tensor_and_bitwise_alike(
    P_world, comm, monkeypatch, nbytes, few, centred, offset
):
    monkeypatch.setattr(statistics, "_ROUND_NBYTES", nbytes)
    monkeypatch.setattr(statistics, "_FEW_RANKS", few)
    machine, axes = Machine.of(P_world), NormAxes((0, 2), (1,))
    P_x = P_world.create_cartesian_topology_partition((1, 1, comm.size))
    source = Decomposition.balanced(P_x, (2, 3, 11))
    groups = StatisticGroups(axes, source, machine.rank)
    found = Statistics(CallSite(machine, "test"), groups, centred)
    found.connect()
    for _ in range(3):
        x = torch.randn(2, 3, 11, dtype=torch.float64) + offset
        mean, variance, shifted = found.of(x[source.slices()], lambda kind: None)
        mean, variance = map(torch.from_numpy, (mean, variance))
        expected = x.mean((0, 2), keepdim=True) if centred else torch.zeros(1, 3, 1, dtype=torch.float64)
        torch.testing.assert_close(mean, expected)
        torch.testing.assert_close(variance, (x - expected).square().mean((0, 2), keepdim=True))
        if offset or not centred:
            assert (shifted is not None) == centred
        assert len(set(comm.allgather(str((mean.tolist(), variance.tolist()))))) == 1
        pair = found.pair()
        for values in pair:
            assert values.shape == (1, 3, 1)
            values[...] = comm.rank + 1.0
        total = comm.size * (comm.size + 1) / 2
        assert all(set(sums.flatten().tolist()) == {total} for sums in found.sum(pair)())


@pytest.mark.parametrize("mean", [0, 1, 1.9, 2.1, 40, 1000])
def test_a_variance_is_exact_in_single_precision_whatever_the_mean(P_world, comm, mean):
    machine, axes = Machine.of(P_world), NormAxes((1, 2), (1,), 2)
    P_x = P_world.create_cartesian_topology_partition((1, 1, comm.size))
    source = Decomposition.balanced(P_x, (2, 6, 9001))
    found = Statistics(CallSite(machine, "test"), StatisticGroups(axes, source, machine.rank), centred=True)
    x = torch.randn(2, 6, 9001) + mean
    mean, variance, _ = found.of(x[source.slices()].contiguous(), lambda kind: None)
    of_groups = x.double().view(2, 2, -1)
    torch.testing.assert_close(torch.from_numpy(mean)[..., 0], of_groups.mean(2), rtol=1e-7, atol=2e-7)
    expected = of_groups.var(2, correction=0)
    torch.testing.assert_close(torch.from_numpy(variance)[..., 0], expected, rtol=5e-7, atol=0)


def test_a_direction_has_memory_from_its_first_use(P_world, comm):
    machine, axes = Machine.of(P_world), NormAxes((2,), (1,))
    P_x = P_world.create_cartesian_topology_partition((1, 1, comm.size))
    source = Decomposition.balanced(P_x, (2, 3, 11))
    comm.Barrier()
    before = machine.segments.stats().used
    found = Statistics(CallSite(machine, "test"), StatisticGroups(axes, source, machine.rank), centred=True)
    assert machine.segments.stats().used == before
    found.of(torch.randn(2, 3, 11)[source.slices()], lambda kind: None)
    forward = machine.segments.stats().used
    assert (forward > before) == (comm.size > 1)
    found.sum(found.pair())()
    assert (machine.segments.stats().used > forward) == (comm.size > 1)
