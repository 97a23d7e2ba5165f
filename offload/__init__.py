"""Memory tiers: attention over split KV, caches, host store, transfer ring, memory plan.

This package is independent of models, tokens and ranks.
"""
