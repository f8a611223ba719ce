"""Rules of a user's own, for functions and modules."""

import pytest
import torch
from torch import nn

from distdl_rma import ArgumentError, SplitTensor, register, shard


@pytest.mark.mpi
@pytest.mark.sizes(2, 3)
def test_rules_of_a_users_own(P_world):
    x = torch.randn(2, 3, 13, 11, dtype=torch.float64)

    class Mine(nn.Module):
        def forward(self, x):
            return x.untyped_storage()

    def doubled(module, x):
        return SplitTensor.from_local(x.to_local() * 2, x.partition)

    register(Mine, doubled)
    register(
        torch.special.spherical_bessel_j0,
        lambda function, x: SplitTensor.from_local(function(x.to_local()), x.partition),
    )
    P_x = P_world.create_cartesian_topology_partition((1, 1, P_world.size, 1))
    s = shard(P_x, x)
    torch.testing.assert_close(Mine()(s).full_tensor(), x * 2)
    torch.testing.assert_close(
        torch.special.spherical_bessel_j0(s).full_tensor(), torch.special.spherical_bessel_j0(x)
    )


def test_what_has_no_rule_is_refused():
    with pytest.raises(ArgumentError, match="takes a function or a class"):
        register(3, lambda: None)
