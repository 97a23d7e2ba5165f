"""Text to token ids and back; knows nothing of decoding."""
