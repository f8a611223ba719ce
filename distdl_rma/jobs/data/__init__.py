"""Data of jobs: what goes into split tensors, and what comes out of them."""
