"""Tensor parallelism: process group, sharded models, loading and launch.

It knows nothing of sampling or drafts.
"""
