"""Capture of the operations behind a model's call, and their replay without the rules of functions."""
