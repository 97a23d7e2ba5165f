"""Processes, collectives, and who holds what; knows nothing of models."""
