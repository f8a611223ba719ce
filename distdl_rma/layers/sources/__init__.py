"""Arrays that lie outside of the process: a box of them is read as a tensor, and nothing else."""
