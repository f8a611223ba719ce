"""Pooling, padding and resizing of split tensors."""
