"""Sharded layers and the transformer made of them; knows nothing of tiers or sampling."""
