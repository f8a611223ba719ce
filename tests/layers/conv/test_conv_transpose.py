"""Transposed convolutions against the sequential layer."""

import pytest
import torch

from distdl_rma import ShapeError
from tests.layers.twins import Form, Twins, features

pytestmark = pytest.mark.mpi
LINE = Form("ConvTranspose1d", (2, 3, 3, 2), {}, (features,), shape=(1, 2, 5))
IMAGE = Form("ConvTranspose2d", (2, 3, 3, (2, 3), 1), shape=(1, 2, 5, 4))


def test_output_size_may_be_asked_for(P_world, comm):
    twins = Twins(P_world, IMAGE)
    x = twins.draw()
    for size in ((9, 10), (10, 12), [1, 3, 10, 11], torch.Size((9, 11)), None):
        twins.step(x, size)


@pytest.mark.parametrize("size", [(9, 13), (8, 10), (9,), (1, 9, 10)])
def test_impossible_output_size_is_refused_as_torch_does(P_world, comm, size):
    twins = Twins(P_world, IMAGE)
    x = twins.draw()
    with pytest.raises(ValueError, match="output"):
        twins.twin(x, size)
    with pytest.raises(ShapeError, match=f"{twins.layer.name}.*output_size"):
        twins.layer(twins.into(x), size)
    twins.step(x)


@pytest.mark.mpi(min_size=2)
def test_output_size_that_differs_between_ranks_is_told_to_all(P_world, comm):
    twins = Twins(P_world, LINE)
    x = twins.draw()
    with pytest.raises(ShapeError, match=r"alike on all ranks: rank 0 has None but rank 1 \(12,\)"):
        twins.layer(twins.into(x), (12,) if comm.rank == 1 else None)
    twins.step(x, (12,))


def test_output_too_small_is_refused_as_torch_does(P_world, comm):
    twins = Twins(P_world, Form("ConvTranspose1d", (1, 1, 3, 1, 2), {}, (features,), shape=(1, 1, 2)))
    x = twins.draw()
    with pytest.raises(RuntimeError, match="too small"):
        twins.twin(x)
    with pytest.raises(ShapeError, match=r"global input \(2,\) is too small: the output would be \(0,\)"):
        twins.layer(twins.into(x))
