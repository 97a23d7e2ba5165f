"""Predictions and plans, held against what happens."""
