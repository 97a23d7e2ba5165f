"""Locating and reading checkpoints; independent of layers and ranks."""
