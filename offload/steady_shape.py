"""How large the blocks are in which rows and keys are computed (`offload.steady`)."""

WIDTH = 8  # rows of a block
KEYS = 2048  # keys of a block; WIDTH divides it
