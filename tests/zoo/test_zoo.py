"""The page of public models has what the list has, and some of them are tried here."""

import re

import pytest

from tests.zoo.page import OUTCOMES, PAGE, read, written
from tests.zoo.zoo import compared, models

HERE = ("monai/BasicUNet", "monai/VoxelMorph", "torchvision/squeezenet1_1", "torchvision/VisionTransformer")


def test_the_page_has_a_row_for_each_model_of_the_list():
    assert list(read()) == [model.path for model in models()], "run python -m tests.zoo"
    assert all(found.outcome in OUTCOMES for found in read().values())
    # Versions are those of the environment in which the models were tried.
    page, ours = (
        re.sub(r"torch \d+\.\d+\.\d+", "torch", text) for text in (PAGE.read_text(), written(read()))
    )
    assert page == ours, "run python -m tests.zoo"


def test_names_are_unique_and_the_readme_counts_them():
    paths = [model.path for model in models()]
    assert len({*paths}) == len(paths) >= 60
    exact = sum(found.outcome == "exact" for found in read().values())
    assert f"{exact} of {len(paths)}" in (PAGE.parents[1] / "README.md").read_text()


@pytest.mark.mpi
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("path", HERE)
def test_models_are_what_the_page_says(path):
    (model,) = (each for each in models() if each.path == path)
    found = compared(model)
    assert found.outcome == read()[path].outcome, found
