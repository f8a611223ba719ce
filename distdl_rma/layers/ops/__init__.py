"""Distributed operators on tensors whose decompositions are known; no parameters, no modules."""
