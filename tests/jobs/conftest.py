"""What tests of jobs share."""

from pathlib import Path

import pytest


@pytest.fixture
def folder(comm, tmp_path):
    """One folder for all ranks."""
    return Path(comm.bcast(str(tmp_path)))
