"""Streams, signals, files and progress, as a person at a terminal sees them."""
