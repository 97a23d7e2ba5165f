"""Memory tiers: attention over split KV, caches, host store, transfer ring, memory plan. Knows
nothing of models or ranks.
"""
