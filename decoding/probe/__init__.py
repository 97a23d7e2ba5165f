"""Hardware survey and benchmarks of this machine."""
