"""Where weights lie and how they are read; knows nothing of layers or ranks."""
