"""Sums of products: linear maps, functions of matrices, attention, recurrent layers."""
