"""Characters to tokens and back; knows nothing of decoding."""
