"""The commands `tierforce plan` and `tierforce probe`, and their tables."""
