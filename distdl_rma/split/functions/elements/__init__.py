"""Functions of single elements: pointwise functions, random numbers, new tensors, queries."""
