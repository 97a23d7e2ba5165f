"""Documents in, records out, on this machine or a cluster of them."""
