"""Capture of the operations behind a model's call, and their compiled replay without the rules of functions."""
