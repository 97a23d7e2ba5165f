"""What a model is, from config.json or GGUF; knows nothing of weights in memory."""
