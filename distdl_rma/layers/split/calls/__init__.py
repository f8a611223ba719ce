"""Calls of functions of torch: their rules, their places in the user's program, and their arguments."""
