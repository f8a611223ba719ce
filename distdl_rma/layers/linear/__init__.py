"""Distributed linear layers."""
