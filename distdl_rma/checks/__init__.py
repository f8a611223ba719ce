"""Comparison of ranks: the compared state, and the error that all ranks raise if it differs."""
