"""The published experiments, reproduced."""
