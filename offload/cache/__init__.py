"""What every cache is, static shapes, and the draft's cache; knows nothing of host memory."""
