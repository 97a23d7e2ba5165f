"""Tensor parallelism: process group, sharded models of the Llama family, loading and launch.

It knows nothing of sampling or drafts.
"""
