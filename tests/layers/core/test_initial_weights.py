"""Parameters drawn in parts are those of torch, bit by bit, and so is the generator afterwards."""

import pytest
import torch
from torch import nn

from distdl_rma import Partition
from distdl_rma.geometry import Decomposition
from distdl_rma.layers.core.initial_weights import linear_values


@pytest.mark.parametrize(("inputs", "outputs"), [(5, 7), (1, 1), (300, 700), (0, 3), (3, 0), (70000, 2)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_every_part_is_that_of_torchs_layer(inputs, outputs, dtype):
    torch.manual_seed(3)
    with pytest.warns(UserWarning, match="zero-element") if 0 in (inputs, outputs) else torch.no_grad():
        layer = nn.Linear(inputs, outputs, dtype=dtype)
    after = torch.get_rng_state()
    for me in range(5):
        torch.manual_seed(3)
        values = linear_values(inputs, outputs, True, dtype)
        P = Partition((0, 1, 2, 3), (2, 2), me)
        store = Decomposition.balanced(P, (outputs, inputs))
        part = values["weight"].cut(store)
        expected = layer.weight[store.slices()] if P.active else layer.weight.new_empty(0)
        assert torch.equal(part, expected) and part.dtype == dtype
        whole = Decomposition.replicated(Partition((me,), (1,), me), (outputs,))
        assert torch.equal(values["bias"].cut(whole), layer.bias)
        assert torch.equal(torch.get_rng_state(), after)


def test_without_a_bias_none_is_drawn():
    assert linear_values(2, 3, False, None)["bias"] is None
