"""Functions along dimensions: reductions, largest elements, softmax, sorting, losses, distances."""
