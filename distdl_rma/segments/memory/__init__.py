"""Buffers in the segments, and what puts, gets and notifies in those of peers."""
