"""Losses of split tensors."""
