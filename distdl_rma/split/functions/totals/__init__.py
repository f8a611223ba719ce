"""Functions along dimensions: reductions, softmax, sorting, Fourier transforms, losses, distances."""
