"""Calls of functions of torch: their rules, where they stand in a program, and what they are told."""
