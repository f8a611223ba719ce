"""Checkpoints of a training job: one directory that knows no ranks, written and read by all of them."""
