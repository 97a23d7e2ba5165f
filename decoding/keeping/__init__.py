"""Prompts that were read, on disk: what begins like one of them is not read again."""
