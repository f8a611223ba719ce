"""What splitting a network gains: time and memory of a training step, beside one process."""
