"""Convolutions of split tensors."""
