"""Benchmarks: `python -m bench NAME` prints a table and writes one JSON document."""
