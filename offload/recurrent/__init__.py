"""Layers with a state instead of keys and values: their recurrences, and states in a cache."""
