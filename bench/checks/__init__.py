"""Predictions, plans and outputs compared with measurements."""
