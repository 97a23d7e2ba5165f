"""Shared parts of benchmarks: texts, options, subprocesses, documents, tables."""
