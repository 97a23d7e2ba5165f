"""16-bit elements split in two, and int8; knows nothing of caches or devices."""
