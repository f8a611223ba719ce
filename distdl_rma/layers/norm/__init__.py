"""Distributed normalisation."""
