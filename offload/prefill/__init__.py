"""Filling the target's cache: with a prompt, or with the beginning of another cache."""
