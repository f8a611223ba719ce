"""compare() finds what differs, and where, and leaves both models as they were."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812

from distdl_rma import ConfigurationError, compare, register
from distdl_rma.layers.split import SplitTensor
from tests.layers.split.against_whole import called

pytestmark = pytest.mark.mpi

SHAPE = (2, 3, 12, 11)


class Odd(nn.Module):
    """Adds one, and by its own rule something else in some rows."""

    def forward(self, x):
        return x + 1


def odd_rows(module, x):
    local = x.to_local() + 1
    first = x.decomposition.box(x.partition.me).start[2]
    rows = torch.arange(first, first + local.shape[2])
    return SplitTensor.from_local(local + 0.1 * (rows == 7).view(-1, 1), x.partition)


@pytest.fixture
def models(split_of):
    torch.manual_seed(4)
    convolutions = nn.Conv2d(3, 4, 3, padding=1), nn.Conv2d(4, 2, 3, padding=1)
    alone = nn.Sequential(convolutions[0], nn.BatchNorm2d(4), nn.ReLU(), convolutions[1])
    return alone, split_of(alone)


@pytest.mark.sizes(1, 2, 3, 4)
def test_equal_models_are_equal_and_stay_what_they_were(models):
    alone, split = models
    before = {key: value.clone() for key, value in split.state_dict().items()}
    state = torch.get_rng_state()
    x = torch.randn(SHAPE)
    torch.set_rng_state(state)
    found = compare(alone, split, x, torch.zeros(2, 2, 12, 11), F.mse_loss)
    assert found.equal, str(found)
    kinds = {"output", "loss", "input gradient", "gradient", "buffer"}
    assert {each.what for each in found.differences} == kinds
    assert all(torch.equal(value, before[key]) for key, value in split.state_dict().items())
    assert all(p.grad is None for model in models for p in model.parameters())
    assert torch.equal(torch.get_rng_state(), state)
    first, *shown = str(found).splitlines()
    assert first == f"all {len(found.differences)} tensors are equal up to rounding"
    assert len(found.table().splitlines()) == 1 + len(found.differences) > len(shown)


def test_outputs_that_are_changed_in_place_are_compared_as_they_came(split_of):
    torch.manual_seed(4)
    alone = nn.Sequential(nn.Conv2d(3, 4, 3, padding=1), nn.InstanceNorm2d(4), nn.LeakyReLU(inplace=True))
    found = compare(alone, split_of(alone), torch.randn(SHAPE))
    assert found.equal, str(found)


@pytest.mark.sizes(1, 2, 3)
def test_the_first_module_that_differs_and_its_rows(models, split_of):
    register(Odd, odd_rows)
    alone = nn.Sequential(*models[0][:2], Odd(), models[0][3])
    found = compare(alone, split_of(alone), torch.randn(SHAPE))
    assert (found.first.what, found.first.name) == ("output", "2")
    assert found.first.where[2] == (7, 8)
    assert not found.equal


class Counted(nn.Module):
    """Returns what it is told of named inputs, and counts its calls in a buffer that no state has."""

    def __init__(self, function):
        super().__init__()
        self.function, self.weight = function, nn.Parameter(torch.rand(3, 1, 1))
        self.register_buffer("calls", torch.zeros(()), persistent=False)
        self.register_buffer("last", None, persistent=False)

    def forward(self, inputs):
        self.calls = self.calls + 1
        return {"y": self.function(inputs["x"] * self.weight + self.calls)}


@pytest.mark.parametrize("function", [torch.tanh, torch.fft.fft, called(torch.argmax, 1)])
def test_named_inputs_other_types_of_outputs_and_buffers_that_are_not_saved(split_of, function):
    torch.manual_seed(4)
    alone = Counted(function)
    split, x = split_of(alone), torch.randn(SHAPE)
    split({"x": x})
    found = compare(alone, split, ({"x": x},))
    assert found.equal, str(found)
    assert (alone.calls, split.calls) == (0, 1)
    assert "buffer" in {each.what for each in found.differences}


class Versioned(nn.Conv2d):
    """Loads states of its own version only."""

    _version = 2

    def _load_from_state_dict(self, state, prefix, metadata, *others):
        assert metadata.get("version") == 2
        super()._load_from_state_dict(state, prefix, metadata, *others)


def test_versions_of_modules_are_kept(split_of):
    assert compare(Versioned(3, 2, 3), split_of(Versioned(3, 2, 3)), torch.randn(SHAPE)).equal


class Modulated(nn.Module):
    """An image, scaled by what a layer makes of words."""

    def __init__(self):
        super().__init__()
        self.scale = nn.Linear(5, 3)

    def forward(self, x, words):
        return x * self.scale(words)[:, :, None, None]


def test_inputs_that_are_not_cut_are_data(split_of):
    found = compare(Modulated(), split_of(Modulated()), (torch.randn(SHAPE), torch.randn(2, 5)))
    assert found.equal, str(found)
    assert [each.name for each in found.differences if each.what == "input gradient"] == ["input 0"]


@pytest.mark.mpi(min_size=2)
def test_parameters_that_drifted_apart_are_named(models, comm):
    alone, split = models
    with torch.no_grad():
        split[3].bias += comm.rank
    found = compare(alone, split, torch.randn(SHAPE))
    assert "3.bias" in found.drifted


def test_models_in_the_wrong_order_are_refused(models):
    with pytest.raises(ConfigurationError, match="alone first"):
        compare(models[1], models[0], torch.randn(SHAPE))
