"""Rank processes, collectives, and partitioning; independent of models."""
