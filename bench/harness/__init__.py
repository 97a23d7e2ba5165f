"""Shared parts of benchmarks: prompts, options, subprocesses, documents, tables."""
