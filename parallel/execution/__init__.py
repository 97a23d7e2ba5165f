"""Forwards: batched, captured, and on all ranks; knows nothing of tokens drawn."""
