"""Predictions and plans compared with measurements."""
