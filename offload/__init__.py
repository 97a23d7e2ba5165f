"""Memory tiers: attention over split KV, caches, host store, transfer ring, memory plan.

Nothing here knows of models, tokens or ranks.
"""
