"""Times of forwards, selections, transfers, prefill and decoding."""
