"""A folder of checkpoints, and what saves there."""

from pathlib import Path

import pytest

from distdl_rma import Checkpoints


@pytest.fixture
def folder(comm, tmp_path):
    """The same on all ranks, not there yet."""
    return Path(comm.bcast(str(tmp_path))) / "run"


@pytest.fixture
def kept(P_world, folder):
    with Checkpoints(folder, machine=P_world) as kept:
        yield kept
