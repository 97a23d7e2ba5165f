"""Layers with a state instead of keys and values: gated delta nets, and their states in a cache."""
