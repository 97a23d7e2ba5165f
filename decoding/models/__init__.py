"""Loaded models and the memory they share; knows nothing of requests."""
