"""The cache of selected chunks and its selection policies; independent of the tiers."""
