"""Normalisation of split tensors."""
