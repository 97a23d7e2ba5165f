"""Fused kernels, their self-tests, and batch-invariant attention; knows nothing of caches."""
