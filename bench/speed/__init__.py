"""Times of passes, refreshes, transfers, prefill and decoding."""
