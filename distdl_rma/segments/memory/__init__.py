"""Buffers in segments; puts, gets and notifications in the buffers of peers."""
