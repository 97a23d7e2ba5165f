"""Tensor parallelism: process group, sharded Llama-family model, weight loading, launch. Knows
nothing of sampling or drafts.
"""
