"""How steps scale: measured on one and two ranks, and from measured constants for thousands."""
