"""Helpers that tests share: checkpoints, engines, links, references, statistics, and commands."""
