"""Tensor parallelism: process group, sharded models, loading and launch.

It does not depend on sampling or drafting.
"""
