"""16-bit elements as high byte and low bits, and int8; independent of caches and devices."""
