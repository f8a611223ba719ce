"""Tests on a real GPU: `make test-gpu` names this folder, other runs leave it out."""

from pathlib import Path

import pytest
import torch


def pytest_ignore_collect(collection_path, config):
    """Whether no argument names the folder."""
    here = Path(__file__).parent
    named = any(Path(each).resolve().is_relative_to(here) for each in config.args)
    return None if named else True


@pytest.fixture
def device():
    """The first card, which all ranks share."""
    if not torch.cuda.is_available():
        pytest.skip(f"torch {torch.__version__} sees no GPU")
    return torch.device("cuda", 0)
