"""Operations that move tensors between ranks, or combine them, and compute nothing else."""
