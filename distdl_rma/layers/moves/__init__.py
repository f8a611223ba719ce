"""Layers that move tensors, or combine them, between partitions."""
