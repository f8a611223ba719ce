"""Segment managers over every kind of nodes, as for the tests of segments."""

from tests.segments.conftest import segments

__all__ = ["segments"]
