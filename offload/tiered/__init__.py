"""The target's cache, layer by layer, over device and host; knows nothing of models."""
