"""Collectives of some ranks: reductions, gathers, broadcasts, barriers."""
