"""Distributed convolutions."""
