"""Sums of products: linear maps, attention, Fourier transforms."""
