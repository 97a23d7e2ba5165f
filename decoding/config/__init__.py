"""All options, with their bounds and defaults; knows nothing of models or devices."""
