"""Reproduction of the published experiments."""
