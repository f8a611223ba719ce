"""Distributed pooling, padding and resizing."""
