"""Padding of tensors of known decompositions."""

import pytest
import torch
from torch.nn import functional as F  # noqa: N812

from distdl_rma import ShapeError
from distdl_rma.ops.windows import Padding, PadOptions
from tests.ops.windows.known_input import equals_sequential, operation_on, rows

pytestmark = pytest.mark.mpi
MODES = {"zeros": "constant", "constant": "constant", "reflect": "reflect", "replicate": "replicate"}


@pytest.mark.parametrize("mode", [*MODES, "circular"])
@pytest.mark.parametrize("sides", [((2, 1), (0, 3)), ((0, 0), (0, 0)), ((4, 4), (-1, -2))])
def test_padding_is_that_of_the_whole(P_world, mode, sides):
    def reference(x):
        given = [side for pair in sides[::-1] for side in pair]
        value = {"value": 2.5} if mode == "constant" else {}
        return F.pad(x, given, MODES.get(mode, mode), **value)

    x = torch.randn(2, 3, 7, 6, dtype=torch.float64)
    equals_sequential(rows(P_world, 2), Padding, PadOptions(sides, mode, 2.5), x, reference)


def test_elements_of_any_type_are_padded(P_world):
    operation, source = operation_on(rows(P_world), Padding, PadOptions(((1, 1),)), (1, 1, 5), torch.bool)
    assert operation.dtype == torch.bool
    assert operation.output.shape == (1, 1, 7)
    assert source.shape == (1, 1, 5)


@pytest.mark.parametrize("mode", ["zeros", "replicate"])
def test_what_would_leave_nothing_is_refused(P_world, mode):
    with pytest.raises(
        ShapeError, match=r"padding \(0, 0, -3, -3\) leaves \(-2, 4\) of the global input \(4, 4\)"
    ):
        operation_on(rows(P_world, 2), Padding, PadOptions(((-3, -3), (0, 0)), mode), (1, 1, 4, 4))
