"""Sharded layers and the transformer built from them; independent of tiers and sampling."""
