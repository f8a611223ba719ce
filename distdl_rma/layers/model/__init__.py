"""Whole models on split tensors: distribute one, compare it with the same model alone, report its costs."""
