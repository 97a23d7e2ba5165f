"""Fused kernels, their self-tests, and batch-invariant attention; independent of caches."""
