"""Measures what one engine moves to another: the work and timing of `benchmarks/peerbench.py`."""
