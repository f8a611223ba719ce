"""Whole models on split tensors: distribute one, compare it with itself alone, report what it costs."""
