"""Benchmarks: ratios of this library to an honest baseline, measured in one run."""
