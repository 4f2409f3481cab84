"""Measures what one engine moves to another: the work and the timing of `benchmarks/peerbench.py`, through TENT."""
