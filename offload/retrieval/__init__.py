"""The cache of selected chunks, and what selects them; knows nothing of tiers."""
