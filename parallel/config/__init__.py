"""Model configurations, read from config.json or GGUF; independent of weights in memory."""
