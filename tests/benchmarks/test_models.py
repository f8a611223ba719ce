"""Rows of public models: those whose packages are installed."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from benchmarks import memory, models
from benchmarks.public_models import MODELS, PublicModel, training
from benchmarks.results import __main__ as command
from distdl_rma import Machine


class Drawing(nn.Sequential):
    """A model that draws numbers in every step."""

    def __init__(self) -> None:
        super().__init__(nn.Conv2d(1, 4, 3, padding=1), nn.Dropout2d())


CONV = {"in_channels": 1, "out_channels": 2, "kernel_size": 3, "padding": 1}
TINY = PublicModel("convolution", "torch.nn", "Conv2d", CONV, (1, 1, 12, 5), ("torch",))
DRAWS = PublicModel("dropout", __name__, "Drawing", {}, (1, 1, 12, 5), ("torch",))
ABSENT = TINY._replace(packages=("torch", "no_such_package"))


def test_models_are_the_same_whenever_they_are_made_and_images_have_so_many_a_part_of_the_rows():
    first, second = TINY.made(), TINY.made()
    assert torch.equal(first.weight, second.weight)
    assert torch.equal(TINY.image(), TINY.image())
    assert TINY.image(3).shape == (1, 1, 4, 5)
    assert (TINY.extents, TINY.missing, ABSENT.missing) == ("12x5", [], ["no_such_package"])


@pytest.mark.parametrize("name", MODELS)
def test_a_public_model_is_made_and_halves_have_whole_rows(name):
    model = MODELS[name]
    if model.missing:
        pytest.skip(f"{model.missing} is not installed")
    assert list(model.made().parameters())
    assert model.shape[2] % 4 == 0


def test_a_step_trains():
    model = TINY.made()
    before = model.weight.detach().clone()
    training(model, TINY.image())()
    assert not torch.equal(model.weight, before)


@pytest.mark.mpi
@pytest.mark.sizes(1, 2, 3, 4)
@pytest.mark.processes
def test_a_model_has_rows_against_its_tile_and_one_process_and_none_without_its_package(
    comm, monkeypatch, capsys
):
    monkeypatch.setattr(models, "MODELS", {"tiny": TINY, "absent": ABSENT, "draws": DRAWS})
    monkeypatch.setattr(models, "REPETITIONS", {2: 2})
    with Machine(comm) as machine:
        rows = list(models.rows(machine))
    found = [(row.what, row.baseline) for row in rows]
    assert found == [
        (f"model {title}, 12x5, training step", baseline)
        for title in ("convolution", "dropout")
        for baseline in ("bare local tile", f"one process, {comm.size} threads")
    ]
    assert {command.section_of(what) for what, _ in found} == {"models"}
    told = capsys.readouterr().err
    assert ("no rows of absent: no_such_package is not installed" in told) == (comm.rank == 0)


@pytest.mark.mpi
@pytest.mark.sizes(1, 2, 3)
def test_memory_is_compared_with_that_of_the_tile_and_of_one_process(comm, monkeypatch):
    asked = []

    def alone(*arguments, processes):
        asked.append(arguments)
        return float(arguments[1]), 0.5

    monkeypatch.setattr(models, "MODELS", {"tiny": TINY})
    monkeypatch.setattr(memory, "alone_mib", alone)
    with Machine(comm) as machine:
        rows = list(models.memory_rows("tiny", machine))
    assert [(row.baseline, row.baseline_us, row.unit) for row in rows] == [
        ("bare local tile", float(comm.size), "MiB"),
        ("one process", 1.0, "MiB"),
    ]
    everyones = [each for some in comm.allgather(asked) for each in some]
    assert sorted(everyones) == sorted([("tiny", "1"), ("tiny", str(comm.size))])
