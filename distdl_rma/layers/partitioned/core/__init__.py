"""What layers with explicit partitions share: arguments, agreement, parameters, errors on all ranks."""
