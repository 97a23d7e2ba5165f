"""Prompts that were prefilled, on disk; knows nothing of decoding."""
