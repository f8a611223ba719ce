"""Collectives of large vectors, whole or in pieces."""

from __future__ import annotations

import pytest

from distdl_rma.segments.collectives import between_nodes


@pytest.fixture
def tiny(monkeypatch):
    """Pieces of a few elements."""
    monkeypatch.setattr(between_nodes, "_LEAST_NBYTES", 40)
    monkeypatch.setattr(between_nodes, "_LEAST_OF_NODE", 1)


@pytest.fixture(params=["whole", "in pieces"])
def cut(request):
    """Vectors travel whole between nodes, and once more in pieces of a few elements."""
    if request.param == "in pieces":
        request.getfixturevalue("tiny")
