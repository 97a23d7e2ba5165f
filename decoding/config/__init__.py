"""Every option once, with its bounds and its default; knows nothing of models or devices."""
