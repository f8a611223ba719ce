"""Distributed losses."""
